"""How files are written so that a crash or a full disk leaves the old or the new one, never half of one."""

from __future__ import annotations

import errno
import io
import json
import os
import secrets
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from paceline.core.errors import RunDirectoryError

# --- Files that are written whole or not at all ---


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""What a disk that is full, read-only or broken answers; it may be well again later."""


def _append(path: Path, content: bytes) -> None:
    """Add lines in one write, so that those of several processes do not mix."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            content = b"\n" + content  # a crash or a full disk cut the last line short
        while content:
            content = content[os.write(descriptor, content) :]
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file, readable for others unless private; a crash leaves the old content or the new."""
    # Not by process number: machines that share a directory do not share those.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb", opener=partial(os.open, mode=0o600 if private else 0o666)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make renames inside a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file; missing file: none; a torn last line is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


# --- Files that are only added to, and whose disk may be full or fail for a while ---


_MOST_WAITING = 10_000  # pieces; then the oldest are dropped


class ResilientAppendFile:
    """A file to which pieces are added; those that the disk does not take wait for the next one.

    It may be used by several threads.

    Args:
        path: the file; its folder is made where it is missing.
        tell: is given a sentence when the disk takes no more, and one when it does again.
        shared: others add to the file too. Then a piece may get there in part, and the rest later; else
            what got there of a piece is taken back.

    Raises:
        RunDirectoryError: it cannot be opened, for a reason that will not pass.
    """

    def __init__(self, path: Path, tell: Callable[[str], object], *, shared: bool = False) -> None:
        self._path = path
        self._tell = tell
        self._shared = shared
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._file: int | None = None
        self._size = 0  # of what got there whole
        self._troubled = False
        self._dropped = 0
        self._lock = Lock()
        self._closed = False
        self.write(b"")

    def write(self, piece: bytes) -> None:
        """Add a piece, now or when the disk takes it."""
        with self._lock:
            if len(self._waiting) == _MOST_WAITING:
                self._dropped += 1
            self._waiting.append(piece)
            said = self._write()
        if said:  # outside the lock: whoever is told may write here
            self._tell(said)

    def fileno(self) -> int:
        """The descriptor.

        Raises:
            OSError: the file could not be opened yet.
        """
        if self._file is None:
            raise OSError(f"{self._path} is not open")
        return self._file

    def close(self) -> None:
        """Try once more to write what waits, and close; a second call does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._write()
                if self._file is not None:
                    os.close(self._file)
                    self._file = None

    def _write(self) -> str:
        """Write what waits; what there is to say about it."""
        content = b"".join(self._waiting)
        try:
            file = self._open()
            if self._troubled:
                self._take_back(file)
            written = len(content)
            while content:
                content = content[os.write(file, content) :]
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                self._waiting.clear()
                raise RunDirectoryError(
                    f"cannot write {self._path}: {error.strerror}. Make it writable, then resume the run."
                ) from error
            if self._shared:
                self._waiting.clear()
                self._waiting.append(content)
            elif self._file is not None:
                with suppress(OSError):
                    self._take_back(self._file)
            first, self._troubled = not self._troubled, True
            return f"cannot write {self._path}: {error.strerror}. Training goes on." if first else ""
        self._waiting.clear()
        self._size += written
        was_troubled, self._troubled = self._troubled, False
        dropped, self._dropped = self._dropped, 0
        if not was_troubled:
            return ""
        return f"{self._path} is written again" + (f", without {dropped} records." if dropped else ".")

    def _take_back(self, file: int) -> None:
        if not self._shared and os.fstat(file).st_size != self._size:
            os.ftruncate(file, self._size)

    def _open(self) -> int:
        if self._file is None:
            self._path.parent.mkdir(exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._size = os.fstat(self._file).st_size
        return self._file


class ResilientLog(io.TextIOBase):
    """A text stream into a log, line by line, that takes a full disk with patience and in silence."""

    def __init__(self, path: Path) -> None:
        self._file = ResilientAppendFile(path, lambda said: None, shared=True)
        self._line = ""
        self._assembling = Lock()

    def write(self, text: str) -> int:
        """Add text; it is on its way to the disk when its line has ended."""
        with self._assembling:
            lines, newline, self._line = (self._line + text).rpartition("\n")
            if newline:
                self._file.write((lines + newline).encode(errors="replace"))
        return len(text)

    def flush(self) -> None:
        """Send also a line that has not ended."""
        if not self.closed:
            with self._assembling:
                line, self._line = self._line, ""
                if line:
                    self._file.write(line.encode(errors="replace"))

    def close(self) -> None:
        """Flush and close."""
        if not self.closed:
            self.flush()
            self._file.close()
            super().close()

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._file.fileno()

    def writable(self) -> bool:
        """Always."""
        return True


# --- Makes writes fail as a full or broken disk would: only `paceline chaos` and tests can ask for it ---
#
# A job whose environment names a file in ``PACELINE_WRITE_FAULTS`` fails every write of a checkpoint for as
# long as that file exists, with the error whose name it holds. Without the variable nothing is looked at.


VARIABLE = "PACELINE_WRITE_FAULTS"

_ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO}


@dataclass(frozen=True)
class WriteFaults:
    """Arms the writes of the jobs whose environment names ``file``."""

    file: Path

    @property
    def environment(self) -> dict[str, str]:
        """What to add to the job's environment."""
        return {VARIABLE: str(self.file.absolute())}

    def arm(self, kind: Literal["enospc", "eio"]) -> None:
        """From now on writes fail."""
        temporary = self.file.with_suffix(".new")
        temporary.write_text(kind)
        temporary.replace(self.file)

    def disarm(self) -> None:
        """From now on writes are done; harmless where they are."""
        self.file.unlink(missing_ok=True)


def fail_if_armed(path: Path) -> None:
    """Called before each write to ``path``.

    Raises:
        OSError: writes shall fail.
    """
    armed = os.environ.get(VARIABLE)
    if armed is None:
        return
    try:
        number = _ERRORS[Path(armed).read_text()]
    except FileNotFoundError:
        return
    raise OSError(number, os.strerror(number), str(path))
