"""Samples compared: medians, spreads and ratios, as JSON, as a table and as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from paceline.insight.bench.rounds import Sample, Variant


@dataclass(frozen=True)
class Quantity:
    """A measured value: its key in a sample, its heading, and how it is written."""

    key: str
    title: str
    digits: int = 1

    def text(self, value: float) -> str:
        """``value`` as people read it."""
        return f"{value:,.{self.digits}f}"


STEPS_PER_S = Quantity("steps_per_s", "steps/s")
MS_PER_STEP = Quantity("ms_per_step", "ms/step", 2)
MEMORY = Quantity("memory_mib", "MiB a rank", 0)
SLOW_SHARE = Quantity("slow_share", "slow rank's micro-batches", 0)
STALL = Quantity("checkpoint_stall_percent", "stall %", 2)


@dataclass(frozen=True)
class Spread:
    """Median and extremes over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def as_json(self) -> dict[str, float]:
        """Six significant digits of each."""
        return {name: float(f"{getattr(self, name):.6g}") for name in ("median", "low", "high")}


@dataclass(frozen=True)
class ComparisonRow:
    """One contender: a spread for each quantity, and the first quantity's ratio to the baseline's."""

    name: str
    title: str
    spreads: Sequence[Spread]
    ratio: Spread
    samples: Sequence[Sample]


@dataclass(frozen=True)
class BenchComparison:
    """One table: contenders measured in the same rounds.

    Attributes:
        title: of the table.
        quantities: its columns; ratios are of the first.
        rows: the baseline first.
    """

    title: str
    quantities: Sequence[Quantity]
    rows: Sequence[ComparisonRow]

    def as_json(self) -> dict[str, Any]:
        """All of it, with every round's sample."""
        return {
            "title": self.title,
            "baseline": self.rows[0].name,
            "ratio_of": self.quantities[0].key,
            "rows": [
                {
                    "name": row.name,
                    "title": row.title,
                    **{q.key: s.as_json() for q, s in zip(self.quantities, row.spreads, strict=True)},
                    "ratio": row.ratio.as_json(),
                    "rounds": list(row.samples),
                }
                for row in self.rows
            ],
        }

    def as_table(self) -> Table:
        """For a terminal."""
        headings, *lines = self._lines()
        table = Table()
        for index, heading in enumerate(headings):
            table.add_column(heading, justify="left" if index == 0 else "right")
        for cells in lines:
            table.add_row(*cells)
        return table

    def as_markdown(self) -> str:
        """For a README."""
        headings, *lines = self._lines()
        lines = [headings, [":--", *["--:"] * (len(headings) - 1)], *lines]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"

    def _lines(self) -> list[list[str]]:
        if len(self.rows) > 1:
            return [self._headings(), *[self._cells(row) for row in self.rows]]
        # One contender has nobody to be compared with: a line for each quantity is easier to read.
        [row] = self.rows
        quantities = zip(self.quantities, row.spreads, strict=True)
        return [
            [self.title, "median", "min to max"],
            *[
                [q.title, q.text(spread.median), f"{q.text(spread.low)} to {q.text(spread.high)}"]
                for q, spread in quantities
            ],
        ]

    def _headings(self) -> list[str]:
        headings = [self.title]
        for quantity in self.quantities:
            headings += [quantity.title, "min to max"]
        return [*headings, "ratio", "min to max"]

    def _cells(self, row: ComparisonRow) -> list[str]:
        cells = [row.title]
        for quantity, spread in zip(self.quantities, row.spreads, strict=True):
            cells += [
                quantity.text(spread.median),
                f"{quantity.text(spread.low)} to {quantity.text(spread.high)}",
            ]
        return [*cells, f"{row.ratio.median:.2f}x", f"{row.ratio.low:.2f} to {row.ratio.high:.2f}"]


def compare(
    title: str,
    quantities: Sequence[Quantity],
    contenders: Sequence[Variant],
    samples: Mapping[str, Sequence[Sample]],
) -> BenchComparison:
    """Set each contender against the first.

    Ratios are taken within each round and their median reported, so that what slows a whole round
    down cancels out.
    """
    key = quantities[0].key
    baseline = samples[contenders[0].name]
    rows = []
    for contender in contenders:
        own = samples[contender.name]
        rows.append(
            ComparisonRow(
                name=contender.name,
                title=contender.title,
                spreads=[Spread.of([sample[q.key] for sample in own]) for q in quantities],
                ratio=Spread.of([mine[key] / theirs[key] for mine, theirs in zip(own, baseline, strict=True)]),
                samples=own,
            )
        )
    return BenchComparison(title, quantities, rows)
