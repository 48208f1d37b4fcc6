"""Whether all machines see one run directory, and what room it has."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from paceline.checkpoint.files import TEMPORARY
from paceline.checkpoint.inventory import entries
from paceline.run_directory import RunDirectory

_LOOK_EVERY_S = 0.1
_LATE_S = 3.0  # network file systems show a new file a little later
_PIECE = 1 << 20
_BLOCK = 512  # bytes, of st_blocks


class Storage(TypedDict):
    """What a machine sees of a directory.

    ``free`` is in bytes, and counts what a killed writer of checkpoints has left: the next one removes it.
    ``checkpoints`` are the sizes in bytes of the run's good ones; ``seen`` are the machines whose marks are
    there.
    """

    path: str
    error: str | None
    hard_links: bool
    free: int | None
    checkpoints: list[int]
    seen: list[int]


def existing(path: Path) -> Path:
    """The directory, or the nearest one above it that is there."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def mark_name(examination: str, node_rank: int) -> str:
    """The file by which others see that a machine uses the same directory."""
    return f".paceline-doctor-{examination}-{node_rank}"


def leave_mark(directory: Path, name: str) -> str | None:
    """Write a file of 1 MiB as checkpoints are written; return why that cannot be, where it cannot."""
    path = directory / name
    try:
        with path.open("wb") as file:
            file.write(bytes(_PIECE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return error.strerror or str(error)
    return None


def look(directory: Path, run: Path, own: str, others: Mapping[int, str], error: str | None) -> Storage:
    """Wait a little for the others' marks, and try what a run needs of a file system.

    Args:
        directory: the run's, or the nearest one above it that is there.
        run: the run's, which may not be there.
        own: this machine's mark.
        others: the other machines' marks.
        error: why this machine's could not be written.
    """
    deadline = time.monotonic() + _LATE_S
    while (missing := [node for node, name in others.items() if not (directory / name).exists()]) and (
        time.monotonic() < deadline
    ):
        time.sleep(_LOOK_EVERY_S)
    free, there = None, RunDirectory(run).checkpoints
    with suppress(OSError):
        status = os.statvfs(directory)
        free = status.f_bavail * status.f_frsize + _left_behind(there)
    sizes = []
    with suppress(OSError):
        sizes = [entry.size_bytes for entry in entries(there, None) if entry.problem is None]
    return Storage(
        path=str(directory),
        error=error,
        hard_links=error is not None or _links(directory / own),
        free=free,
        checkpoints=sizes,
        seen=[node for node in others if node not in missing],
    )


def remove_mark(directory: Path, name: str) -> None:
    """Leave nothing behind."""
    with suppress(OSError):
        (directory / name).unlink(missing_ok=True)


def _left_behind(checkpoints: Path) -> int:
    """Bytes on disk of checkpoints that were not finished."""
    size = 0
    for entry in checkpoints.glob(f"{TEMPORARY}*"):
        with suppress(OSError):  # somebody is removing it
            if not entry.is_symlink():  # to a whole one
                size += sum(file.lstat().st_blocks for file in entry.iterdir()) * _BLOCK
    return size


def _links(mark: Path) -> bool:
    link = mark.with_name(f"{mark.name}-link")
    try:
        link.hardlink_to(mark)
    except OSError:
        return False
    remove_mark(link.parent, link.name)
    return True
