"""Two charts of a search: learning curves, and parallel coordinates of parameters and results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.core.errors import LaunchError
from paceline.core.plugins import import_library
from paceline_tune.history import SearchHistory, Trial
from paceline_tune.search import Search
from paceline_tune.space import Dimension
from paceline_tune.status import show_value

_SIZE = (9.0, 5.0)  # inches
_MAX_TICKS = 8
_MARGIN = 0.04  # above and below the values of an axis


def draw(search: Search, journal: SearchHistory, directory: Path) -> list[Path]:
    """Write ``curves.svg`` and ``parallel.svg``; return the paths of the written files.

    Raises:
        LaunchError: the plotting library is not installed.
    """
    figures = import_library("matplotlib.figure", "a plot", "report", LaunchError)
    best = journal.best(search.metric_name, search.mode, search.repeats)
    scored_trials = [trial for trial in journal.trials.values() if trial.curve(search.metric_name)]
    if not scored_trials:
        return []
    written = []
    for name, plot in (("curves", _curves), ("parallel", _parallel)):
        figure = figures.Figure(figsize=_SIZE, layout="constrained")
        plot(figure, search, scored_trials, best)
        path = directory / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        written.append(path)
    return written


def _colour(search: Search, trials: Sequence[Trial]) -> Any:
    """Map values to colours; better values are darker, as the background is white."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    values = _best_values(search, trials)
    scale = Normalize(min(values), max(values) if max(values) > min(values) else min(values) + 1)
    return ScalarMappable(scale, colormaps["viridis_r" if search.mode == "max" else "viridis"])


def _best_values(search: Search, trials: Sequence[Trial]) -> list[float]:
    best = [trial.best(search.metric_name, search.mode) for trial in trials]
    return [value for value in best if value is not None]


def _curves(figure: Any, search: Search, trials: Sequence[Trial], best: Trial | None) -> None:
    """Plot the metric over the steps, one line per trial, with a cross where a trial ended early."""
    axes = figure.add_subplot()
    colour = _colour(search, trials)
    values = _best_values(search, trials)
    for trial, value in zip(trials, values, strict=True):
        steps, ys = zip(*trial.curve(search.metric_name), strict=True)
        is_best = trial is best
        axes.plot(
            steps,
            ys,
            color=colour.to_rgba(value),
            linewidth=2.5 if is_best else 1.0,
            marker="o" if trial.state in ("finished", "goal") else "x",
            markevery=[-1],
            markersize=5,
            zorder=3 if is_best else 2,
            label=f"trial {trial.number} (best)" if is_best else None,
        )
    axes.set_xlabel("step")
    axes.set_ylabel(f"{search.metric_name} (val)")
    axes.set_title(f"{len(trials)} trials of {search.options['task']}; crosses: ended early")
    axes.grid(alpha=0.3)
    if best is not None:
        axes.legend()


def _parallel(figure: Any, search: Search, trials: Sequence[Trial], best: Trial | None) -> None:
    """Draw parallel coordinates (Inselberg): one axis per parameter and one for the result, one line per trial."""
    axes = figure.add_subplot()
    colour = _colour(search, trials)
    values = _best_values(search, trials)
    dimensions = search.parsed_space.dimensions
    low, high = min(values), max(values)
    # Draw better trials on top.
    ranked = sorted(zip(trials, values, strict=True), key=lambda pair: pair[1], reverse=search.mode == "min")
    for trial, value in ranked:
        parameters = trial.parameters(search)
        # A line has a gap at a dimension that does not apply to its trial.
        ys = [_height(d, parameters[d.name]) if d.name in parameters else math.nan for d in dimensions]
        ys.append((value - low) / (high - low) if high > low else 0.5)
        width = 2.5 if trial is best else 1.0
        axes.plot(range(len(ys)), ys, color=colour.to_rgba(value), linewidth=width, alpha=0.9)
    for axis, dimension in enumerate(dimensions):
        for height, text in _ticks(dimension):
            axes.annotate(
                text,
                (axis, height),
                xytext=(4, 0),
                textcoords="offset points",
                fontsize=8,
                va="center",
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5},
                zorder=4,
            )
    for axis in range(len(dimensions) + 1):
        axes.axvline(axis, color="0.3", linewidth=0.8, zorder=3)
    axes.set_xticks(range(len(dimensions) + 1), [*(d.name for d in dimensions), search.metric_name])
    axes.set_yticks([])
    axes.set_ylim(-_MARGIN, 1 + _MARGIN)
    axes.set_xlim(-0.15, len(dimensions) + 0.15)
    for side in ("top", "left", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_title(f"{len(trials)} trials of {search.options['task']}; thick: best")
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
