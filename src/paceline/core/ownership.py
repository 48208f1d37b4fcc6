"""Things that end with the process that has them: names outside a run's directory, and locks of files. No torch."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import random
import re
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import process, util
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.files import open_regular

# --- Names of files in ``/dev/shm`` and the temporary directory, with their owner ---

# A process removes what it has named when it ends. If it is killed, its parent does: the fork server, the launcher or
# the agent. If all of them were killed at once, the next start does, or ``paceline gc``. Therefore each name begins
# with its owner, in hexadecimal digits: paceline-<process id>-<its start time>-<PID namespace>-<temporary directory>-


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


# --- Locks of files that hold on all nodes of a shared file system, also where ``flock`` does not ---

# NFSv3 with ``local_lock`` and Lustre with ``localflock`` lock within a node only; Lustre without ``flock`` and many
# object stores do not lock at all. Therefore a lock is a ``flock``, where there is one, and a *claim*: an empty file
# next to the lock's, whose name tells the process, and whose time of change is its heartbeat. A process first makes its
# claim and then looks for claims of other processes: of two processes that do this at once, at least one sees the
# other's claim and withdraws. No name is used twice, so removing the claim of an ended process removes no other claim.


BEAT_S = 10.0
SILENT_S = 75.0
"""A claim of another node that has not changed for so long is not held any more.

NFS and gcsfuse may show a file as it was 60 s ago.
"""

_LONG_AGO_S = 600.0  # such a claim is not watched: clocks of nodes may be minutes apart, but hardly ten
_RECENT_S = 120.0  # is_locked() does not wait, and clocks may differ
BRIEF_S = 0.1
"""is_locked() in another process holds a lock for less."""

_LEAVE_S = 1.0
_SLOW_S = 5.0
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_CLAIM = re.compile(r"([0-9a-f]*)-([0-9a-f]+)-(paceline-.*)@(.*)")


@dataclass(frozen=True)
class Claim:
    """What the name of a claim tells.

    Attributes:
        device: the number of the mounted file system there.
        host: the machine's name, for messages.
    """

    path: Path
    boot: str
    device: int
    owner: Owner
    host: str

    def is_here(self, lock: os.stat_result) -> bool:
        """Return whether its process has this kernel, and this mount of the file system, and so the same ``flock``."""
        return self.boot == boot_id() != "" and self.device == lock.st_dev

    def is_alive(self, lock: os.stat_result, has_locks: bool) -> bool | None:
        """Return whether its process holds the lock, given that this one has the ``flock``, if any; None: unknown."""
        if has_locks and self.is_here(lock):
            return False
        if self.boot == boot_id() != "" and self.owner.has_ended:
            return False
        return True if self.is_here(lock) and self.owner.is_visible else None


def claims(path: Path) -> Iterator[Claim]:
    """Yield the claims to the lock of a file."""
    start = f".{path.name}."
    for name in os.listdir(path.parent):
        match = _CLAIM.fullmatch(name.removeprefix(start)) if name.startswith(start) else None
        owner = None if match is None else Owner.parse(match[3])
        if match is not None and owner is not None:
            yield Claim(path.with_name(name), match[1], int(match[2], 16), owner, match[4])


def is_locked(path: Path) -> bool:
    """Return whether a process holds a lock: one of another node, if its last heartbeat is recent."""
    try:
        with open_regular(path) as file:
            has_locks = lock_now(file.fileno(), fcntl.LOCK_SH)
            status = os.fstat(file.fileno())
        for claim in claims(path):
            is_alive = claim.is_alive(status, has_locks)
            if is_alive or (is_alive is None and abs(time.time() - claim.path.stat().st_mtime) < _RECENT_S):
                return True
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def describe_holder(path: Path) -> str:
    """Return ``another process``, or of another node ``a process of HOST, seen 3 s ago``."""
    with suppress(OSError):
        status = path.stat()
        for claim in claims(path):
            if not claim.is_here(status):
                return f"a process of {claim.host}, seen {_age_s(claim.path.stat().st_mtime, time.time()):.0f} s ago"
    return "another process"


class FileLock:
    """A lock, held from :meth:`try_to_take` until :meth:`close`.

    A process that inherits the descriptor, before or after that, holds a ``flock`` too, until it ends.

    Args:
        path: the lock's file, which is made if it is missing.

    Attributes:
        held: whether this object took it.
        rival: after an attempt: the claim of another process; None if only its ``flock`` is known.
        is_certain: after an attempt: whether the other process holds the lock, and was not merely seen for the first
            time.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._claim: Path | None = None
        self._beats: dict[Path, tuple[float, float]] = {}  # of rivals: the last one, and when this process first saw it
        self._has_told = False
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None
        self.held = False
        self.rival: Claim | None = None
        self.is_certain = True

    def fileno(self) -> int:
        """Return the descriptor, for inheritance."""
        return self._descriptor

    def try_to_take(self, *, succeeds: bool = False) -> bool:
        """Take the lock unless another process holds it; return whether it is held now.

        Args:
            succeeds: the other nodes have agreed that this one follows the node that had it, whose claim ends now.

        Raises:
            OSError: the disk does not take the claim.
        """
        if self.held:
            return True
        self.rival = None
        self.is_certain = True
        try:
            has_locks = lock_now(self._descriptor)
        except BlockingIOError:
            return False
        try:
            # Look before it, too: a process that tries again and again shall not disturb the others.
            if succeeds or self._is_free(has_locks):
                self._make_claim()
                self.held = succeeds or self._is_free(has_locks)
        finally:
            if not self.held:
                self._withdraw()
                if has_locks:
                    fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        if self.held:
            for other in self._others():
                other.path.unlink(missing_ok=True)
        return self.held

    def take_within(self, seconds: float) -> bool:
        """Take the lock; wait for a process that holds it for so long, and for one that may be down until it is known.

        Raises:
            OSError: the disk does not take the claim.
        """
        deadline = time.monotonic() + seconds
        while not self.try_to_take():
            if self.is_certain and time.monotonic() > deadline:
                return False
            self.pause()
        return True

    def pause(self) -> None:
        """Sleep until the next attempt; for a random time, as two processes that met shall not meet again."""
        time.sleep(random.uniform(0.01, 0.03) if self.is_certain else 0.5)

    def close(self) -> None:
        """Release this process's hold of the lock; a second call does nothing."""
        self._withdraw()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _make_claim(self) -> None:
        device = os.fstat(self._descriptor).st_dev
        host = re.sub(r"[^\w.-]", "_", socket.gethostname(), flags=re.ASCII)[:63]
        owner = f"{own_prefix()}{secrets.token_hex(4)}"
        self._claim = self._path.with_name(f".{self._path.name}.{boot_id()}-{device:x}-{owner}@{host}")
        os.close(os.open(self._claim, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
        self._leaving.clear()
        thread = threading.Thread(target=self._beat, args=(self._claim,), name="paceline-lock", daemon=True)
        thread.start()
        self._thread = thread

    def _withdraw(self) -> None:
        if self._thread is not None:
            self._leaving.set()
            self._thread.join(_LEAVE_S)  # bounded, because a disk may hang
            self._thread = None
        if self._claim is not None:
            with suppress(OSError):
                self._claim.unlink()
            self._claim = None

    def _beat(self, claim: Path) -> None:
        while not self._leaving.wait(BEAT_S):
            with suppress(OSError):
                os.utime(claim)  # to the server's time on NFS

    def _others(self) -> list[Claim]:
        """Return the claims that exclude this one."""
        return [claim for claim in claims(self._path) if claim.path != self._claim]

    def _is_free(self, has_locks: bool) -> bool:
        """Return whether nothing holds the lock; otherwise record what does."""
        status = os.fstat(self._descriptor)
        for claim in self._others():
            is_alive = claim.is_alive(status, has_locks)
            if is_alive is None:
                is_alive = self._is_beating(claim)
            if is_alive is not False:
                self.rival = claim
                self.is_certain = is_alive is True
                return False
        return True

    def _is_beating(self, claim: Claim) -> bool | None:
        """Return whether a claim has changed since it was first seen; None: not yet, which may be too early to tell.

        Clocks of nodes may differ, so this process measures how long a claim stays unchanged.
        """
        try:
            with open_regular(claim.path) as file:  # opened, because NFS then asks its server
                beat = os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return False
        now = time.monotonic()
        if claim.path not in self._beats:
            os.utime(self._descriptor)
            # On NFS both are the server's times.
            age_s = _age_s(beat, os.fstat(self._descriptor).st_mtime)
            self._beats[claim.path] = beat, now - (SILENT_S if age_s > _LONG_AGO_S else 0.0)
        before, since = self._beats[claim.path]
        if beat != before:
            self._beats[claim.path] = beat, now
            return True
        if now - since > 1 and not self._has_told and now - since < SILENT_S:
            self._has_told = True
            print(
                f"paceline: {self._path.parent} is in use by {describe_holder(self._path)}. Waiting up to "
                f"{SILENT_S:.0f} s for another sign of it.",
                file=sys.stderr,
                flush=True,
            )
        return False if now - since >= SILENT_S else None


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a file, which is made if it is missing.

    Never of a folder: clients of NFS, Lustre and CIFS pass locks on files alone to their server.

    Raises:
        BlockingIOError: without ``wait``, another process holds it.
        OSError: the file cannot be opened, or the disk does not take a claim.
    """
    with closing(FileLock(path)) as lock:
        if not lock.take_within(math.inf if wait else BRIEF_S):
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), str(path))
        yield


def lock_now(descriptor: int, operation: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file without waiting; return False where the file system has no locks.

    Raises:
        BlockingIOError: another process holds it.
    """
    # A mount whose lock service is away does not answer even this.
    slow = threading.Timer(_SLOW_S, _tell_of_wait, (descriptor,))
    slow.daemon = True
    slow.start()
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    finally:
        slow.cancel()
        slow.join()
    return True


def _tell_of_wait(descriptor: int) -> None:
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    print(
        f"paceline: waiting to lock {path}: its file system does not answer. Check the mount's lock service (NFS 3: "
        "rpc.statd on both sides), or use a directory on another file system.",
        file=sys.stderr,
        flush=True,
    )


def _age_s(beat: float, now: float) -> float:
    return max(0.0, now - beat)
