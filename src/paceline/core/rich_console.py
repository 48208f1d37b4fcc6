"""rich's console, for text of others."""

from __future__ import annotations

from collections.abc import Iterable

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from paceline.core.printable import escape_controls


class Console(rich.console.Console):
    """A console that shows control and bidirectional characters as escape sequences."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable() or segment.text == "\n":
                yield segment
            else:
                yield Segment(escape_controls(segment.text, keep="\n"), segment.style)
