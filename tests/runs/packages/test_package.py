"""What is opened is what was written; anything else is refused, by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runs.packages.conftest import manifest_of, put_package

from paceline.core.errors import PackageError
from paceline.runs.checkpoint_manifest import MANIFEST, FileRecord, canonical_json
from paceline.runs.package import open_package
from paceline.runs.package_manifest import PackageManifest
from paceline.runs.package_registry import Registry, parse_reference

FILES = ["weights.safetensors", "program.pt2", "README.md"]


@pytest.fixture
def package(registry: Registry) -> Path:
    return registry.path_of(put_package(registry))


def test_a_package_comes_back_as_it_was_written(registry: Registry, package: Path) -> None:
    opened = open_package(package)
    assert opened.digest == package.name
    assert list(opened.manifest.inputs) == ["x", "a"], "the order of a program's arguments"
    assert list(opened.manifest.outputs["size"].columns) == ["width", "height"], "the order of the elements"
    assert opened.manifest == manifest_of(files=opened.manifest.files)
    assert opened.read_weights() == b"weights.safetensors" + bytes(2000)
    assert PackageManifest.from_bytes(opened.manifest.to_bytes()) == opened.manifest


def test_every_byte_is_read_and_told(package: Path) -> None:
    told: list[int] = []
    opened = open_package(package, on_read=told.append)
    assert sum(told) == opened.manifest.size_bytes


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_changed_byte_is_found(package: Path, name: str) -> None:
    content = bytearray((package / name).read_bytes())
    content[len(content) // 2] ^= 1
    (package / name).write_bytes(content)
    with pytest.raises(PackageError, match=name):
        open_package(package)


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_truncated_file_is_found(package: Path, name: str) -> None:
    content = (package / name).read_bytes()
    (package / name).write_bytes(content[:-10])
    with pytest.raises(PackageError, match=name):
        open_package(package)


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_missing_file_is_found(package: Path, name: str) -> None:
    (package / name).unlink()
    with pytest.raises(PackageError, match=f"{name} is missing"):
        open_package(package)


def test_a_file_that_nobody_listed_is_refused(package: Path) -> None:
    (package / "extra.py").write_text("print('hello')")
    with pytest.raises(PackageError, match=r"'extra\.py' is not in its manifest\.json"):
        open_package(package)


def _link(path: Path) -> None:
    elsewhere = path.with_suffix(".elsewhere")
    path.rename(elsewhere.parent.parent / elsewhere.name)
    path.symlink_to(elsewhere.parent.parent / elsewhere.name)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("replace", [_link, _fifo, _directory])
def test_only_plain_files_are_read(package: Path, replace: Callable[[Path], None]) -> None:
    replace(package / "program.pt2")
    with pytest.raises(PackageError, match=r"program\.pt2"):
        open_package(package)


def test_a_file_that_changes_after_it_was_verified_is_not_handed_out(package: Path) -> None:
    opened = open_package(package)
    (package / "weights.safetensors").write_bytes(b"weights.safetensors" + bytes([1]) * 2000)
    with pytest.raises(PackageError, match=r"weights\.safetensors is damaged"):
        opened.read_weights()
    with pytest.raises(PackageError, match="has no file 'other'"):
        opened.read("other")


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/passwd", "a/b", "..", ".hidden", "", MANIFEST, "a\\b", "n\0ul", "x" * 200]
)
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    record = FileRecord(1, "0" * 64)
    with pytest.raises(PackageError, match="not a plain file name"):
        PackageManifest.from_bytes(manifest_of(files={name: record}).to_bytes())


WRONG: list[tuple[str, Any, str]] = [
    ("name", "../up", "name must be"),
    ("name", 3, r"Expected `str`, got `int` - at `\$\.name`"),
    ("format", 2, "format 2"),
    ("inputs", [], "inputs is empty"),
    ("inputs", [{"name": "x", "dtype": "float33", "shape": []}], "Invalid enum value 'float33'"),
    ("inputs", [{"name": "x", "dtype": "int8", "shape": [0]}], r"inputs\[0\]\.shape"),
    ("inputs", [{"name": "x", "dtype": "int8", "shape": []}] * 2, "twice"),
    ("inputs", [{"name": "x", "dtype": "int8", "shape": [], "minimum": None}], "canonical"),
    ("inputs", [{"name": "x", "dtype": "int8", "shape": [], "maximum": 1.5}], r"inputs\[0\]\.maximum"),
    ("inputs", [{"name": "x", "dtype": "int8", "shape": [], "unit": "m"}], "unknown field `unit`"),
    ("outputs", [{"name": "y", "dtype": "int8", "shape": [], "unit": 3}], r"outputs\[0\]\.unit"),
    ("outputs", [{"name": "y", "dtype": "int8", "shape": [2], "columns": [{"name": "a", "unit": ""}]}], "1 columns"),
    ("outputs", [{"name": "y", "dtype": "int8", "shape": [2], "columns": [{"name": "a", "unit": ""}] * 2}], "twice"),
    ("labels", "yes", "Expected `array`"),
    ("label", "other", "which is not an output"),
    ("metrics", {"accuracy": "high"}, "Expected `float`"),
    ("metrics", {"accuracy": 10**400}, "out of range"),
    ("programs", {"pt2": "gone.pt2"}, "not in its files"),
    ("programs", {"tf": "program.pt2"}, "known are pt2, onnx"),
    ("weights", "gone.safetensors", "not in its files"),
    ("provenance", None, r"Expected `object`, got `null` - at `\$\.provenance`"),
    ("differences", {"pt2": {"largest": 0, "equal_labels": 2, "samples": 1}}, "<= 1.0"),
    ("surprise", 1, "unknown field `surprise`"),
]


@pytest.mark.parametrize(("field", "value", "message"), WRONG)
def test_every_field_is_checked(package: Path, field: str, value: Any, message: str) -> None:
    document = json.loads((package / MANIFEST).read_bytes())
    (package / MANIFEST).write_bytes(canonical_json({**document, field: value}))
    with pytest.raises(PackageError, match=message):
        open_package(package)


def test_a_run_is_to_be_exported_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.toml").touch()
    monkeypatch.chdir(tmp_path)
    for location in (tmp_path / "run", "run"):  # a path, and what could be a name
        with pytest.raises(PackageError, match=r"run is a run\. Export it first: paceline export "):
            open_package(location)


def test_a_field_that_is_missing_is_named(package: Path) -> None:
    document = json.loads((package / MANIFEST).read_bytes())
    for field in document:
        rest = {name: value for name, value in document.items() if name != field}
        with pytest.raises(PackageError, match=field):
            PackageManifest.from_bytes(canonical_json(rest))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"[]", "Expected `object`"),
        (b'{"format": 1, "format": 1}', "twice"),
        (b'{"format": NaN}', "NaN"),
        (b"[" * 100_000, "not JSON"),
        (b" " * (5 * 2**20), "more than"),
    ],
)
def test_what_is_no_manifest_is_refused(package: Path, content: bytes, message: str) -> None:
    (package / MANIFEST).write_bytes(content)
    with pytest.raises(PackageError, match=message):
        open_package(package)


def test_another_order_or_spacing_is_another_manifest(package: Path) -> None:
    document = json.loads((package / MANIFEST).read_bytes())
    with pytest.raises(PackageError, match="canonical"):
        PackageManifest.from_bytes(json.dumps(document).encode())


def test_a_package_under_another_digest_is_refused(registry: Registry, package: Path) -> None:
    other = put_package(registry, seed=1)
    registry.put_tag(parse_reference("demo@a"), package.name)
    for file in package.iterdir():
        file.unlink()
    package.rmdir()
    registry.path_of(other).rename(package)
    with pytest.raises(PackageError, match=f"its digest is {other}"):
        open_package("demo@a", registry)


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="no such directory"):
        open_package(tmp_path / "nothing")
