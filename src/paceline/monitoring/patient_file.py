"""Files that are only added to, and whose disk may be full or fail for a while."""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock

from paceline.errors import RunDirectoryError
from paceline.run_directory import DISK_ERRORS

_MOST_WAITING = 10_000  # pieces; then the oldest are dropped


class PatientFile:
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


class PatientLog(io.TextIOBase):
    """A text stream into a log, line by line, that takes a full disk with patience and in silence."""

    def __init__(self, path: Path) -> None:
        self._file = PatientFile(path, lambda said: None, shared=True)
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
