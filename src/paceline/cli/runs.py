"""``paceline runs``: list the runs of a folder with their state and results."""

from __future__ import annotations

import json as json_module
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from paceline.runs.status import RunSummary, check_folder, find_runs

if TYPE_CHECKING:
    from rich.text import Text

_DEFAULT_ROOT = Path("runs")
_STYLES = {"running": "green", "finished": "cyan", "stopped": "yellow"}
_WIDE_COLUMNS = 110
_PIPE_COLUMNS = 250


app = App(name="runs", help="List runs with state and results; show one run's history.")
app.command("paceline.cli.runs_show:show", name="show", help="Show a run's timeline and goodput.")
app.command("paceline.cli.runs_pipeline:pipeline", name="pipeline", help="Show and draw a pipeline's bubble.")


@app.default
def runs(
    root: Annotated[Path, Parameter(help="Folder of the runs.")] = _DEFAULT_ROOT,
    *,
    json: Annotated[bool, Parameter(negative="", help="Print a JSON array instead of a table.")] = False,
) -> int:
    """List runs: state, progress, processes and micro-batches, result, age and running time."""
    if root != _DEFAULT_ROOT:
        check_folder(root)
    summaries = find_runs(root)
    if json:
        print(json_module.dumps([asdict(run) for run in summaries], indent=2))
    elif not summaries:
        print(f"No runs in {root}/ yet. Start one: paceline train fashion-mnist")
    else:
        _print_table(summaries)
    return 0


def _print_table(summaries: list[RunSummary]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from paceline.core.rich_console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        # A pipe has no width: do not truncate output for programs and files.
        console = Console(highlight=False, width=_PIPE_COLUMNS)
    is_wide = console.width >= _WIDE_COLUMNS
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("run", no_wrap=True, overflow="fold")
    table.add_column("state", no_wrap=True)
    if is_wide:
        table.add_column("task", overflow="fold")
        table.add_column("W x S", justify="right", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("result")
    table.add_column("age", justify="right", no_wrap=True)
    if is_wide:
        table.add_column("time", justify="right", no_wrap=True)
    now = time.time()
    for run in summaries:
        # Names are Text so that markup in them is not interpreted.
        cells = [Text(run.name), Text(run.state, style=_STYLES.get(run.state, "red"))]
        if is_wide:
            cells += [Text(run.task or ""), Text(_processes(run))]
        cells += [Text(_step(run)), _result(run)]
        cells += [Text("" if run.created is None else short_time(now - run.created))]
        if is_wide:
            cells += [Text("" if run.seconds is None else short_time(run.seconds))]
        table.add_row(*cells)
    console.print(table)


def _processes(run: RunSummary) -> str:
    if run.world_size is None:
        return ""
    return f"{run.world_size} x {'?' if run.microbatches is None else run.microbatches}"


def _step(run: RunSummary) -> str:
    if run.step is None:
        return ""
    return f"{run.step}/{run.total_steps}" if run.total_steps is not None else f"{run.step}"


def _result(run: RunSummary) -> Text:
    from rich.text import Text

    if run.problem is not None:
        return Text(run.problem, style="red", no_wrap=True, overflow="ellipsis")
    if run.metric is None or run.value is None:
        return Text()
    return Text(f"{run.metric} {run.value:.4g}")


def short_time(seconds: float) -> str:
    """Format a duration for a narrow column: 42s, 7min, 3.5h, 12d."""
    if seconds < 100:
        return f"{seconds:.0f}s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f}min"
    return f"{seconds / 3600:.1f}h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f}d"
