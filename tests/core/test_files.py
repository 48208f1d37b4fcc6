"""What is there after a failed rename or link is taken for one's own only if it is; see also the stand-in's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.files import link, remove_directory, rename


def test_a_failed_rename_is_reported_where_another_file_has_the_name(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("other's")
    with pytest.raises(FileNotFoundError):
        rename(tmp_path / "missing", tmp_path / "other")
    (tmp_path / "own").touch()
    with pytest.raises(FileNotFoundError):
        rename(tmp_path / "own", tmp_path / "missing" / "own")
    assert (tmp_path / "other").read_text() == "other's"


def test_a_second_name_is_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own").touch()
    link(tmp_path / "own", tmp_path / "name")
    link(tmp_path / "own", tmp_path / "name")
    (tmp_path / "other").touch()
    with pytest.raises(FileExistsError):
        link(tmp_path / "own", tmp_path / "other")


@pytest.mark.usefixtures("plain_user")
def test_what_cannot_be_removed_is_said() -> None:
    folder = Path("folder", "locked")
    folder.mkdir(parents=True)
    (folder / "file").touch()
    folder.chmod(0o500)
    with pytest.raises(PermissionError):
        remove_directory(Path("folder"))
    folder.chmod(0o700)
    remove_directory(Path("folder"))
    assert not Path("folder").exists()
