"""Names of files outside a run's directory, in ``/dev/shm`` and the temporary directory, with their owner. No torch.

A process removes what it has named when it ends. If it is killed, its parent does: the fork server, the launcher or
the agent. If all of them were killed at once, the next start does, or ``paceline gc``. Therefore each name begins
with its owner, in hexadecimal digits::

    paceline-<process id>-<its start time>-<PID namespace>-<temporary directory>-
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import process, util
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")
_LONGEST_SOCKET_PATH = 107  # bytes, of sockaddr_un
_NAME = re.compile(r"(?:sem\.)?paceline-([0-9a-f]+)-([0-9a-f]+)-([0-9a-f]+)-([0-9a-f]{8})-")


@dataclass(frozen=True)
class Owner:
    """A process, also for times when its number means another one or none.

    Attributes:
        start: its start time, in clock ticks since boot.
        namespace: the PID namespace in which the number counts.
        scope: CRC-32 of its temporary directory, which tells the names of jobs with directories of their own apart.
    """

    pid: int
    start: int
    namespace: int
    scope: int

    @classmethod
    def of(cls, pid: int) -> Owner | None:
        """Return a process of this namespace, also one that was not reaped yet; None if there is none."""
        start = _start_time(pid)
        return None if start is None else cls(pid, start, _namespace(), _scope(tempfile.gettempdir()))

    @classmethod
    def parse(cls, name: str) -> Owner | None:
        """Return the owner that a file's name begins with; None if it begins with none."""
        match = _NAME.match(name)
        return None if match is None else cls(*(int(digits, 16) for digits in match.groups()))

    @property
    def prefix(self) -> str:
        """What all its names begin with."""
        return f"paceline-{self.pid:x}-{self.start:x}-{self.namespace:x}-{self.scope:08x}-"

    @property
    def is_visible(self) -> bool:
        """Whether this process has the same PID namespace."""
        return self.namespace == _namespace()

    @property
    def has_ended(self) -> bool:
        """Whether the process is known to have ended; nothing is known of other namespaces."""
        return self.is_visible and _start_time(self.pid, zombie=False) != self.start


@cache
def boot_id() -> str:
    """Return a short name of this boot of the machine, or "" if it has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return ""


def own_prefix(kind: str = "") -> str:
    """Return a prefix for the names of this process's own files, such as ``TemporaryDirectory(prefix=...)``.

    Raises:
        ConfigError: the machine has no ``/proc``.
    """
    owner = Owner.of(os.getpid())
    if owner is None:
        raise ConfigError("/proc, by which Paceline knows its processes, is not mounted here: mount -t proc proc /proc")
    return f"{owner.prefix}{kind}-" if kind else owner.prefix


def name_multiprocessing() -> None:
    """Put this process's name on what ``multiprocessing`` names, in it and in processes that it starts.

    Semaphores of data workers have names until all workers have opened them.
    """
    config: dict[str, Any] = process.current_process()._config  # type: ignore[attr-defined]
    semaphores = f"/{own_prefix()[:-1]}"
    if config.get("semprefix") == semaphores:
        return
    config["semprefix"] = semaphores
    with suppress(OSError):  # on a full disk, multiprocessing makes its own when it needs one
        folder = make_directory("mp", longest=len("/listener-????????"))
        config["tempdir"] = str(folder)
        util.Finalize(None, remove_names, ([folder],), exitpriority=-100)
        register_process()


def register_process() -> None:
    """Record that this process belongs to the one that started it.

    torch names shared memory by the process alone, for some microseconds, between which it may be killed.
    """
    folder = process.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    owner = Owner.of(os.getpid())
    if folder is not None and owner is not None:
        with suppress(OSError):
            (Path(folder) / owner.prefix).touch()


def make_directory(kind: str, longest: int = 0, parents: tuple[str | None, ...] = ()) -> Path:
    """Create a directory that only this user can enter.

    Args:
        kind: ends its name.
        longest: the length of the longest name in it, if that is a socket's.
        parents: where, in order of preference, before the temporary directory and ``/tmp``.

    Raises:
        OSError: it cannot be created.
    """
    prefix = own_prefix(kind)
    room = _LONGEST_SOCKET_PATH - len(f"/{prefix}????????") - longest if longest else None
    for parent in (*parents, tempfile.gettempdir(), "/tmp"):
        if parent and (room is None or len(os.fsencode(parent)) <= room) and os.access(parent, os.W_OK):
            return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    raise FileNotFoundError(f"no directory is both writable and at most {room} bytes long. Set TMPDIR")


def remove_names_of(owner: Owner | None) -> None:
    """Remove what a process has named that has ended, or is not reaped yet."""
    if owner is not None:
        remove_names([path for path, named in _names() if named == owner])


def leftovers(temporary: str | None = None, *, everywhere: bool = False) -> list[Path]:
    """Return this user's names whose owner has ended.

    Args:
        temporary: the owner's temporary directory; default: this process's.
        everywhere: all owners.
    """
    temporary = temporary or tempfile.gettempdir()
    scope = _scope(temporary)
    return [path for path, owner in _names(temporary) if owner.has_ended and (everywhere or owner.scope == scope)]


def remove_leftovers(temporary: str | None = None) -> list[Path]:
    """Remove and return :func:`leftovers`. A job calls it when it starts, and when its processes have ended."""
    found = leftovers(temporary)
    remove_names(found)
    return found


def _scope(temporary: str) -> int:
    return zlib.crc32(os.fsencode(temporary))


def _names(temporary: str | None = None) -> Iterator[tuple[Path, Owner]]:
    directories = (str(SHARED_MEMORY), os.environ.get("XDG_RUNTIME_DIR"), temporary or tempfile.gettempdir(), "/tmp")
    for directory in dict.fromkeys(filter(None, directories)):
        with suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                owner = Owner.parse(entry.name)
                with suppress(OSError):
                    if owner is not None and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        yield Path(entry.path), owner


def remove_names(paths: list[Path]) -> None:
    """Remove what :func:`leftovers` found, and the shared memory of processes that are registered there."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            for entry in path.glob("paceline-*"):
                _remove_torch_memory(entry.name)
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def _remove_torch_memory(name: str) -> None:
    owner = Owner.parse(name)
    # If another process has the number by now, the memory is that one's.
    if owner is not None and _start_time(owner.pid) in (None, owner.start):
        for segment in SHARED_MEMORY.glob(f"torch_{owner.pid}_*"):
            with suppress(OSError):
                segment.unlink()


def _start_time(pid: int, *, zombie: bool = True) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # this says nothing about that process
        return None
    fields = stat.rpartition(")")[2].split()
    return int(fields[19]) if zombie or fields[0] not in "ZX" else None


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
