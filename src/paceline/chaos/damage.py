"""What can be done to the checkpoints of a run from outside."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints that have their final names, the newest first."""
    return sorted(directory.glob("step-*-v*"), key=lambda path: path.name.rpartition("-v")[2], reverse=True)


def identity(checkpoint: Path) -> tuple[str, int]:
    """Tells a checkpoint from one that is written again under its name."""
    return checkpoint.name, checkpoint.stat().st_ino


def good_ones(directory: Path, damaged: Collection[tuple[str, int]]) -> list[Path]:
    """Those that nobody has damaged, the newest first."""
    found = []
    for path in checkpoints(directory):
        with suppress(FileNotFoundError):  # the run has just deleted it
            if identity(path) not in damaged:
                found.append(path)
    return found


def flip_bit(checkpoint: Path, choice: int) -> str:
    """Flip one bit of one file; say which."""
    path = _file(checkpoint, choice)
    position = (choice >> 8) % path.stat().st_size
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1 << choice % 8]))
    return f"bit {choice % 8} of byte {position:,} of {checkpoint.name}/{path.name}"


def truncate(checkpoint: Path, choice: int) -> str:
    """Cut one file short; say which and where."""
    path = _file(checkpoint, choice)
    length = (choice >> 8) % path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(length)
    return f"{checkpoint.name}/{path.name} after byte {length:,}"


def _file(checkpoint: Path, choice: int) -> Path:
    files = sorted(path for path in checkpoint.iterdir() if path.stat().st_size)
    return files[choice % len(files)]
