"""A probe of what a run needs of the file system of its directory. No torch."""

from __future__ import annotations

import mmap
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from paceline.core.file_lock import lock_now

SLOW_MS = 20.0
_TRIES = 5


class Lack(NamedTuple):
    """What a file system lacks.

    Attributes:
        found: a clause, after the directory's name.
        advice: what to do.
    """

    found: str
    advice: str


NODE_LOCKS = Lack(
    "holds locks within a node only",
    "Mount Lustre with -o flock instead of localflock, NFSv3 without local_lock; until then a run whose node died can "
    "be resumed on another node after 75 s",
)


def probe(directory: Path) -> list[Lack]:
    """Return what the file system of a directory lacks; it makes a file there, and removes it.

    Raises:
        OSError: the file cannot be written.
    """
    path = directory / f".probe-{secrets.token_hex(4)}"
    link = path.with_name(f"{path.name}-link")
    try:
        path.write_bytes(bytes(mmap.PAGESIZE))
        checks = (_probe_locks, _probe_links, _probe_mapping, _probe_sync, _probe_owner, _probe_latency)
        return [lack for check in checks if (lack := check(path, link)) is not None]
    finally:
        for file in (path, link):
            with suppress(OSError):
                file.unlink(missing_ok=True)


def _probe_locks(path: Path, link: Path) -> Lack | None:
    advice = "Mount Lustre with -o flock, start NFSv3's lock daemon; until then Paceline locks by files with heartbeats"
    with path.open("r+b") as first, path.open("r+b") as second:
        if not lock_now(first.fileno()):
            return Lack("has no file locks", advice)
        with suppress(BlockingIOError):
            lock_now(second.fileno())
            return Lack("lets two processes hold one lock", advice)
    return None


def _probe_links(path: Path, link: Path) -> Lack | None:
    return _fails(
        lambda: link.hardlink_to(path),
        "does not support hard links",
        "Half of the nodes cannot continue after a network split: the quorum witness is a hard link",
    )


def _probe_mapping(path: Path, link: Path) -> Lack | None:
    def read() -> None:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            pass

    return _fails(read, "cannot map files into memory", "Arrays there are read whole: keep large data on another disk")


def _probe_sync(path: Path, link: Path) -> Lack | None:
    def sync() -> None:
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    return _fails(
        sync, "cannot sync folders", "A power cut may take the newest files with it: use --backup-to on another disk"
    )


def _probe_owner(path: Path, link: Path) -> Lack | None:
    owner = path.stat().st_uid
    if owner == os.geteuid():
        return None
    return Lack(
        f"gives your files to user {owner}",
        "Start the job as an ordinary user, or export it with no_root_squash: nodes accept a secret of their own "
        "user only (or give --token-file)",
    )


def _probe_latency(path: Path, link: Path) -> Lack | None:
    taken_ms = []
    for number in range(_TRIES):
        began = time.perf_counter()
        path.with_name(f"{path.name}-{number}").touch()
        path.with_name(f"{path.name}-{number}").unlink()
        taken_ms.append((time.perf_counter() - began) * 500)
    if (fastest := min(taken_ms)) < SLOW_MS:
        return None
    return Lack(
        f"takes {fastest:.0f} ms to create or remove a file",
        "Save less often (--checkpoint-every), or keep the run on a faster disk",
    )


def _fails(call: Callable[[], object], found: str, advice: str) -> Lack | None:
    try:
        call()
    except OSError as error:
        return Lack(f"{found} ({error.strerror})", advice)
    return None
