"""The status of a search: rungs, resources, counts, and a table of trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from paceline.tune.history import SearchHistory, Trial, TrialState
from paceline.tune.search import Search, show_seconds
from paceline.tune.space import Value

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
        clock_s: time of the search.
        resources: used resources of the cluster: "2/2 CPUs".
        scheduler: the scheduler's own description.
        budget: description of the used budget.
        notes: warnings.
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
    parts: list[RenderableType] = [header, *notes, _table(search, shown)]
    if len(shown) < len(trials):
        parts.append(Text(f"... and {len(trials) - len(shown)} more", style="dim"))
    return Group(*parts)


def _most_interesting(search: Search, trials: Sequence[Trial]) -> list[Trial]:
    """Return the running trials and then the best ones, sorted by number."""
    sign = 1.0 if search.mode == "max" else -1.0

    def rank(trial: Trial) -> tuple[bool, float]:
        value = trial.best(search.metric_name, search.mode)
        return trial.state == "running", float("-inf") if value is None else sign * value

    return sorted(sorted(trials, key=rank, reverse=True)[:_MAX_SHOWN], key=lambda trial: trial.number)


def _table(search: Search, trials: Sequence[Trial]) -> Table:
    names = [dimension.name for dimension in search.parsed_space.dimensions]
    metric = escape(f"best {search.metric_name}")  # the number that the end ranks by
    seeds = ["seed"] if search.repeats > 1 else []
    table = Table("trial", "status", "loc", *names, *seeds, metric, "iter", "step", "total time")
    for column in table.columns[3:]:
        column.justify = "right"
    for trial in trials:
        parameters = trial.parameters(search)
        value = trial.best(search.metric_name, search.mode)
        table.add_row(
            f"{trial.number:05d}",
            trial.state,
            escape(trial.placed),
            *(escape(show_value(parameters[name])) if name in parameters else "" for name in names),
            *(str(search.seed + trial.number % search.repeats) for _ in seeds),
            "" if value is None else f"{value:.6g}",
            str(trial.iteration or ""),
            str(trial.step or ""),
            show_seconds(trial.seconds) if trial.results else "",
            style=_STYLES[trial.state],
        )
    return table


def show_value(value: Value) -> str:
    """Format a parameter's value."""
    return f"{value:g}" if isinstance(value, float) else str(value)
