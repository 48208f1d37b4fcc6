"""Jobs for tests of what is rendered for Slurm, and of what runs there."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from paceline.launch.launcher import LaunchSpec, SlurmOptions, get_launcher

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

# A rank that needs the longer to save, the higher its number is.
SAVES = """
import os, signal, sys, time

name = f"{sys.argv[1]}-{os.environ['RANK']}"
if os.path.exists(name):
    sys.exit(0)
heard = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: heard.append(signal.Signals(number).name))
open(f"ready-{name}", "w").close()
while not heard:
    time.sleep(0.05)
end = time.monotonic() + 0.5 + int(os.environ["RANK"])
while time.monotonic() < end:
    time.sleep(0.05)
with open(name, "w") as file:
    file.write(" ".join(heard))
sys.exit(75)
"""


def text(spec: LaunchSpec, options: SlurmOptions | None = None, **changes: Any) -> str:
    return get_launcher("slurm").render(dataclasses.replace(spec, **changes), options).text


def joined(script: str) -> str:
    """Its commands, without the line breaks in them."""
    return re.sub(r"\\\n *", "", script)
