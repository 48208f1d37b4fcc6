"""Standard output and error: that nothing reads any more, and what may be printed on a terminal."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, cast

# --- Streams that the parent has closed, or that are lost with a terminal or the reader of a pipe ---
#
# A run must not end for that: its logs have all that it prints.

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


# --- Text of others: control and bidirectional characters are shown as escape sequences ---
#
# A package, a registry, a run or a client can send them; a terminal obeys them, and so could hide or replace what
# Paceline prints.

# Control characters, marks that change the direction of text, line separators, annotations, tags, lone surrogates.
_CONTROLS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)

_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")


def escape_controls(text: str, *, keep: str = "") -> str:
    r"""Return the text with each control and bidirectional character as ``\x1b`` or ``\u202e``, except ``keep``."""
    return _CONTROLS.sub(lambda match: match[0] if match[0] in keep else _escape(match[0]), text)


def printable_output(text: str, *, keep: str = "") -> str:
    """Return what a program printed without its colours, and with all other control characters escaped."""
    return escape_controls(_COLOURS.sub("", text), keep=keep)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class PrintableStream:
    """A text stream that drops colours and shows the other control characters, except ends of lines and tabs.

    Attributes:
        rich_proxied_file: the stream itself, to which rich's consoles write; ``rich_console.Console`` escapes texts
            before it adds colours.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(printable_output(text, keep="\n\t"))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)
