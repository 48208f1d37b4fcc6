"""How a measurement is shown: a table for a terminal or a document, JSON, a chart, and the machine it belongs to.

No torch is imported.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json as json_module
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape as escape_html
from pathlib import Path
from typing import Any, Protocol

from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from paceline.core.output import Console

_ALARMS = ("WRONG", "NOT met")
"""Words of a note that a terminal shows in red."""


@dataclass(frozen=True, kw_only=True)
class ReportTable:
    """A table whose cells are ready to print.

    Attributes:
        title: above the table, bold in a document; "": no line.
        subtitle: follows the title.
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

    def as_rich(self) -> Table:
        """For a terminal."""
        title = ": ".join(text for text in (self.title, self.subtitle) if text)
        table = Table(title=escape(title) if title else None, title_justify="left")
        for column, heading in enumerate(self.headings):
            table.add_column(heading, justify="left" if column in self.left else "right")
        if self.bars is not None:
            table.add_column("")
        for number, cells in enumerate(self.rows):
            bar = []
            if self.bars is not None:
                bar = [ProgressBar(1.0, self.bars[number], width=20, complete_style="cyan", finished_style="cyan")]
            table.add_row(*map(escape, cells), *bar, style="red" if number in self.failed else None)
        return table

    def as_markdown(self) -> str:
        """For a document."""
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


_SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(size: float, digits: int = 4) -> str:
    """``8 B``, ``1 KiB``, ``1.5 MiB``."""
    power = 0
    while size >= 1024 ** (power + 1) and power < len(_SIZE_UNITS) - 1:
        power += 1
    return f"{size / 1024**power:.{digits}g} {_SIZE_UNITS[power]}"


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
        "torch": installed_version("torch") or "none",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def machine_note() -> str:
    """Return the machine in a line."""
    line = "{cpu}, {cores} cores, {memory}; {system}; Python {python}, torch {torch}; {date}."
    return line.format(**describe_machine())


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None; nothing is imported."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    # Only x86 names its model there.
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# --- the chart: SVG, small enough to need no library ---

Point = tuple[float, float]

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 150, 40, 52
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b")


def line_chart(
    series: Mapping[str, Sequence[Point]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_text: Callable[[float], str] = "{:g}".format,
    y_text: Callable[[float], str] = "{:g}".format,
) -> str:
    """Draw lines over a horizontal axis with equal steps for equal ratios; the vertical axis begins at 0.

    Args:
        series: points by name, each with x above 0.
        x_text, y_text: how a number on an axis is written.
    """
    xs = sorted({x for points in series.values() for x, _ in points})
    top = _round_up(max((y for points in series.values() for _, y in points), default=1.0))
    low, high = math.log2(xs[0]), math.log2(xs[-1])

    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        along = (math.log2(x) - low) / (high - low) if high > low else 0.5
        return _LEFT + along * (right - _LEFT), bottom - y / top * (bottom - _TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape_html(title)}</text>',
        f'<text x="{(_LEFT + right) / 2:.1f}" y="{_HEIGHT - 12}" text-anchor="middle">{escape_html(x_label)}</text>',
        f'<text x="16" y="{(_TOP + bottom) / 2:.1f}" text-anchor="middle" '
        f'transform="rotate(-90 16 {(_TOP + bottom) / 2:.1f})">{escape_html(y_label)}</text>',
    ]
    for step in range(6):
        value = top * step / 5
        _, y = place(xs[0], value)
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape_html(y_text(value))}</text>')
    for x in xs[:: max(1, -(-len(xs) // 9))]:
        across, _ = place(x, 0)
        parts.append(f'<text x="{across:.1f}" y="{bottom + 18}" text-anchor="middle">{escape_html(x_text(x))}</text>')
    for number, (name, points) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        placed = [place(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
        at = _TOP + 14 + 20 * number
        parts.append(f'<line x1="{right + 12}" x2="{right + 32}" y1="{at}" y2="{at}" stroke="{colour}"/>')
        parts.append(f'<text x="{right + 38}" y="{at + 4}">{escape_html(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _round_up(value: float) -> float:
    """Return the next 1, 2 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value)
