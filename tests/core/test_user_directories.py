"""Where this user's files go, on machines that have a home directory and on those that have none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.core.files import private_directory, user_directory

_ASK = "from paceline.core.files import user_directory as u; print(u('data')); print(u('config'))"
_NAMELESS = ("unshare", "--user", "--map-user=12345", "--map-group=12345")


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.mark.parametrize("configured", ["", "relative"])
def test_the_home_directory_counts_where_no_absolute_path_is_set(
    configured: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_DATA_HOME", configured)
    assert user_directory("data") == tmp_path / "home/.local/share/paceline"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "set"))
    assert user_directory("data") == tmp_path / "set/paceline"


@pytest.mark.integration
@pytest.mark.parametrize("home", [None, "sealed", "sealed/below", "file/below"])
def test_a_user_without_a_name_and_a_home_has_a_temporary_directory(home: str | None, tmp_path: Path) -> None:
    if subprocess.run((*_NAMELESS, "true"), capture_output=True).returncode:
        pytest.skip("a user namespace is not allowed here")
    (tmp_path / "sealed").mkdir(mode=0o500)
    (tmp_path / "file").touch()
    variables = [] if home is None else [f"HOME={tmp_path / home}"]
    command = (*_NAMELESS, "env", "-i", f"TMPDIR={tmp_path}", *variables, sys.executable, "-c", _ASK)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    kept = tmp_path / "paceline-12345"
    assert done.stdout.splitlines() == [str(kept / "data"), str(kept / "config")], done.stderr
    assert kept.stat().st_mode & 0o777 == 0o700
    [line] = done.stderr.splitlines()
    assert str(kept) in line
    assert ("no home directory" if home is None else f"{tmp_path / home} cannot be written") in line


def test_a_temporary_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    private_directory().chmod(0o755)
    with pytest.raises(ConfigError, match="a directory that only you can enter"):
        private_directory()
    private_directory_of_another_kind = next(tmp_path.glob("paceline-*"))
    private_directory_of_another_kind.rmdir()
    private_directory_of_another_kind.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="a directory that only you can enter"):
        private_directory()
