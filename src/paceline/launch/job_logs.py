"""Following the log files of a job, several files as one stream."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from paceline.core.files import open_regular

_POLL_S = 0.2
_BLOCK_BYTES = 64 * 1024
_MAX_LINE_BYTES = 2**20


class Tail:
    """The last lines of a file, followed by new ones, even after it was truncated or replaced.

    Args:
        last_lines: number of existing lines to start with; None: all.
    """

    def __init__(self, path: Path, last_lines: int | None = None) -> None:
        self._path = path
        self._file: BinaryIO = open_regular(path)
        if last_lines is not None:
            self._file.seek(_start_of_last_lines(self._file, last_lines))
        self._partial = b""
        self._is_cut = False

    def __enter__(self) -> Tail:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def new_lines(self) -> Iterator[str]:
        """Yield the complete lines since the last call, without line ends."""
        self._reopen_if_replaced()
        while block := self._file.read(_BLOCK_BYTES):
            *complete, self._partial = (self._partial + block).split(b"\n")
            for line in complete:
                if not self._is_cut:
                    yield _displayed(line)
                self._is_cut = False
            if self._is_cut:
                self._partial = b""
            elif len(self._partial) > _MAX_LINE_BYTES:
                yield f"{_displayed(self._partial)} (cut: this line has more than {_MAX_LINE_BYTES:,} bytes)"
                self._is_cut = True
                self._partial = b""

    def unfinished_line(self) -> str:
        """Return the text after the last line end."""
        return _displayed(self._partial)

    def _reopen_if_replaced(self) -> None:
        try:
            now = self._path.stat()
        except FileNotFoundError:
            return
        opened = os.fstat(self._file.fileno())
        if not os.path.samestat(now, opened):
            self._file.close()
            self._file = open_regular(self._path)
        elif now.st_size < self._file.tell():
            self._file.seek(0)
            self._partial = b""


def follow_files(find: Callable[[], Sequence[Path]], *, ended: Callable[[], bool] | None = None) -> Iterator[str]:
    """Yield lines without line ends, an incomplete one last; with a prefix if there are several files.

    Args:
        find: returns the files, asked again and again: only when one exists may its name be known.
        ended: returns True once nothing more will be written; None reads only the present contents.
    """
    with ExitStack() as stack:
        tails: dict[Path, Tail] = {}
        while True:
            last = ended is None or ended()
            paths = find()
            prefixes = {path: f"{path.name} | " if len(paths) > 1 else "" for path in paths}
            for path in paths:
                if path not in tails and path.exists():
                    tails[path] = stack.enter_context(Tail(path))
                if path in tails:
                    for line in tails[path].new_lines():
                        yield prefixes[path] + line
            if last:
                break
            time.sleep(_POLL_S)
        for path, tail in tails.items():
            if rest := tail.unfinished_line():
                yield prefixes.get(path, "") + rest


def _displayed(line: bytes) -> str:
    """Return a line as a terminal displays it, without text that a progress bar has overwritten."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]


def _start_of_last_lines(file: BinaryIO, count: int) -> int:
    """Return the offset of the last ``count`` lines; an incomplete last line counts."""
    size, end = _BLOCK_BYTES, file.seek(0, os.SEEK_END)
    while True:
        position = file.seek(max(0, end - size))
        lines = file.readlines()  # the first one may be a part
        if position == 0 or len(lines) > count:
            return position + sum(map(len, lines[: max(0, len(lines) - count)]))
        size *= 2
