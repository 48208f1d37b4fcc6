"""The scripts of others in ``tests/scripts_of_others``, changed as docs/own-loop-scripts.md says."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ORIGINALS = Path(__file__).parent / "scripts_of_others"
PAGE = Path(__file__).parents[1] / "docs/own-loop-scripts.md"


def move(name: str, file: str, directory: Path) -> None:
    """Put a script's folder and the stand-in for torchvision into a directory, and change the script as the page says.

    Raises:
        FileNotFoundError: the original is not there.
    """
    for folder in (ORIGINALS / "stand_in", ORIGINALS / name):
        shutil.copytree(folder, directory, dirs_exist_ok=True)
    script, page = directory / file, PAGE.read_text()
    before = script.read_text().splitlines()
    diffs = re.findall(r"^```diff\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for diff in diffs:
        if diff.startswith(f"--- a/{file}\n") and name != "vision":
            subprocess.run(["git", "apply", "--unidiff-zero", "-"], input=diff, text=True, cwd=directory, check=True)
    if name == "vision":
        (commands,) = re.findall(r"^```text title=\"train.py.ed\"\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        script.write_text("\n".join([*_edit(before, commands), ""]))


def _edit(original: Sequence[str], commands: str) -> list[str]:
    """Return the lines of a file after a script of ``ed``, which begins with the last of its changes."""
    lines, given = list(original), iter(commands.splitlines())
    for command in given:
        match = re.fullmatch(r"(\d+)(?:,(\d+))?([acd])", command)
        assert match is not None, command
        first, last, action = match.groups()
        new = [] if action == "d" else list(iter(lambda: next(given), "."))
        lines[int(first) - (action != "a") : int(last or first)] = new
    return lines
