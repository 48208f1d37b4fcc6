"""``paceline runs``: the runs in a folder, with their state and results."""

from __future__ import annotations

import json as json_module
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from paceline.config import parse_best
from paceline.errors import ConfigError, RunDirectoryError
from paceline.run_directory import RunDirectory, read_json_lines

if TYPE_CHECKING:
    from rich.text import Text

State = Literal["running", "finished", "stopped", "failed", "crashed", "damaged"]

_DEFAULT_ROOT = Path("runs")
_TAIL_BYTES = 64 * 1024
_STYLES = {"running": "green", "finished": "cyan", "stopped": "yellow"}
_SPLITS = ("test", "val", "train")
_WIDE_COLUMNS = 110
_PIPE_COLUMNS = 250


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run, as the table's row and the JSON's object.

    Attributes:
        state: from the last event and the run's lock; ``crashed`` means that it ended without a
            word (killed, or the machine went down), ``damaged`` that ``problem`` says what is wrong.
        step: the last step that a record, a checkpoint or the result names.
        metric: the main metric's name, ``SPLIT.NAME``: the one that ``--best`` watches, else the first.
        created: Unix time.
        seconds: time that the run was at work, over all restarts.
        problem: what failed, or what is damaged.
    """

    name: str
    path: str
    state: State
    task: str | None = None
    step: int | None = None
    total_steps: int | None = None
    epoch: int | None = None
    world_size: int | None = None
    shards: int | None = None
    metric: str | None = None
    value: float | None = None
    created: float | None = None
    seconds: float | None = None
    problem: str | None = None


app = App(name="runs", help="List runs, with state and results; show what happened in one.")
app.command("paceline.cli.runs_show:show", name="show", help="Show a run's timeline and goodput.")
app.command("paceline.cli.runs_pipeline:pipeline", name="pipeline", help="Show and draw a pipeline's bubble.")


@app.default
def runs(
    root: Annotated[Path, Parameter(help="The folder that holds the runs.")] = _DEFAULT_ROOT,
    *,
    json: Annotated[bool, Parameter(negative="", help="Print a JSON array instead of a table.")] = False,
) -> int:
    """List runs: state, progress, processes and shards, result, age and time at work."""
    if not root.is_dir() and root != _DEFAULT_ROOT:
        raise RunDirectoryError(f"there is no folder {root}. Name the folder that holds the runs.")
    found = find_runs(root)
    if json:
        print(json_module.dumps([asdict(run) for run in found], indent=2))
    elif not found:
        print(f"No runs in {root}/ yet. Start one: paceline train fashion-mnist")
    else:
        _print_table(found)
    return 0


def find_runs(root: Path) -> list[RunSummary]:
    """All runs directly under ``root``, oldest first; an unreadable one is reported, not skipped."""
    if not root.is_dir():
        return []
    directories = [RunDirectory(path) for path in root.iterdir() if path.is_dir()]
    found = [summarise(d) for d in directories if _looks_like_run(d)]
    return sorted(found, key=lambda run: (run.created or 0.0, run.name))


def summarise(directory: RunDirectory) -> RunSummary:
    """Read one run's directory; whatever is wrong with it becomes its ``problem``."""
    name, path = directory.path.name, str(directory.path)
    if not directory.exists():
        return RunSummary(name=name, path=path, state="damaged", problem="has no run.toml")
    try:
        return _summarise(directory)
    except (RunDirectoryError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        # Foreign or damaged files can be wrong in every way that a reader can trip over.
        message = (
            str(error)
            if isinstance(error, RunDirectoryError | OSError)
            else f"unexpected contents: {error!r}"
        )
        return RunSummary(name=name, path=path, state="damaged", problem=message)


def _looks_like_run(directory: RunDirectory) -> bool:
    return directory.exists() or directory.events.exists() or directory.checkpoints.is_dir()


def _summarise(directory: RunDirectory) -> RunSummary:
    config = directory.read_manifest().get("config", {})
    events = directory.read_events()
    records = _last_records(directory.metrics)
    result = json_module.loads(directory.result.read_text()) if directory.result.is_file() else {}
    started: dict[str, Any] = next((e for e in reversed(events) if e["event"] == "started"), {})
    steps = [r["step"] for r in (*events, *records) if r.get("step") is not None]
    state = _state(directory, events)
    metric, value = _main_metric(config, result, records)
    return RunSummary(
        name=directory.path.name,
        path=str(directory.path),
        state=state,
        task=result.get("task") or config.get("task"),
        step=result["steps"] if state == "finished" and "steps" in result else max(steps, default=None),
        total_steps=started.get("total_steps"),
        epoch=records[-1]["epoch"] + 1 if records else None,
        world_size=started.get("world_size"),
        shards=started.get("shards"),
        metric=metric,
        value=value,
        created=events[0]["time"] if events else directory.manifest.stat().st_mtime,
        seconds=_seconds_at_work(directory, events, state),
        problem=_failure(events[-1]) if state == "failed" else None,
    )


def _state(directory: RunDirectory, events: list[dict[str, Any]]) -> State:
    if directory.is_running():
        return "running"
    last = events[-1]["event"] if events else None
    return last if last in ("finished", "stopped", "failed") else "crashed"


def _failure(event: dict[str, Any]) -> str:
    lines = str(event.get("error", "")).strip().splitlines() or ["unknown error"]
    rank = event.get("rank")
    return lines[0] if rank is None else f"rank {rank}: {lines[0]}"


def _seconds_at_work(directory: RunDirectory, events: list[dict[str, Any]], state: State) -> float:
    """The sum over all starts of the time from the start to the last sign of life."""
    total, last = 0.0, 0.0
    begin: float | None = None
    for event in events:
        if event["event"] == "started":
            total += last - begin if begin is not None else 0.0
            begin = float(event["time"])
        last = float(event["time"])
    if begin is None:
        return 0.0
    if state == "running":
        last = time.time()
    elif state == "crashed" and directory.metrics.exists():
        last = max(last, directory.metrics.stat().st_mtime)
    return round(total + last - begin, 3)


def _main_metric(
    config: dict[str, Any], result: dict[str, Any], records: list[dict[str, Any]]
) -> tuple[str | None, float | None]:
    by_split = {r["split"]: r["metrics"] for r in records if r["kind"] == "eval"} | result.get("metrics", {})
    try:
        best = parse_best(config["best"])[0] if config.get("best") else None
    except ConfigError:
        best = None
    for split in (*(s for s in _SPLITS if s in by_split), *by_split):
        metrics = by_split[split]
        if metrics:
            name = best if best in metrics else next(iter(metrics))
            return f"{split}.{name}", metrics[name]
    return None, None


def _last_records(path: Path) -> list[dict[str, Any]]:
    """The records at the end of ``metrics.jsonl``, which may be large."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size <= _TAIL_BYTES:
                return read_json_lines(path)
            file.seek(size - _TAIL_BYTES)
            lines = file.read().decode(errors="replace").splitlines()[1:]
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        try:
            records.append(json_module.loads(line))
        except ValueError:
            continue
    return records


def _print_table(found: list[RunSummary]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        # A pipe has no width: nothing is cut for programs and files.
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
    for run in found:
        # Names are Text, in which nothing is markup.
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
    """Processes and shards."""
    if run.world_size is None:
        return ""
    return f"{run.world_size} x {'?' if run.shards is None else run.shards}"


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
    """A time for a narrow column: 42s, 7min, 3.5h, 12d."""
    if seconds < 100:
        return f"{seconds:.0f}s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f}min"
    return f"{seconds / 3600:.1f}h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f}d"
