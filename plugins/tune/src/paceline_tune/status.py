"""The status of a search: rungs, resources, counts, and a table of trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from paceline_tune.history import SearchHistory, Trial, TrialState
from paceline_tune.search import Search, show_seconds
from paceline_tune.space import Value

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


@dataclass(frozen=True, kw_only=True)
class SearchStatus:
    """The status of a search in addition to its journal.

    Attributes:
        resources: used resources of the cluster: "2/2 CPUs".
    """

    clock_s: float
    resources: str = ""
    scheduler: str = ""
    budget: str = ""
    notes: Sequence[str] = ()


def render(search: Search, journal: SearchHistory, status: SearchStatus, *, show_all: bool = False) -> RenderableType:
    """Render the status with a table of trials: the most interesting ones, or all with ``show_all``."""
    trials = [journal.trials[number] for number in sorted(journal.trials)]
    counts = Counter(trial.state for trial in trials)
    num_started = len(trials) - counts["waiting"]
    counts["waiting"] = search.planned - num_started
    states = ", ".join(f"{counts[state]} {state}" for state in _ORDER if counts[state])
    lines = [f"Trials: {num_started}/{search.planned} ({states}); {show_seconds(status.clock_s)}"]
    if search.scheduler == "pbt" and trials:
        lines.append(f"PBT: generation {search.generation(trials[-1].number) + 1} of {search.generations}")
    if status.scheduler:
        lines += status.scheduler.splitlines()
    if status.resources:
        lines.append(f"Resources in use: {status.resources}")
    if status.budget:
        lines.append(f"Budget: {status.budget}")
    ranking = journal.ranking(search.metric_name, search.mode, search.repeats)
    if ranking:
        lines.append(f"Best: trial {ranking[0].trials[0].number:05d}, {search.metric_name} {ranking[0].show()}")
    header = Text("\n".join(lines))
    notes = [Text(note, style="yellow") for note in status.notes]
    shown = trials if show_all or len(trials) <= _MAX_SHOWN else _most_interesting(search, trials)
    parts: list[RenderableType] = [header, *notes, _TrialTable(search, shown)]
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
