"""Jobs for tests of what is rendered for Slurm."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from paceline.launch.launcher import LaunchSpec, get_launcher
from paceline.launch.options import SlurmOptions

SCRIPT = LaunchSpec(
    command=("/opt/python", "train.py"),
    name="train",
    directory=Path("/home/me/jobs/train"),
    workdir=Path("/home/me"),
    python="/opt/python",
)
TASK = dataclasses.replace(
    SCRIPT,
    command=("/opt/python", "-m", "paceline", "train", "fashion-mnist", "--run-dir", "/home/me/runs/a"),
    directory=Path("/home/me/runs/a/job"),
    run=Path("/home/me/runs/a"),
    rank_launcher="agent",
    is_task=True,
)


def text(spec: LaunchSpec, options: SlurmOptions | None = None, **changes: Any) -> str:
    return get_launcher("slurm").render(dataclasses.replace(spec, **changes), options).text


def joined(script: str) -> str:
    """Its commands, without the line breaks in them."""
    return re.sub(r"\\\n *", "", script)
