"""A probe of what a run needs of the file system of its directory. No torch."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from paceline.core.ownership import lock_now

SLOW_MS = 20.0
_TRIES = 5


class Lack(NamedTuple):
    """What a file system lacks.

    Attributes:
        found: a clause, after the directory's name.
    """

    found: str
    advice: str


NODE_LOCKS = Lack(
    "holds locks within a node only",
    "Mount Lustre with -o flock instead of localflock, NFSv3 without local_lock; until then a run whose node died can "
    "be resumed on another node after 75 s",
)


def probe(directory: Path) -> list[Lack]:
    """Return what the file system of a directory lacks; it makes files there, and removes them.

    Raises:
        OSError: a file cannot be written.
    """
    path = directory / f".probe-{secrets.token_hex(4)}"
    other = path.with_name(f"{path.name}-other")
    try:
        path.write_bytes(bytes(mmap.PAGESIZE))
        return [*_refused(path), *_wrong(path, other)]
    finally:
        for file in (path, other):
            with suppress(OSError):
                file.unlink(missing_ok=True)


def _refused(path: Path) -> Iterator[Lack]:
    """Yield what the system answers with an error."""

    def map_shared() -> None:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            pass

    def sync_folder() -> None:
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def renew_time() -> None:
        os.utime(path, (0, 0))
        os.utime(path)
        if path.stat().st_mtime == 0:
            raise OSError(errno.EINVAL, "it stays")

    time_advice = "Start one command at a time for a run: nodes cannot see each other's heartbeats"
    sync_advice = "A power cut may take the newest files with it: use --backup-to on another disk"
    checks: tuple[tuple[Callable[[], object], str, str], ...] = (
        (map_shared, "cannot map files into memory", "Keep large data on another disk: arrays are read whole here"),
        (renew_time, "does not renew the time of a file", time_advice),
        (sync_folder, "cannot sync folders", sync_advice),
    )
    for check, found, advice in checks:
        try:
            check()
        except OSError as error:
            yield Lack(f"{found} ({error.strerror})", advice)


def _wrong(path: Path, other: Path) -> Iterator[Lack]:
    """Yield what the system does without an error, but not as expected."""
    with path.open("r+b") as first, path.open("r+b") as second, suppress(BlockingIOError):
        if not lock_now(first.fileno()) or lock_now(second.fileno()):
            yield Lack(
                "has no file locks",
                "Mount Lustre with -o flock, start NFSv3's lock daemon; until then Paceline locks by files with "
                "heartbeats",
            )
    if (owner := path.stat().st_uid) != os.geteuid():
        yield Lack(
            f"gives your files to user {owner}",
            "Start the job as an ordinary user, or export it with no_root_squash: nodes accept a secret of their own "
            "user only (or give --token-file)",
        )
    taken_ms = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        other.unlink(missing_ok=True)
        other.touch()
        taken_ms.append((time.perf_counter() - began) * 500)
    if (fastest_ms := min(taken_ms)) > SLOW_MS:
        yield Lack(
            f"takes {fastest_ms:.0f} ms to create or remove a file",
            "Save less often (--checkpoint-every), or keep the run on a faster disk",
        )
