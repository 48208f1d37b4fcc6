"""Bars: what a ratio or a difference is to reach, and whether it did; no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from paceline.insight.bench.comparison import Spread


@dataclass(frozen=True)
class TargetResult:
    """A bar, and what was measured.

    Attributes:
        suite: what was measured.
        contender: whose figure it is, or what of it.
        ratio: over the rounds; their median is judged.
        bar: to be reached; None: the figure is only reported.
        at_most: lower is better.
        unit: of figure and bar; "x" is a ratio.
    """

    suite: str
    contender: str
    ratio: Spread
    bar: float | None
    at_most: bool = False
    unit: str = "x"

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the bar; None where there is none."""
        if self.bar is None:
            return None
        return self.ratio.median <= self.bar if self.at_most else self.ratio.median >= self.bar

    @property
    def cells(self) -> tuple[str, str, str, str, str, str]:
        """In words: suite, contender, figure, spread, bar, and whether it is met."""
        bound = "at most" if self.at_most else "at least"
        return (
            self.suite,
            self.contender,
            f"{self.ratio.median:.2f}{self.unit}",
            f"{self.ratio.low:.2f} to {self.ratio.high:.2f}",
            "none" if self.bar is None else f"{bound} {self.bar:.2f}{self.unit}",
            {True: "met", False: "NOT met", None: ""}[self.met],
        )

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return {**dataclasses.asdict(self), "met": self.met}


_HEADINGS = ("suite", "of what", "figure", "min to max", "bar", "")
_COLOURS = {True: "green", False: "red", None: "default"}


def bars_table(verdicts: Sequence[TargetResult]) -> Table:
    """One line a bar, for a terminal."""
    table = Table(title="Bars")
    for number, heading in enumerate(_HEADINGS):
        table.add_column(heading, justify="right" if number in (2, 3, 4) else "left")
    for verdict in verdicts:
        *cells, met = verdict.cells
        table.add_row(*cells, f"[{_COLOURS[verdict.met]}]{met}[/]" if met else "")
    return table


def bars_markdown(verdicts: Sequence[TargetResult]) -> str:
    """The same for a page."""
    lines = [_HEADINGS, (":--", ":--", "--:", "--:", "--:", ":--"), *(verdict.cells for verdict in verdicts)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"
