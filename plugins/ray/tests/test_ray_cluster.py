"""The folder of a local Ray."""

from __future__ import annotations

import tempfile

import pytest

from paceline.core.errors import LaunchError
from paceline_ray.cluster import private_directory


def test_where_no_folder_can_be_made_it_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc")  # where no user can create a folder
    with pytest.raises(LaunchError, match=r"/proc cannot be written: .* Set TMPDIR"), private_directory():
        pass
