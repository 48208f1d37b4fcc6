"""Where a search stands, for people: rungs, resources, counts, and a row for each trial."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from paceline.tune.history import SearchHistory, Trial, TrialState
from paceline.tune.search import Search, Value, show_seconds

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
_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class SearchStatus:
    """What there is to show, besides the journal.

    Attributes:
        clock_s: seconds that the search has taken.
        resources: how much of the cluster's is in use: "2/2 CPUs".
        scheduler: the scheduler's own words.
        budget: what is spent of it, in words.
        notes: warnings.
    """

    clock_s: float
    resources: str = ""
    scheduler: str = ""
    budget: str = ""
    notes: Sequence[str] = ()


def render(search: Search, journal: SearchHistory, standing: SearchStatus, *, every: bool = False) -> RenderableType:
    """The status, with a table of trials.

    Args:
        search: what is searched.
        journal: what is known of its trials.
        standing: what else there is to say.
        every: a row for each trial, not only for the most interesting ones.
    """
    trials = [journal.trials[number] for number in sorted(journal.trials)]
    counts = Counter(trial.state for trial in trials)
    begun = len(trials) - counts["waiting"]
    counts["waiting"] = search.planned - begun
    states = ", ".join(f"{counts[state]} {state}" for state in _ORDER if counts[state])
    lines = [f"Trials: {begun}/{search.planned} ({states}); {show_seconds(standing.clock_s)}"]
    if standing.scheduler:
        lines += standing.scheduler.splitlines()
    if standing.resources:
        lines.append(f"Resources in use: {standing.resources}")
    if standing.budget:
        lines.append(f"Budget: {standing.budget}")
    best = journal.best(search.metric_name, search.mode)
    if best is not None:
        value = best.best(search.metric_name, search.mode)
        lines.append(f"Best: trial {best.number}, {search.metric_name} {value:.6g}")
    header = Text("\n".join(lines))
    notes = [Text(note, style="yellow") for note in standing.notes]
    shown = trials if every or len(trials) <= _SHOWN else _most_interesting(search, trials)
    parts: list[RenderableType] = [header, *notes, _table(search, shown)]
    if len(shown) < len(trials):
        parts.append(Text(f"... and {len(trials) - len(shown)} more", style="dim"))
    return Group(*parts)


def _most_interesting(search: Search, trials: Sequence[Trial]) -> list[Trial]:
    """Those at work, then the best ones; in the order of their numbers."""
    sign = 1.0 if search.mode == "max" else -1.0

    def rank(trial: Trial) -> tuple[bool, float]:
        value = trial.best(search.metric_name, search.mode)
        return trial.state == "running", float("-inf") if value is None else sign * value

    return sorted(sorted(trials, key=rank, reverse=True)[:_SHOWN], key=lambda trial: trial.number)


def _table(search: Search, trials: Sequence[Trial]) -> Table:
    names = [dimension.field for dimension in search.parsed_space.dimensions]
    measured = escape(search.metric_name)
    table = Table("trial", "status", "loc", *names, measured, "iter", "step", "total time")
    for column in table.columns[3:]:
        column.justify = "right"
    for trial in trials:
        parameters = search.parsed_space.parameters(trial.number)
        value = trial.last(search.metric_name)
        table.add_row(
            f"{trial.number:05d}",
            trial.state,
            escape(trial.placed),
            *(escape(show_value(parameters[name])) for name in names),
            "" if value is None else f"{value:.6g}",
            str(trial.iteration or ""),
            str(trial.step or ""),
            show_seconds(trial.seconds) if trial.results else "",
            style=_STYLES[trial.state],
        )
    return table


def show_value(value: Value) -> str:
    """A parameter's value, in a few characters."""
    return f"{value:g}" if isinstance(value, float) else str(value)
