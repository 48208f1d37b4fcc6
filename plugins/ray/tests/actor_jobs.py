"""What the tests of jobs on actors share, Ray's and Monarch's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.launcher import LaunchSpec

WAITS = """\
import os, pathlib, time
pathlib.Path(f"ready{os.environ['RANK']}").write_text(str(os.getpid()))
print("waiting", flush=True)
time.sleep(600)
"""


def prepare(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the scripts that jobs run into a directory, and their records."""
    monkeypatch.setenv("XDG_STATE_HOME", str(directory / "state"))
    (directory / "waits.py").write_text(WAITS)
    shutil.copy(Path(__file__).parents[3] / "tests/launch/harmed.py", directory)
    (directory / "plan").mkdir()


def spec(**changes: Any) -> LaunchSpec:
    values = {
        "command": ("python", "train.py"),
        "name": "train",
        "directory": Path("/jobs/train"),
        "workdir": Path("/work"),
        "python": "python",
    }
    return LaunchSpec(**{**values, **changes})
