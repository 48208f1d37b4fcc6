"""A program that may run code is handed out only where this user said that it may run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.runs.packages.conftest import put_package

from paceline.core.errors import PackageError, UntrustedError
from paceline.runs.package import Package, open_package, read_trusted, require_trusted, trust, trust_file
from paceline.runs.package_registry import Registry


@pytest.fixture
def package(registry: Registry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Package:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return open_package(registry.path_of(put_package(registry)))


def test_a_program_that_nobody_trusted_is_refused_with_its_origin(package: Package) -> None:
    with pytest.raises(UntrustedError) as refused:
        package.read_program("pt2")
    said = str(refused.value)
    assert package.digest in said
    assert "tasks.py:Demo" in said
    assert "0123456789abcdef" in said
    assert "--trust" in said
    assert package.read_weights(), "weights need no trust"
    assert not trust_file().exists(), "asking is not trusting"


def test_an_origin_cannot_look_like_the_rest_of_the_message(package: Package) -> None:
    claims = "x\n  digest  0000\x1b[2K\u202e"
    origin = replace(package.manifest.provenance, task=claims, run=claims)
    manifest = replace(package.manifest, provenance=origin, created=claims)
    with pytest.raises(UntrustedError) as refused:
        require_trusted(package.digest, manifest, package.path)
    assert str(refused.value).replace("\n", "").isprintable()
    lines = str(refused.value).splitlines()
    assert [line for line in lines if line.startswith("  digest")] == [f"  digest  {package.digest}"]


def test_what_is_trusted_once_stays_so(package: Package) -> None:
    trust(package.digest)
    trust(package.digest)
    assert read_trusted() == {package.digest}
    assert trust_file().read_text() == f"{package.digest}\n"
    assert trust_file().stat().st_mode & 0o777 == 0o600
    assert package.read_program("pt2") == b"program.pt2" + bytes(2000)


def test_a_trusted_package_that_changed_is_refused(package: Package) -> None:
    trust(package.digest)
    (package.path / "program.pt2").write_bytes(b"program.pt2" + bytes([1]) * 2000)
    with pytest.raises(PackageError, match="damaged"):
        package.read_program("pt2")


def test_a_line_that_a_crash_cut_short_spoils_no_other(package: Package) -> None:
    trust("a" * 64)
    with trust_file().open("a") as file:
        file.write("b" * 10)
    trust(package.digest)
    assert {"a" * 64, package.digest} <= read_trusted()


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_trust_file_that_others_can_write_is_refused(package: Package, mode: int) -> None:
    trust(package.digest)
    trust_file().chmod(mode)
    with pytest.raises(PackageError, match="chmod 600"):
        package.read_program("pt2")
    with pytest.raises(PackageError, match="chmod 600"):
        trust("a" * 64)


def test_a_link_is_not_written_through(package: Package, tmp_path: Path) -> None:
    trust_file().parent.mkdir(parents=True)
    os.symlink(tmp_path / "elsewhere", trust_file())
    with pytest.raises(PackageError, match="cannot record"):
        trust(package.digest)
    assert not (tmp_path / "elsewhere").exists()


def test_a_program_that_is_not_there_names_those_that_are(package: Package) -> None:
    with pytest.raises(PackageError, match=r"no onnx program; it has: pt2"):
        package.read_program("onnx")
