"""A stand-in for network file systems: one folder, mounted once for each node, with the faults of real ones.

Each mount is a process of its own that passes every operation on to the folder below (FUSE), but for what its switches
say; what Linux's clients of NFS, Lustre and CIFS always do, it always does: a lock on a *folder* holds on one node
only, and a file that is removed while somebody has it open gets another name until it is closed.

A test mounts it, and tells one node or another what goes wrong from now on::

    with network_file_system(tmp_path, nodes=("a", "b"), locks="node") as fs:
        fs["a"].set(lost=("rename",))
        write(fs["a"].path / "runs")
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import fcntl
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

_NOBODY = 65534
_UTIME_NOW, _UTIME_OMIT = 0x3FFFFFFF, 0x3FFFFFFE  # of <sys/stat.h>, in place of nanoseconds
_LOST = {"rename": errno.ENOENT, "unlink": errno.ENOENT, "mkdir": errno.EEXIST, "link": errno.EEXIST}
"""The error that a client reports when it repeats a fulfilled request whose answer was lost."""


@dataclass(frozen=True, kw_only=True)
class Switches:
    """What goes wrong on a mount just now; an error is a number of :mod:`errno`.

    Attributes:
        only: everything below but ``slow_s`` and ``stale`` concerns paths that contain this text; "" is all.
        lost: operations that are done and reported as failed.
        lock_error: of a lock on a file.
        locks_wait: the server never answers a request for a lock on a file.
        link_error: of a hard link.
        folder_fsync_error: of a folder's fsync.
        write_error: of a write.
        close_error: of the close or fsync after writes, which are lost then.
        appends_overwrite: files opened to append are written where this node believes that they end.
        stale: has files that are open from before the last change of it answer ESTALE.
        away: the server does not answer: operations wait, or fail with ``away_error`` if there is one.
        away_error: see ``away``.
        slow_s: what each operation on names takes.
    """

    only: str = ""
    lost: Sequence[str] = ()
    lock_error: int = 0
    locks_wait: bool = False
    link_error: int = 0
    folder_fsync_error: int = 0
    write_error: int = 0
    close_error: int = 0
    appends_overwrite: bool = False
    stale: int = 0
    away: bool = False
    away_error: int = 0
    slow_s: float = 0.0


class Mount:
    """One node's view of the file system.

    Attributes:
        path: where it is mounted.
    """

    def __init__(self, path: Path, server: subprocess.Popen[str]) -> None:
        self.path = path
        self._server = server

    def set(self, **switches: Any) -> None:
        """Turn these switches of :class:`Switches` on, and all others off, before this returns."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(asdict(Switches(**switches))) + "\n")
        self._server.stdin.flush()
        self._server.stdout.readline()


@contextmanager
def network_file_system(
    directory: Path,
    nodes: Sequence[str] = ("a", "b"),
    *,
    locks: Literal["shared", "node"] = "shared",
    cache_s: float = 0.0,
    absence_s: float = 0.0,
    maps_shared: bool = True,
    squashes_root: bool = False,
) -> Iterator[dict[str, Mount]]:
    """Mount an empty file system under ``directory`` for as long as this lasts; skip the test where that cannot be.

    Args:
        directory: holds the mounts, and the folder below them.
        nodes: names of the mounts.
        locks: whether a lock on a file holds on all nodes, or within a node (NFSv3's ``local_lock``, Lustre's
            ``localflock``).
        cache_s: for so long a node believes the attributes and names that it has seen, unless it opens or locks the
            file.
        absence_s: for so long it believes that a name is absent.
        maps_shared: whether files can be mapped with ``MAP_SHARED``.
        squashes_root: the server takes root for the user ``nobody``: owner of root's files, with that user's rights.
    """
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    backing = directory / "backing"
    backing.mkdir(mode=0o777)
    backing.chmod(0o777)
    options = {"--cache": cache_s, "--absence": absence_s}
    flags = {"--local-locks": locks == "node", "--direct": not maps_shared, "--squash": squashes_root}
    words = [f"{name}={value}" for name, value in options.items()] + [name for name, is_on in flags.items() if is_on]
    with ExitStack() as stack:
        yield {node: stack.enter_context(_mounted(backing, directory / node, words)) for node in nodes}


@contextmanager
def _mounted(backing: Path, path: Path, options: Sequence[str]) -> Iterator[Mount]:
    path.mkdir()
    log = path.with_suffix(".log")
    with log.open("wb") as errors:
        server = subprocess.Popen(
            [sys.executable, "-P", __file__, backing, path, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 60
        while not path.is_mount():
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{path} was not mounted: {log.read_text()}")
            time.sleep(0.01)
        yield Mount(path, server)
    finally:
        # Whoever still waits for an answer gets ENOTCONN, since the process behind the mount has ended.
        server.kill()
        server.communicate()
        subprocess.run(["umount", "--lazy", path], check=False, capture_output=True)


def why_not() -> str | None:
    """What this machine lacks for it; None where it lacks nothing."""
    if importlib.util.find_spec("mfusepy") is None or shutil.which("fusermount3") is None:
        return "FUSE is missing (on Debian: apt-get install fuse3)"
    if os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "mounting a FUSE file system is not allowed here"
    return None


# --- The process behind a mount ---


class Passthrough:
    """What FUSE calls: each operation on the folder below, as the switches of the moment have it.

    Args:
        backing: the folder below.
        local_locks: leave locks to this machine's kernel, which knows of one mount only.
        cache_s: see :func:`network_file_system`.
        squash: run as the user ``nobody``.
    """

    use_ns = True

    def __init__(self, backing: str, local_locks: bool, cache_s: float, squash: bool) -> None:
        self._backing = backing
        self._cache_s = cache_s
        self._squash = squash
        self._switches = Switches()
        self._opened: dict[int, int] = {}  # what `stale` was then, by descriptor
        self._confirmed: dict[int, int] = {}  # size before writes that no fsync followed yet, by descriptor
        if local_locks:
            self.flock = None  # type: ignore[assignment,method-assign]

    def obey(self) -> None:
        """Take over the switches that the test sends; end with it, and with this process the mount."""
        for line in sys.stdin:
            self._switches = Switches(**json.loads(line))
            print("done", flush=True)
        os._exit(0)

    def init_with_config(self, connection: Any, config: Any) -> None:
        config.use_ino = 1  # both mounts call a file by the number that it has below
        os.chdir(self._backing)  # by its path, the user `nobody` could not reach it
        os.umask(0)
        if self._squash:
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)

    def _reach(self, path: str) -> Switches:
        """Ask the server: return what is wrong with this path now.

        Raises:
            OSError: the server is away.
        """
        while (now := self._switches).away and now.only in path:
            if now.away_error:
                raise OSError(now.away_error, "")
            time.sleep(0.01)
        return now if now.only in path else Switches(slow_s=now.slow_s, stale=now.stale)

    def _below(self, path: str) -> str:
        """Where an operation on a name goes."""
        time.sleep(self._reach(path).slow_s)
        return f".{path}"

    def _use(self, path: str, descriptor: int) -> Switches:
        now = self._reach(path)
        if self._opened[descriptor] != now.stale:
            raise OSError(errno.ESTALE, "")
        return now

    def _done(self, operation: str, path: str) -> None:
        if operation in self._reach(path).lost:
            raise OSError(_LOST[operation], "")

    def _forget(self, path: str) -> None:
        """Have this node ask for the file's attributes again, as clients do when they open or lock it."""
        if self._cache_s:
            _libfuse().fuse_invalidate_path(ctypes.c_void_p(_libfuse().fuse_get_context().contents.fuse), path.encode())

    # --- Names ---

    def getattr(self, path: str, descriptor: int | None = None) -> dict[str, int]:
        if descriptor is None:
            found = os.lstat(self._below(path))
        else:
            self._use(path, descriptor)
            found = os.fstat(descriptor)
        names = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks", "st_blksize", "st_rdev")
        times = {f"st_{kind}time": getattr(found, f"st_{kind}time_ns") for kind in "amc"}
        return {name: getattr(found, name) for name in names} | times

    def access(self, path: str, mode: int) -> None:
        if not os.access(self._below(path), mode):
            raise PermissionError(errno.EACCES, "")

    def readdir(self, path: str, descriptor: int) -> list[tuple[str, dict[str, int], int]]:
        with os.scandir(self._below(path)) as entries:
            found = [(each.name, each.stat(follow_symlinks=False)) for each in entries]
        return [(name, {"st_ino": each.st_ino, "st_mode": each.st_mode}, 0) for name, each in found]

    def readlink(self, path: str) -> str:
        return os.readlink(self._below(path))

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._below(path))
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_") and name != "f_fsid"}

    def mknod(self, path: str, mode: int, device: int) -> None:
        os.mknod(self._below(path), mode, device)

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._below(path), mode)
        self._done("mkdir", path)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._below(path))

    def unlink(self, path: str) -> None:
        os.unlink(self._below(path))
        self._done("unlink", path)

    def symlink(self, path: str, target: str) -> None:
        os.symlink(target, self._below(path))

    def link(self, path: str, existing: str) -> None:
        if error := self._reach(path).link_error:
            raise OSError(error, "")
        os.link(f".{existing}", self._below(path))
        self._done("link", path)

    def rename(self, old: str, new: str) -> None:
        os.rename(f".{old}", self._below(new))
        self._done("rename", new)

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._below(path), mode)

    def chown(self, path: str, user: int, group: int) -> None:
        os.lchown(self._below(path), user, group)

    def truncate(self, path: str, size: int) -> None:
        os.truncate(self._below(path), size)

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        below = self._below(path)
        found = os.lstat(below)
        read, written = times or (_UTIME_NOW, _UTIME_NOW)
        os.utime(below, ns=(_time(read, found.st_atime_ns), _time(written, found.st_mtime_ns)), follow_symlinks=False)

    def fsyncdir(self, path: str, datasync: int, descriptor: int) -> None:
        if error := self._reach(path).folder_fsync_error:
            raise OSError(error, "")

    # --- Open files ---

    def create(self, path: str, mode: int, flags: int) -> int:
        return self._open(path, flags, mode)

    def open(self, path: str, flags: int) -> int:
        descriptor = self._open(path, flags)
        self._forget(path)
        return descriptor

    def _open(self, path: str, flags: int, mode: int = 0) -> int:
        below, now = self._below(path), self._reach(path)
        descriptor = os.open(below, flags & ~os.O_APPEND if now.appends_overwrite else flags, mode)
        self._opened[descriptor] = now.stale
        return descriptor

    def read(self, path: str, size: int, offset: int, descriptor: int) -> bytes:
        self._use(path, descriptor)
        return os.pread(descriptor, size, offset)

    def write(self, path: str, content: bytes, offset: int, descriptor: int) -> int:
        now = self._use(path, descriptor)
        if now.write_error:
            raise OSError(now.write_error, "")
        self._confirmed.setdefault(descriptor, os.fstat(descriptor).st_size)
        return os.pwrite(descriptor, content, offset)

    def fsync(self, path: str, datasync: int, descriptor: int) -> None:
        now = self._use(path, descriptor)
        size = self._confirmed.pop(descriptor, None)
        if size is not None and now.close_error:
            os.ftruncate(descriptor, size)
            self._forget(path)
            raise OSError(now.close_error, "")

    def flush(self, path: str, descriptor: int) -> None:
        if descriptor in self._confirmed:
            self.fsync(path, 0, descriptor)

    def release(self, path: str, descriptor: int) -> None:
        del self._opened[descriptor]
        self._confirmed.pop(descriptor, None)
        os.close(descriptor)

    def flock(self, path: str, descriptor: int, operation: int) -> None:
        now = self._use(path, descriptor)
        if now.lock_error and not operation & fcntl.LOCK_UN:
            raise OSError(now.lock_error, "")
        # The kernel sends the close that unlocks a file without waiting for it.
        give_up = time.monotonic() + (0.1 if operation & fcntl.LOCK_NB else math.inf)
        while True:
            try:
                if not self._reach(path).locks_wait:
                    fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
                    break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise
            if _libfuse().fuse_interrupted():  # who waited was killed
                raise InterruptedError(errno.EINTR, "")
            time.sleep(0.01)
        self._forget(path)


def _time(asked: int, before: int) -> int:
    return {_UTIME_NOW: time.time_ns(), _UTIME_OMIT: before}.get(asked, asked)


def _libfuse() -> Any:
    import mfusepy

    return mfusepy._libfuse


def _serve() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("backing")
    parser.add_argument("mount")
    parser.add_argument("--cache", type=float)
    parser.add_argument("--absence", type=float)
    parser.add_argument("--local-locks", action="store_true")
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--squash", action="store_true")
    arguments = parser.parse_args()

    import mfusepy

    passthrough = Passthrough(arguments.backing, arguments.local_locks, arguments.cache, arguments.squash)
    threading.Thread(target=passthrough.obey, daemon=True).start()
    mfusepy.FUSE(
        passthrough,
        arguments.mount,
        foreground=True,
        fsname="network",
        allow_other=True,
        auto_unmount=True,
        max_threads=100,  # each lock that is waited for has one
        attr_timeout=arguments.cache,
        entry_timeout=arguments.cache,
        negative_timeout=arguments.absence,
        direct_io=arguments.direct,
    )


if __name__ == "__main__":
    _serve()
