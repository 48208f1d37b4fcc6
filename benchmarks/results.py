"""The results of a benchmark: medians and spreads, ratios within rounds, targets; as JSON, tables and Markdown."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.rounds import Sample, Variant, interleave
from paceline_checks.bench_report import ReportTable, describe_machine

Progress = Callable[[str], None]
"""Shows one line."""


@dataclass(frozen=True)
class Quantity:
    """A measured value: its key in a sample, its heading, and how it is written."""

    key: str
    title: str
    digits: int = 1

    def text(self, value: float) -> str:
        """``value`` as people read it."""
        return f"{value:,.{self.digits}f}"

    def range(self, spread: Spread) -> str:
        """The extremes of ``spread``."""
        return f"{self.text(spread.low)} to {self.text(spread.high)}"


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
        return {name: significant(getattr(self, name)) for name in ("median", "low", "high")}


def significant(value: float) -> float:
    """Round to six significant digits."""
    return float(f"{value:.6g}")


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

    def table(self) -> ReportTable:
        """A row for each contender; or, of one, which has nothing to be compared with, for each quantity."""
        if len(self.rows) > 1:
            return ReportTable(headings=self._headings(), rows=[self._cells(row) for row in self.rows], left=[0])
        [row] = self.rows
        return ReportTable(
            headings=[self.title, "median", "min to max"],
            rows=[
                [quantity.title, quantity.text(spread.median), quantity.range(spread)]
                for quantity, spread in zip(self.quantities, row.spreads, strict=True)
            ],
            left=[0],
        )

    def _headings(self) -> list[str]:
        headings = [self.title]
        for quantity in self.quantities:
            headings += [quantity.title, "min to max"]
        return [*headings, "ratio", "min to max"]

    def _cells(self, row: ComparisonRow) -> list[str]:
        cells = [row.title]
        for quantity, spread in zip(self.quantities, row.spreads, strict=True):
            cells += [quantity.text(spread.median), quantity.range(spread)]
        return [*cells, f"{row.ratio.median:.2f}x", f"{row.ratio.low:.2f} to {row.ratio.high:.2f}"]


def measure(
    title: str,
    quantities: Sequence[Quantity],
    contenders: Sequence[Variant],
    rounds: int,
    progress: Progress,
) -> BenchComparison:
    """Measure contenders in turns, and set each against the first."""
    return compare(title, quantities, contenders, take_samples(title, quantities[0], contenders, rounds, progress))


def take_samples(
    title: str, quantity: Quantity, contenders: Sequence[Variant], rounds: int, progress: Progress
) -> dict[str, list[Sample]]:
    """Measure contenders in turns, and tell of each sample's ``quantity``."""

    def on_sample(number: int, contender: Variant, sample: Sample) -> None:
        value = f"{quantity.text(sample[quantity.key])} {quantity.title}"
        progress(f"round {number}/{rounds}  {title}  {contender.title}  {value}")

    return interleave(contenders, rounds, on_sample)


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


def bars_table(verdicts: Sequence[TargetResult]) -> ReportTable:
    """One row a bar; one that is not met is red in a terminal."""
    return ReportTable(
        headings=("suite", "of what", "figure", "min to max", "bar", ""),
        rows=[verdict.cells for verdict in verdicts],
        title="Bars",
        left=(0, 1, 5),
        failed=[number for number, verdict in enumerate(verdicts) if verdict.met is False],
    )


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """What a suite found.

    Attributes:
        benchmark: the suite's name.
        document: its own part of the JSON document.
        comparisons: its tables, and a part of the document.
        verdicts: bars, another table and part; None: the suite has none.
        other_tables: what is in the document in another form.
        remarks: the lines below the tables, before the machine's.
        closing: those after it.
    """

    benchmark: str
    document: Mapping[str, Any]
    comparisons: Sequence[BenchComparison] | None = None
    verdicts: Sequence[TargetResult] | None = None
    other_tables: Sequence[ReportTable] = ()
    remarks: Sequence[str] = ()
    closing: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """All of it, with the machine and every round's sample."""
        document = {"benchmark": self.benchmark, "machine": describe_machine(), **self.document}
        for name, parts in (("comparisons", self.comparisons), ("verdicts", self.verdicts)):
            if parts is not None:
                document[name] = [part.as_json() for part in parts]
        return document

    def tables(self) -> list[ReportTable]:
        """The comparisons, then the bars."""
        bars = [bars_table(self.verdicts)] if self.verdicts else []
        return [*(comparison.table() for comparison in self.comparisons or ()), *self.other_tables, *bars]

    def notes(self) -> list[str]:
        """The setting, the machine, and the closing lines."""
        machine = "{cpu}, {cores} cores, {memory}; {system}; Python {python}, torch {torch}; {date}."
        return [*self.remarks, machine.format(**describe_machine()), *self.closing]
