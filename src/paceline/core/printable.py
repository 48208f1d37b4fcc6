"""Text of others on a terminal: control and bidirectional characters are shown as escape sequences.

A package, a registry, a run or a client can send them; a terminal obeys them, and so could hide or replace what
Paceline prints.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TextIO

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
