"""Standard output and error that nothing reads: closed by the parent, or lost with a terminal or the reader of a pipe.

A run must not end for that: its logs have all that it prints.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, cast

_STREAMS = {"stdout": 1, "stderr": 2}
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


def open_closed_streams() -> None:
    """Open those of the descriptors 0 to 2 that are closed on ``/dev/null``: the next file would get such a number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            discard(descriptor)
    for name, descriptor in _STREAMS.items():
        if getattr(sys, name) is None:
            stream = open(descriptor, "w", buffering=1, closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def discard(descriptor: int) -> None:
    """Have a descriptor lead to ``/dev/null``."""
    opened = os.open(os.devnull, os.O_RDWR)
    if opened == descriptor:
        os.set_inheritable(descriptor, True)
    else:
        os.dup2(opened, descriptor)
        os.close(opened)


class LastingStream:
    """A text stream that drops what cannot be written.

    Once its terminal or its reader is gone, its descriptor leads to ``/dev/null``, also for child processes and for
    Python's own flush at exit.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text if that is possible."""
        try:
            self._stream.write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write what is buffered, if that is possible."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        if error.errno in _FULL_DISK:
            return  # the file takes more later
        try:
            discard(self._stream.fileno())
            self._stream.flush()
        except (OSError, ValueError):
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lasting(stream: TextIO) -> TextIO:
    """Return the stream, as one that drops what cannot be written."""
    return stream if isinstance(stream, LastingStream) else cast("TextIO", LastingStream(stream))


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Print within the block without an error where standard output or error takes nothing any more."""
    open_closed_streams()
    with redirect_stdout(lasting(sys.stdout)), redirect_stderr(lasting(sys.stderr)):
        yield


def print_status(sentence: str) -> None:
    """Print a message for the user; stderr may be a file on a full disk."""
    with suppress(OSError):
        print(f"paceline: {sentence}", file=sys.stderr, flush=True)
