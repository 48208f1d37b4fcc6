"""The status of a search, with a table of its trials, and its charts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from paceline.core.errors import LaunchError
from paceline.core.plugins import import_library
from paceline_tune.history import SearchHistory, Trial, TrialState
from paceline_tune.search import Search, show_seconds
from paceline_tune.space import Dimension, Value

_ORDER: tuple[TrialState, ...] = ("running", "waiting", "finished", "goal", "stopped", "diverged", "failed")
_STYLES = {
    "running": "cyan",
    "finished": "green",
    "goal": "green",
    "stopped": "yellow",
    "diverged": "magenta",
    "failed": "red",
    "waiting": "dim",
}
_MAX_SHOWN = 20


def render(
    search: Search,
    journal: SearchHistory,
    *,
    clock_s: float,
    budget: str = "",
    resources: str = "",
    scheduler: str = "",
    notes: Sequence[str] = (),
    show_all: bool = False,
) -> RenderableType:
    """Render the status with a table of trials: the most interesting ones, or all with ``show_all``.

    Args:
        resources: used ones of the cluster: "2/2 CPUs".
    """
    trials = [journal.trials[number] for number in sorted(journal.trials)]
    counts = Counter(trial.state for trial in trials)
    num_started = len(trials) - counts["waiting"]
    counts["waiting"] = search.planned - num_started
    states = ", ".join(f"{counts[state]} {state}" for state in _ORDER if counts[state])
    lines = [f"Trials: {num_started}/{search.planned} ({states}); {show_seconds(clock_s)}"]
    if search.scheduler == "pbt" and trials:
        lines.append(f"PBT: generation {search.generation(trials[-1].number) + 1} of {search.generations}")
    if scheduler:
        lines.append(scheduler)
    if resources:
        lines.append(f"Resources in use: {resources}")
    if budget:
        lines.append(f"Budget: {budget}")
    ranking = journal.ranking(search.metric_name, search.mode, search.repeats)
    if ranking:
        lines.append(f"Best: trial {ranking[0].trials[0].number:05d}, {search.metric_name} {ranking[0].show()}")
    header = Text("\n".join(lines))
    shown = trials if show_all or len(trials) <= _MAX_SHOWN else _most_interesting(search, trials)
    warnings = (Text(note, style="yellow") for note in notes)
    parts: list[RenderableType] = [header, *warnings, _TrialTable(search, shown)]
    if len(shown) < len(trials):
        parts.append(Text(f"... and {len(trials) - len(shown)} more", style="dim"))
    return Group(*parts)


def _most_interesting(search: Search, trials: Sequence[Trial]) -> list[Trial]:
    sign = 1.0 if search.mode == "max" else -1.0

    def rank(trial: Trial) -> tuple[bool, float]:
        value = trial.best(search.metric_name, search.mode)
        return trial.state == "running", float("-inf") if value is None else sign * value

    return sorted(sorted(trials, key=rank, reverse=True)[:_MAX_SHOWN], key=lambda trial: trial.number)


_HIDDEN: tuple[tuple[str, ...], ...] = ((), ("loc",), ("loc", "iter", "time"))
"""Columns that a narrow terminal does without, in turn."""

_WIDEST = 10_000  # columns


@dataclass(frozen=True)
class _TrialTable:
    """A table of trials with as many columns as fit; at last, one column has all parameters."""

    search: Search
    trials: Sequence[Trial]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(max_width=_WIDEST)
        for hidden in _HIDDEN:
            table = self._table(hidden)
            if console.measure(table, options=wide).maximum <= options.max_width:
                yield table
                return
        yield self._table(_HIDDEN[-1], in_one_column=True)

    def _table(self, hidden: Sequence[str], *, in_one_column: bool = False) -> Table:
        search = self.search
        names = [dimension.name for dimension in search.parsed_space.dimensions]
        metric = f"best {search.metric_name}"  # the number that the end ranks by
        table = Table("trial", "status")
        rows = [[f"{trial.number:05d}", trial.state] for trial in self.trials]

        def add(heading: str, cells: Iterable[str], justify: JustifyMethod = "right", **layout: Any) -> None:
            table.add_column(escape(heading), justify=justify, **layout)
            for row, cell in zip(rows, cells, strict=True):
                row.append(escape(cell))

        if "loc" not in hidden:
            add("loc", [trial.placed for trial in self.trials], "left")
        parameters = [trial.parameters(search) for trial in self.trials]
        if in_one_column:
            texts = [
                " ".join(f"{name}={show_value(values[name])}" for name in names if name in values)
                for values in parameters
            ]
            add("parameters", texts, "left", overflow="fold")
        else:
            for name in names:
                add(name, [show_value(values[name]) if name in values else "" for values in parameters])
        if search.repeats > 1:
            add("seed", [str(search.seed + trial.number % search.repeats) for trial in self.trials])
        best = [trial.best(search.metric_name, search.mode) for trial in self.trials]
        add(metric, ["" if value is None else f"{value:.6g}" for value in best])
        if "iter" not in hidden:
            add("iter", [str(trial.iteration or "") for trial in self.trials])
        add("step", [str(trial.step or "") for trial in self.trials])
        if "time" not in hidden:
            add("total time", [show_seconds(trial.seconds) if trial.results else "" for trial in self.trials])
        for trial, row in zip(self.trials, rows, strict=True):
            table.add_row(*row, style=_STYLES[trial.state])
        return table


def show_value(value: Value) -> str:
    """Format a parameter's value."""
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- Charts: learning curves, and parallel coordinates of parameters and results ---


_SIZE = (9.0, 5.0)  # inches
_MAX_TICKS = 8
_MARGIN = 0.04  # above and below the values of an axis


def draw(search: Search, journal: SearchHistory, directory: Path) -> list[Path]:
    """Write ``curves.svg`` and ``parallel.svg``; return the paths of the written files.

    Raises:
        LaunchError: the plotting library is not installed.
    """
    figures = import_library("matplotlib.figure", "a plot", "report", LaunchError)
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    best = journal.best(search.metric_name, search.mode, search.repeats)
    values = {trial.number: trial.best(search.metric_name, search.mode) for trial in journal.trials.values()}
    scored = [(journal.trials[number], value) for number, value in values.items() if value is not None]
    if not scored:
        return []
    low, high = min(value for _, value in scored), max(value for _, value in scored)
    # Better values are darker, as the background is white.
    colours = colormaps["viridis_r" if search.mode == "max" else "viridis"]
    colour = ScalarMappable(Normalize(low, high if high > low else low + 1), colours)
    written = []
    for name, plot in (("curves", _curves), ("parallel", _parallel)):
        figure = figures.Figure(figsize=_SIZE, layout="constrained")
        plot(figure, search, scored, best, colour)
        path = directory / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        written.append(path)
    return written


_Scored = Sequence[tuple[Trial, float]]
"""Trials with their best values."""


def _curves(figure: Any, search: Search, scored: _Scored, best: Trial | None, colour: Any) -> None:
    """Plot the metric over the steps, one line per trial, with a cross where a trial ended early."""
    axes = figure.add_subplot()
    for trial, value in scored:
        steps, ys = zip(*trial.curve(search.metric_name), strict=True)
        style: Any = {"linewidth": 1.0, "zorder": 2}
        if trial is best:
            style = {"linewidth": 2.5, "zorder": 3, "label": f"trial {trial.number} (best)"}
        marker = "o" if trial.state in ("finished", "goal") else "x"
        axes.plot(steps, ys, color=colour.to_rgba(value), marker=marker, markevery=[-1], markersize=5, **style)
    axes.set_xlabel("step")
    axes.set_ylabel(f"{search.metric_name} (val)")
    axes.set_title(f"{len(scored)} trials of {search.options['task']}; crosses: ended early")
    axes.grid(alpha=0.3)
    if best is not None:
        axes.legend()


def _parallel(figure: Any, search: Search, scored: _Scored, best: Trial | None, colour: Any) -> None:
    """Draw parallel coordinates (Inselberg): one axis per parameter and one for the result, one line per trial."""
    axes = figure.add_subplot()
    dimensions = search.parsed_space.dimensions
    # Draw better trials on top.
    ranked = sorted(scored, key=lambda pair: pair[1], reverse=search.mode == "min")
    low, high = sorted((ranked[0][1], ranked[-1][1]))
    for trial, value in ranked:
        parameters = trial.parameters(search)
        # A line has a gap at a dimension that does not apply to its trial.
        ys = [_height(d, parameters[d.name]) if d.name in parameters else math.nan for d in dimensions]
        ys.append((value - low) / (high - low) if high > low else 0.5)
        width = 2.5 if trial is best else 1.0
        axes.plot(range(len(ys)), ys, color=colour.to_rgba(value), linewidth=width, alpha=0.9)
    for axis, dimension in enumerate(dimensions):
        for height, text in _ticks(dimension):
            place: Any = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "zorder": 4}
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5}
            axes.annotate(text, (axis, height), fontsize=8, bbox=box, **place)
    for axis in range(len(dimensions) + 1):
        axes.axvline(axis, color="0.3", linewidth=0.8, zorder=3)
    axes.set_xticks(range(len(dimensions) + 1), [*(d.name for d in dimensions), search.metric_name])
    axes.set_yticks([])
    axes.set_ylim(-_MARGIN, 1 + _MARGIN)
    axes.set_xlim(-0.15, len(dimensions) + 0.15)
    for side in ("top", "left", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_title(f"{len(scored)} trials of {search.options['task']}; thick: best")
    figure.colorbar(colour, ax=axes, label=f"{search.metric_name} (val)")


def _height(dimension: Dimension, value: Any) -> float:
    """Return the position of a value on its axis, from 0 to 1."""
    from matplotlib.colors import LogNorm, Normalize

    if dimension.kind == "choice":
        return dimension.values.index(value) / max(1, len(dimension.values) - 1)
    scale = LogNorm if dimension.kind.startswith("log") else Normalize
    return float(scale(*dimension.bounds)(float(value)))


def _ticks(dimension: Dimension) -> list[tuple[float, str]]:
    """Return the labels of an axis: all choices, or both ends of a range and what fits between them."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    if dimension.kind == "choice":
        return [(_height(dimension, value), str(value)) for value in dimension.values]
    low, high = dimension.bounds
    locator = (
        LogLocator() if dimension.kind.startswith("log") else MaxNLocator(_MAX_TICKS, integer="int" in dimension.kind)
    )
    between = [value for value in map(float, locator.tick_values(low, high)) if low < value < high]
    heights = {value: _height(dimension, value) for value in (low, *between, high)}
    return [
        (height, show_value(value))
        for value, height in heights.items()
        if value in (low, high) or _MARGIN < height < 1 - _MARGIN
    ]
