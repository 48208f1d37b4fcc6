"""How a measurement is shown: a table for a terminal or a document, JSON, a chart, and the machine it belongs to.

No torch is imported.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json as json_module
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.text import Text

from paceline.core.errors import ConfigError
from paceline.core.output import Console, ListTable
from paceline.core.plugins import install_command

_ALARMS = ("WRONG", "NOT met")
"""Words of a note that a terminal shows in red."""


@dataclass(frozen=True, kw_only=True)
class ReportTable:
    """A table whose cells are ready to print.

    Attributes:
        title: above the table, bold in a document; "": no line.
        left: columns that are aligned to the left; the others to the right.
        failed: rows that a terminal shows in red.
        bars: for each row, the filled part of its bar on a terminal.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    subtitle: str = ""
    left: Sequence[int] = ()
    failed: Sequence[int] = ()
    bars: Sequence[float] | None = None

    def as_rich(self) -> ListTable:
        headings = [heading if column in self.left else f">{heading}" for column, heading in enumerate(self.headings)]
        bars = [] if self.bars is None else [[Text("━" * round(20 * share), "cyan")] for share in self.bars]
        table = ListTable(*headings, *([""] if bars else []), folds=self.headings)
        table.title = Text(": ".join(filter(None, (self.title, self.subtitle)))) or None
        table.title_justify = "left"
        for number, cells in enumerate(self.rows):
            table.add(*cells, *(bars[number] if bars else []), style="red" if number in self.failed else None)
        return table

    def as_markdown(self) -> str:
        rules = [":--" if column in self.left else "--:" for column in range(len(self.headings))]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.headings, rules, *self.rows)]
        if self.title:
            lines.insert(0, f"**{self.title}**" + (f": {self.subtitle}" if self.subtitle else "") + "\n")
        return "\n".join([*lines, ""])


class Report(Protocol):
    """What a benchmark found; the notes are lines below the tables."""

    def as_json(self) -> dict[str, Any]: ...
    def tables(self) -> Sequence[ReportTable]: ...
    def notes(self) -> Sequence[str]: ...


def print_report(report: Report, *, json: bool = False, markdown: bool = False) -> None:
    """Print a report: tables for a terminal, or else JSON or Markdown."""
    if json:
        print(json_module.dumps(report.as_json(), indent=2))
    elif markdown:
        for line in [*(table.as_markdown() for table in report.tables()), *report.notes()]:
            print(line)
    else:
        console = Console()
        for table in report.tables():
            console.print(table.as_rich())
        for note in report.notes():
            alarming = any(word in note for word in _ALARMS)
            console.print(note, style="bold red" if alarming else "dim", markup=False, highlight=False)


def size_text(size: float, digits: int = 4) -> str:
    """``8 B``, ``1 KiB``, ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.{digits}g} {unit}"
        size /= 1024
    return f"{size:.{digits}g} TiB"


# --- the machine ---


def describe_machine() -> dict[str, str]:
    """Return CPU, cores, memory, kernel, Python, torch and today's date (UTC), each as text."""
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "cpu": _cpu_model(),
        "cores": str(cores),
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _cpu_model() -> str:
    with suppress(OSError, StopIteration):  # only x86 names its model there
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


# --- the chart ---

Point = tuple[float, float]


def require_matplotlib() -> None:
    """Check that a chart can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"a chart needs matplotlib, which is not installed. Run: {install_command('report')}")


def line_chart(
    series: Mapping[str, Sequence[Point]],
    path: Path,
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_text: Callable[[float], str] = "{:g}".format,
) -> None:
    """Draw lines into an SVG file, over an axis with equal steps for equal ratios; the vertical axis begins at 0.

    Args:
        series: points by name, each with x above 0.
        x_text: how a number on the horizontal axis is written.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure = Figure(figsize=(7.6, 4.4), layout="constrained")
        axes = figure.subplots()
        for name, points in series.items():
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        xs = sorted({x for points in series.values() for x, _ in points})
        shown = xs[:: max(1, -(-len(xs) // 9))]
        axes.set_xscale("log", base=2)
        axes.set_xticks(shown, [x_text(x) for x in shown])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set(ylim=(0, None), xlabel=x_label, ylabel=y_label, title=title)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        figure.savefig(path, metadata={"Date": None})
