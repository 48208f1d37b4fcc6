"""``paceline runs``: list the runs of a folder, compare some of them, or show the history of one."""

from __future__ import annotations

import json as json_module
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from paceline.core.built_in import PARTS
from paceline.core.errors import ConfigError, RunDirectoryError
from paceline.core.plugins import import_object
from paceline.runs.directory import RunDirectory
from paceline.runs.timeline import REPEATED, Goodput, Timeline, timeline
from paceline_pages.run_status import RunSummary, check_folder, find_runs, is_search, search_directories

if TYPE_CHECKING:
    from rich.text import Text

    from paceline_pages.comparison import ComparedRun


_DEFAULT_ROOT = Path("runs")
_STYLES = {"running": "green", "finished": "cyan", "stopped": "yellow"}
_WIDE_COLUMNS = 110
_MOST_COLUMNS = 4


app = App(name="runs", help="List runs with state and results; show one run's history.")
app.command("paceline_pages.runs_command:show", name="show", help="Show a run's timeline and goodput.")
app.command("paceline_pages.runs_pipeline:pipeline", name="pipeline", help="Show and draw a pipeline's bubble.")


@app.default
def runs(
    root: Annotated[Path, Parameter(help="Folder of the runs.")] = _DEFAULT_ROOT,
    *,
    compare: Annotated[
        tuple[Path, ...],
        Parameter(consume_multiple=True, negative="", show_default=False, help="Compare these runs and searches."),
    ] = (),
    in_: Annotated[
        Literal["tensorboard", "mlflow"] | None,
        Parameter(name="--in", help="Show the compared runs on the pages of this tool, on loopback, until Ctrl-C."),
    ] = None,
    json: Annotated[bool, Parameter(negative="", help="Print JSON instead of a table.")] = False,
) -> int:
    """List runs: state, progress, processes and micro-batches, result, age and running time; and searches.

    Of a search's directory it lists the trials.

    With --compare, show what differs in the configuration of some runs, and their metrics, side by side.
    """
    if in_ is not None and not compare:
        raise ConfigError(f"--in {in_} shows runs that are compared. Name them: --compare RUN RUN --in {in_}")
    if compare:
        from paceline_pages.comparison import read_runs

        compared = read_runs(compare)
        if in_ is None:
            return _print_comparison(compared, json=json)
        show_runs: Callable[..., int] = import_object(PARTS["runs --in"])
        return show_runs(compared, in_, json=json)
    if root != _DEFAULT_ROOT:
        check_folder(root)
    unreadable: list[OSError] = []
    summaries = find_runs(root / "trials" if is_search(root) else root, unreadable)
    if unreadable:
        print(f"paceline: {len(unreadable)} of the folders cannot be read, first {unreadable[0]}", file=sys.stderr)
    if json:
        print(json_module.dumps([asdict(run) for run in summaries], indent=2))
        return 0
    if summaries:
        _print_table(summaries)
    if searches := search_directories(root):
        _print_searches(searches)
    elif not summaries:
        print(f"No runs in {root}/ yet. Start one: paceline train fashion-mnist")
    return 0


def _print_table(summaries: list[RunSummary]) -> None:
    from rich.text import Text

    from paceline.core.output import ListTable, short_time, wide_console

    console = wide_console()
    is_wide = console.width >= _WIDE_COLUMNS
    wide = ("task", ">W x S"), (">time",)
    before, after = wide if is_wide else ((), ())
    table = ListTable("run", "state", *before, ">step", "result", ">age", *after, folds=("task", "result"))
    now = time.time()
    for run in summaries:
        cells: list[str | Text] = [run.name, Text(run.state, style=_STYLES.get(run.state, "red"))]
        if is_wide:
            microbatches = "?" if run.microbatches is None else run.microbatches
            cells += [run.task or "", "" if run.world_size is None else f"{run.world_size} x {microbatches}"]
        total = "" if run.total_steps is None else f"/{run.total_steps}"
        cells += ["" if run.step is None else f"{run.step}{total}", _result(run)]
        cells.append("" if run.created is None else short_time(now - run.created))
        if is_wide:
            cells.append("" if run.seconds is None else short_time(run.seconds))
        table.add(*cells)
    console.print(table)


def _print_searches(searches: list[Path]) -> None:
    from rich.text import Text

    from paceline.core.output import ListTable, wide_console
    from paceline_pages.run_index import IndexedSearch

    console = wide_console()
    table = ListTable("search", "state", "task", ">trials", "best", folds=("task", "best"))
    for path in sorted(searches, key=lambda path: path.name):
        search = IndexedSearch(path)
        if not search.update():
            continue
        row = search.row
        best = "" if row["value"] is None else f"{row['metric']} {row['value']:.4g}"
        trials = "" if row["planned"] is None else str(row["planned"])
        state = Text(row["state"], style=_STYLES.get(row["state"], "red"))
        table.add(row["name"], state, row["task"], trials, best)
    console.print(table)
    text = f"A search's trials: paceline runs --compare {searches[0]}"
    console.print(text, style="dim", markup=False, soft_wrap=True)


def _result(run: RunSummary) -> Text:
    from rich.text import Text

    if run.problem is not None:
        return Text(run.problem, style="red", no_wrap=True, overflow="ellipsis")
    if run.metric is None or run.value is None:
        return Text()
    return Text(f"{run.metric} {run.value:.4g}")


# --- Comparison: the settings that differ, and the metrics ---


def _print_comparison(runs: list[ComparedRun], *, json: bool) -> int:
    from paceline.core.output import short_time
    from paceline_pages.comparison import differing_settings

    differing = differing_settings([run.settings for run in runs])
    # A run of an earlier version has no record, and would differ in each line.
    code = differing_settings([run.code for run in runs]) if all(run.code for run in runs) else {}
    if json:
        document = {"runs": [run.as_json() for run in runs], "differing_settings": differing, "differing_code": code}
        print(json_module.dumps(document))
        return 0
    names = dict.fromkeys((split, name) for run in runs for split, values in run.metrics.items() for name in values)
    settings = differing | code
    rows: dict[str, list[str]] = {name: [_value(value) for value in values] for name, values in settings.items()}
    rows["state"] = [run.summary.state for run in runs]
    rows["steps"] = [_value(run.summary.step) for run in runs]
    rows["time"] = ["" if run.summary.seconds is None else short_time(run.summary.seconds) for run in runs]
    for split, name in names:
        rows[f"{split}.{name}"] = [_value(run.metrics.get(split, {}).get(name)) for run in runs]
    _print_rows([run.name for run in runs], rows, len(settings))
    if not differing:
        print("Their configurations are equal.")
    return 0


def _print_rows(names: list[str], rows: dict[str, list[str]], num_settings: int) -> None:
    """Print a column for each of a few runs, or a line for each of many, in as many tables as fit side by side."""
    from paceline.core.output import ListTable, wide_console

    console = wide_console()
    if len(names) <= _MOST_COLUMNS:
        table = ListTable("", *(f">{name}" for name in names), folds=names)
        for index, (name, values) in enumerate(rows.items()):
            table.add(name, *values, end_section=index == num_settings - 1)
        console.print(table)
        return
    for group in _groups_that_fit(names, rows, console.width):
        table = ListTable("run", *(f">{name}" for name in group), folds=group)
        for name, cells in zip(names, zip(*group.values(), strict=True), strict=True):
            table.add(name, *cells)
        console.print(table)


def _groups_that_fit(
    names: Sequence[str], columns: Mapping[str, Sequence[str]], width: int
) -> list[dict[str, Sequence[str]]]:
    """Divide columns into groups that fit next to the names of the runs; one that is too wide is alone."""
    from rich.cells import cell_len

    gap = 2
    first = gap + max(map(cell_len, names))
    groups: list[dict[str, Sequence[str]]] = [{}]
    used = first
    for name, cells in columns.items():
        size = gap + max(map(cell_len, (name, *cells)))
        if groups[-1] and used + size > width:
            groups.append({})
            used = first
        groups[-1][name] = cells
        used += size
    return groups


def _value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


# --- The timeline of a run, and the time that faults cost ---


_MAX_MODULES = 10
_EVENT_STYLES = {"fault": "red", "failed": "red", "fallback": "yellow", "stopped": "yellow", "finished": "green"}


def show(run: Path, *, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Show a run's timeline and goodput: the share of its time spent in steps that count.

    The timeline contains every fault, group of workers, join, leave, save, stop and restart. The run may be
    finished, crashed or still active.

    Args:
        run: The run's directory.
        json: Print one JSON object instead.
    """
    directory = RunDirectory(run)
    if not directory.events.exists():
        directory.read_manifest()  # raises an error that names the missing file, if this is not a run
        raise RunDirectoryError(f"{directory.events} is missing, so the run has no timeline.")
    try:
        history = timeline(directory.read_events(), until=_alive_at(directory), repeated_steps=_repeated(directory))
    except (KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(f"{directory.events} is damaged: {error!r}.") from error
    drift = (directory.read_result() or {}).get("drift")
    if json:
        goodput = history.goodput
        numbers = {"share": goodput.share, "good_s": round(goodput.good_s, 3), **asdict(goodput)}
        document = {**asdict(history), "goodput": numbers, **({} if drift is None else {"drift": drift})}
        print(json_module.dumps(document))
    else:
        _print_history(directory, history)
        if drift is not None:
            _print_drift(directory, drift)
    return 0


def _alive_at(directory: RunDirectory) -> float | None:
    """Return the time of the run's last sign of life that is not an event."""
    if directory.is_running():
        return time.time()
    return directory.metrics.stat().st_mtime if directory.metrics.exists() else None


def _repeated(directory: RunDirectory) -> int:
    from paceline.data.ledger import read_ledger

    try:
        return sum(not is_final for _, is_final in read_ledger(directory.ledger).entries())
    except RunDirectoryError:
        return 0  # no ledger yet; `paceline audit` reports what is wrong with a damaged one


def _print_history(directory: RunDirectory, history: Timeline) -> None:
    from rich.text import Text

    from paceline.core.output import ListTable, wide_console

    console = wide_console()
    table = ListTable(">time", ">step", "event", folds=("event",))
    for entry in history.entries:
        step = "" if entry.step is None else f"{entry.step:,}"
        table.add(_clock(entry.seconds), step, Text(entry.text, style=_EVENT_STYLES.get(entry.event, "")))
    console.print(table)
    console.print(_verdict(history.goodput), soft_wrap=True)
    for cause, seconds in sorted(history.goodput.lost_s.items(), key=lambda item: -item[1]):
        number = history.goodput.repeated_steps if cause == REPEATED else history.goodput.interruptions[cause]
        console.print(f"  {seconds:8.2f} s  {cause} ({number:,})", style="dim")


def _print_drift(directory: RunDirectory, drift: Mapping[str, Any]) -> None:
    from rich.markup import escape

    from paceline.core.output import Console

    console = Console(highlight=False)
    parent = directory.read_manifest().get("parent", {})
    run = f" (run {parent['run']}, step {parent.get('step')})" if "run" in parent else ""
    console.print(escape(f"Initialised from {parent.get('source')}{run}."), soft_wrap=True)
    if "problem" in drift:
        console.print(escape(f"The distance from the parent is unknown: {drift['problem']}"), soft_wrap=True)
        return
    sizes = [(module, size) for module, size in drift["modules"].items() if size]
    moved = sorted(sizes, key=lambda item: -item[1])
    num_unmoved = len(drift["modules"]) - len(moved)
    facts = [f"Its weights moved by {_percent(drift['relative_l2'])} of their 2-norm"]
    if drift["agreement"] is not None:
        facts.append(f"both predict the same for {drift['agreement']:.1%} of {drift['samples']:,} test samples")
    if drift["new"]:
        facts.append(f"newly initialised: {', '.join(drift['new'])}")
    console.print(escape("; ".join(facts)) + ".", soft_wrap=True)
    for module, size in moved[:_MAX_MODULES]:
        console.print(escape(f"  {_percent(size):>8}  {module or '(the model itself)'}"), style="dim")
    rest = [f"{len(moved) - _MAX_MODULES} more moved less"] if len(moved) > _MAX_MODULES else []
    rest += [f"{num_unmoved} did not move"] if num_unmoved else []
    if rest:
        console.print(f"            {', '.join(rest)}", style="dim")


def _percent(share: float | None) -> str:
    return "any amount" if share is None else f"{share:.2%}"


def _verdict(goodput: Goodput) -> str:
    if goodput.share is None:
        return "No step has been trained yet."
    lost = goodput.active_s - goodput.good_s
    return (
        f"Goodput {goodput.share:.1%}: of {goodput.active_s:,.1f} active seconds, {goodput.good_s:,.1f} s went "
        f"into steps that count{f', {lost:,.1f} s were lost:' if goodput.lost_s else '.'}"
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02d}:{rest:06.3f}" if hours else f"{minutes}:{rest:06.3f}"
