"""Atomic and append-only file writes that survive crashes and full disks."""

from __future__ import annotations

import errno
import functools
import io
import json
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Literal

from paceline.core.errors import ConfigError, RunDirectoryError

_log = logging.getLogger(__name__)

# --- Paths ---


_MOST_NAME_BYTES = 255
_MOST_PATH_BYTES = 4095


def is_address(location: str | Path) -> bool:
    """Return whether a place is an address in an object store, such as ``s3://bucket/run``, and no path."""
    return isinstance(location, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", location) is not None


def check_location(location: str, name: str) -> None:
    """Check a path as :func:`check_path` does, or an address.

    Raises:
        ConfigError: it is empty, not a path, or an address that holds a password, options or no folder.
    """
    if not location:
        raise ConfigError(f"{name} is empty. Name a place, or leave it out.")
    if not is_address(location):
        return check_path(location, name)
    host, _, path = location.partition("://")[2].partition("/")
    if (
        (":" in host and "@" in host)
        or re.search(r"[?#\s]|::", location)
        or ".." in path.split("/")
        or not (host or path)
    ):
        # Without the address: a password in it would stand in logs.
        raise ConfigError(
            f"{name}: an address is SCHEME://BUCKET/FOLDER, without a password, options or '..'. Credentials come from "
            "the environment or the files of the store's own tools, such as AWS_PROFILE."
        )


def check_path(path: str | Path, name: str) -> None:
    """Reject an address such as ``s3://bucket/runs``, which would become a local folder ``s3:``, and too long a name.

    Args:
        path: of files to read or write.
        name: of the option, for the error.

    Raises:
        ConfigError: it is an address, or no file can have this name.
    """
    # Path has removed one of the slashes.
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        address = str(path).replace(":/", "://", 1) if isinstance(path, Path) else path
        raise ConfigError(
            f"{name} {address}: this takes a path of this machine. Addresses of object stores are for --backup-to, "
            "--init-from, resume, fork, paceline.load() and registry push."
        )
    longest = max(str(path).split(os.sep), key=len)
    if len(os.fsencode(longest)) > _MOST_NAME_BYTES:
        raise ConfigError(f"{name}: a file's name has at most {_MOST_NAME_BYTES} bytes; shorten {longest!r:.80}.")
    if len(os.fsencode(path)) > _MOST_PATH_BYTES:
        raise ConfigError(f"{name}: a path has at most {_MOST_PATH_BYTES:,} bytes; shorten {str(path)!r:.80}.")


# --- Atomic writes ---


DISK_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM),
    *(errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN, errno.ESHUTDOWN, errno.ENODEV, errno.ENXIO, errno.EFBIG),
)
"""Errors of a full, read-only, broken or unreachable disk, which may recover later.

At the start of a run, :meth:`paceline.runs.directory.RunDirectory.create` reports any error at once. After it, a run
waits for its disk.
"""
FULL = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Free some space")
FULL |= {errno.EFBIG: "Allow larger files there (ulimit -f unlimited; a FAT disk takes 4 GiB)"}
"""What to do where a disk takes no more, by the number of the error."""


def append_lines(path: Path, content: bytes) -> None:
    """Add lines in one write, so that lines of several processes do not interleave."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            content = b"\n" + content  # a crash or a full disk cut the last line short
        while content:
            content = content[os.write(descriptor, content) :]
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes | Iterable[bytes | memoryview], *, private: bool = False) -> None:
    """Replace a file's content, readable for other users unless private; a crash leaves the old or the new content."""
    # A random suffix, because nodes that share a directory may have equal process ids.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb", opener=functools.partial(os.open, mode=0o600 if private else 0o666)) as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        rename(temporary, path)
    except BaseException:  # the content may be computed
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make renames inside a directory survive a power cut, where the file system supports that."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS):
            raise
        _say_unsynced(error.strerror)
    finally:
        os.close(descriptor)


@functools.cache
def _say_unsynced(cause: str) -> None:
    _log.warning("this file system cannot sync folders (%s): a power cut may take the newest files with it", cause)


# --- Operations whose answer may be lost ---
#
# A client of a network file system asks again when an answer is lost, and reports the second answer: that there is no
# file to rename or remove, or that the new name is taken. So these functions check which file has the name.


def rename(source: str | Path, target: str | Path) -> None:
    """Rename a file or a directory, which replaces a file or an empty directory.

    Args:
        source: what only this process renames.
        target: its new name.

    Raises:
        OSError: it was not renamed.
    """
    before = os.lstat(source)
    try:
        os.rename(source, target)
    except FileNotFoundError as error:
        try:
            after = os.lstat(target)
        except OSError:
            raise error from None
        if not os.path.samestat(before, after):
            raise


def link(source: Path, target: Path) -> None:
    """Give a file a second name.

    Raises:
        FileExistsError: another file has that name.
        OSError: it was not linked.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        if not os.path.samefile(source, target):
            raise


def remove_directory(path: Path) -> None:
    """Remove a directory with everything in it.

    Raises:
        OSError: some of it is still there.
    """
    shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        shutil.rmtree(path)


# --- Files that another node has written: clients of network file systems cache an absence for a while ---


SEEN_S = 60.0
"""For how long clients of NFS cache an absence by default (``acdirmax``)."""
_LOOK_EVERY_S, _QUIET_S = 0.2, 2.0


def look_anew(*folders: Path) -> None:
    """Have this node see what others have changed in folders: at its own change, a client of NFS drops its cache."""
    for folder in folders:
        with suppress(OSError):  # absent, read-only or full
            probe = folder / f".probe-{secrets.token_hex(4)}"
            probe.touch(exist_ok=False)
            probe.unlink()


def wait_to_see(path: Path, tell: Callable[[str], object], limit_s: float = SEEN_S) -> bool:
    """Wait until this node sees what another one has written; return whether it does.

    Args:
        path: the file or folder.
        tell: receives one message, if this takes some seconds.
        limit_s: the longest wait.
    """
    began, has_told = time.monotonic(), False
    while not os.path.exists(path):  # unlike Path.exists(), it raises nothing
        waited_s = time.monotonic() - began
        if waited_s > limit_s:
            return False
        if waited_s > _QUIET_S and not has_told:
            has_told = True
            tell(f"waiting for {path} to appear on this node")
        look_anew(path.parent)
        time.sleep(_LOOK_EVERY_S)
    return True


def see_listed(path: Path) -> None:
    """Wait for what its folder lists, where this node still remembers from an earlier look that it is absent."""
    look_anew(path.parent)
    if _is_listed(path):
        wait_to_see(path, _log.warning)


def _is_listed(path: Path) -> bool:
    with suppress(OSError):
        return path.name in os.listdir(path.parent)
    return False


# --- Reading files that other users or programs may have put there ---


_MAX_DOCUMENT_BYTES = 64 * 2**20


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read, if it is a regular one: a FIFO would wait for a writer, a device may never end.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "this is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_document(path: Path, limit: int = _MAX_DOCUMENT_BYTES) -> bytes:
    """Read a whole file of at most ``limit`` bytes.

    Raises:
        OSError: it cannot be read, is not a regular file, or has more bytes.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        if not (_is_listed(path) and wait_to_see(path, _log.warning)):
            raise
        file = open_regular(path)
    with file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EINVAL, f"this has more than {limit:,} bytes", str(path))
    return content


def parse_json(content: bytes | str, **options: Any) -> Any:
    """Parse JSON that anything may have written; ``options`` are those of ``json.loads``.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(content, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_toml(content: bytes) -> dict[str, Any]:
    """Parse TOML that anything may have written.

    Raises:
        ValueError: it is not TOML, or nested too deeply.
    """
    try:
        return tomllib.loads(content.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json_lines(path: Path, *, errors: Literal["strict", "replace"] = "strict") -> list[dict[str, Any]]:
    """Return the records that a JSONL file has now, without torn lines; none if the file is missing.

    Args:
        errors: what becomes of bytes that are not UTF-8.

    Raises:
        UnicodeDecodeError: there are such bytes, with ``strict``.
        OSError: it cannot be read, or is not a regular file.
    """
    try:
        with open_regular(path) as file:
            # Not to its end, which a writer may move for ever.
            lines = file.read(os.fstat(file.fileno()).st_size).decode(errors=errors).splitlines()
    except FileNotFoundError:
        return []
    return parse_json_records(lines)


def parse_json_records(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return the JSON objects among these lines; others and torn lines are skipped."""
    records = []
    for line in lines:
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


# --- Append-only files on disks that may be full or fail for a while ---


_MOST_WAITING = 10_000  # pieces; then the oldest are dropped


class ResilientAppendFile:
    """An append-only file that queues writes while the disk fails. Thread-safe.

    Args:
        path: the file; its parent directory is created if missing.
        tell: receives a message when the disk fails, and one when it works again.
        shared: other processes append to the file too. Then a piece may be written in part, and its rest later;
            otherwise a partial write is truncated.

    Raises:
        RunDirectoryError: the file cannot be opened, for another reason than its disk.
    """

    def __init__(self, path: Path, tell: Callable[[str], object], *, shared: bool = False) -> None:
        self._path = path
        self._tell = tell
        self._shared = shared
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._file: int | None = None
        self._size: int | None = None  # of what got there whole
        self._is_failing = False
        self._has_written = False
        self._dropped = 0
        self._lock = Lock()
        self._closed = False
        self.write(b"")

    def write(self, piece: bytes) -> None:
        """Append a piece now, or queue it until the disk works."""
        with self._lock:
            if len(self._waiting) == _MOST_WAITING:
                self._dropped += 1
            self._waiting.append(piece)
            message = self._write()
        if message:  # outside the lock: the callback may write here
            self._tell(message)

    def fileno(self) -> int:
        """Return the descriptor.

        Raises:
            OSError: the file could not be opened yet.
        """
        if self._file is None:
            raise OSError(f"{self._path} is not open")
        return self._file

    def close(self) -> None:
        """Retry queued writes once, and close; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._write()
            file, self._file = self._file, None
            try:
                if file is not None:
                    os.close(file)
                message = ""
            except OSError as error:  # a disk behind a network may report failed writes as late as here
                message = f"cannot write {self._path}: {error.strerror}. Its last lines may be lost."
        if message:
            self._tell(message)

    def _write(self) -> str:
        """Write the queue; return a message for the user, or ""."""
        content = b"".join(self._waiting)
        try:
            file = self._open()
            if self._is_failing:
                self._truncate(file)
            written = len(content)
            while content:
                content = content[os.write(file, content) :]
        except OSError as error:
            if error.errno not in DISK_ERRORS and not self._has_written:
                self._waiting.clear()
                raise RunDirectoryError(
                    f"cannot write {self._path}: {error.strerror}. Make it writable, then resume the run."
                ) from error
            if self._shared:
                self._waiting.clear()
                self._waiting.append(content)
            elif self._file is not None:
                with suppress(OSError):
                    self._truncate(self._file)
            self._drop()
            first, self._is_failing = not self._is_failing, True
            return f"cannot write {self._path}: {error.strerror}. Training continues." if first else ""
        self._waiting.clear()
        self._has_written = True
        self._size = (self._size or 0) + written
        was_failing, self._is_failing = self._is_failing, False
        dropped, self._dropped = self._dropped, 0
        if not was_failing:
            return ""
        return f"{self._path} is written again" + (f", without {dropped} records." if dropped else ".")

    def _truncate(self, file: int) -> None:
        if not self._shared and self._size is not None and os.fstat(file).st_size != self._size:
            os.ftruncate(file, self._size)

    def _open(self) -> int:
        if self._file is None:
            self._path.parent.mkdir(exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            if self._size is None:
                self._size = os.fstat(self._file).st_size
        return self._file

    def _drop(self) -> None:
        """Have the next write open the file by its path again: a descriptor may be stale for good."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                os.close(file)


class ResilientLog(io.TextIOBase):
    """A text stream that appends whole lines to a log and queues them silently while the disk is full."""

    def __init__(self, path: Path) -> None:
        self._file = ResilientAppendFile(path, lambda message: None, shared=True)
        self._line = ""
        self._assembling = Lock()

    def write(self, text: str) -> int:
        """Append text; it is written when its line is complete."""
        with self._assembling:
            lines, newline, self._line = (self._line + text).rpartition("\n")
            if newline:
                self._file.write((lines + newline).encode(errors="replace"))
        return len(text)

    def flush(self) -> None:
        """Write an incomplete line too."""
        if not self.closed:
            with self._assembling:
                line, self._line = self._line, ""
                if line:
                    self._file.write(line.encode(errors="replace"))

    def close(self) -> None:
        if not self.closed:
            self.flush()
            self._file.close()
            super().close()

    def fileno(self) -> int:
        return self._file.fileno()

    def writable(self) -> bool:
        return True


# --- Fault injection for writes, as by a full or broken disk: for `paceline chaos` and tests ---
#
# While the file that ``PACELINE_WRITE_FAULTS`` names exists, every checkpoint write of the job fails with the
# error that the file contains.


WRITE_FAULTS = "PACELINE_WRITE_FAULTS"

_ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO}


def fail_if_armed(path: Path) -> None:
    """Raise an armed write fault; called before each write to ``path``.

    Raises:
        OSError: a fault is armed.
    """
    armed = os.environ.get(WRITE_FAULTS)
    if armed is None:
        return
    try:
        number = _ERRORS[Path(armed).read_text()]
    except FileNotFoundError:
        return
    raise OSError(number, os.strerror(number), str(path))


# --- The folders that a user's commands keep for one another: in the home directory, where there is one ---


_USER_DIRECTORIES = {
    "cache": ("XDG_CACHE_HOME", ".cache"),
    "config": ("XDG_CONFIG_HOME", ".config"),
    "data": ("XDG_DATA_HOME", ".local/share"),
    "state": ("XDG_STATE_HOME", ".local/state"),
}


def user_directory(kind: Literal["cache", "config", "data", "state"]) -> Path:
    """Return the directory of the XDG specification, which may not exist yet.

    A container's user has often no entry in passwd, and no HOME or one that cannot be written: then the directory is a
    temporary one.

    Raises:
        ConfigError: the temporary one is not this user's alone.
    """
    variable, in_home = _USER_DIRECTORIES[kind]
    # The XDG specification: a relative or empty path counts as not set.
    configured = Path(os.environ.get(variable, ""))
    if configured.is_absolute():
        return configured / "paceline"
    home = home_directory()
    if home is not None and _can_be_made(home / in_home / "paceline"):
        return home / in_home / "paceline"
    directory = private_directory()
    if kind in ("data", "state"):  # what is found again later; and a command's processes ask for the others
        _say(home, directory)
    return directory / kind


def home_directory() -> Path | None:
    """Return the home directory, if this user has one."""
    with suppress(RuntimeError):  # no HOME, and no entry in passwd
        return Path.home()
    return None


def private_directory() -> Path:
    """Make, if need be, and return the temporary directory that all of this user's commands know.

    Raises:
        ConfigError: other users can enter it, or it cannot be made.
    """
    directory = Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made: {error.strerror}. Set TMPDIR.") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{directory} must be a directory that only you can enter (mode 700), or other users could put their "
            "files in it. Remove it, or set TMPDIR."
        )
    return directory


def _can_be_made(directory: Path) -> bool:
    """Return whether a directory is there, or could be."""
    if os.path.exists(directory):  # Path.exists raises an error where a parent cannot be entered
        return True
    existing = next(parent for parent in directory.parents if os.path.exists(parent))
    return os.access(existing, os.W_OK | os.X_OK)


@functools.cache
def _say(home: Path | None, directory: Path) -> None:
    cause = "this user has no home directory" if home is None else f"the home directory {home} cannot be written"
    _log.warning(
        "%s: packages and records of jobs are kept in %s, which may go when this machine or container ends; set HOME "
        "to choose another place",
        cause,
        directory,
    )
