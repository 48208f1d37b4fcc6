"""Consoles and tables, safe for text of others. It imports rich, so commands import it where they print."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

import rich.console
from rich.box import SIMPLE_HEAD
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from paceline.core.standard_streams import escape_controls

_PIPE_COLUMNS = 250


class Console(rich.console.Console):
    """A console that shows control and bidirectional characters as escape sequences."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable() or segment.text == "\n":
                yield segment
            else:
                yield Segment(escape_controls(segment.text, keep="\n"), segment.style)


def wide_console() -> Console:
    """Return a console that does not truncate tables where the output is a pipe, which has no width."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_COLUMNS)


class ListTable(Table):
    """A table with a line below its headings. Cells are text, in which no markup is interpreted.

    Args:
        headings: of the columns; ``>`` before one aligns it to the right.
        folds: the headings of columns whose text may take several lines.
    """

    def __init__(self, *headings: str, folds: Collection[str] = ()) -> None:
        super().__init__(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
        for heading in headings:
            name = heading.removeprefix(">")
            aligned: Literal["left", "right"] = "right" if heading.startswith(">") else "left"
            self.add_column(Text(name), justify=aligned, no_wrap=name not in folds, overflow="fold")

    def add(self, *cells: str | Text, style: str | None = None, end_section: bool = False) -> None:
        """Add a row."""
        texts = (Text(cell) if isinstance(cell, str) else cell for cell in cells)
        self.add_row(*texts, style=style, end_section=end_section)


def short_time(seconds: float) -> str:
    """Format a duration for a narrow column: 42s, 7min, 3.5h, 12d."""
    seconds = max(0.0, seconds)  # a clock may be set back
    if seconds < 100:
        return f"{seconds:.0f}s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f}min"
    return f"{seconds / 3600:.1f}h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f}d"
