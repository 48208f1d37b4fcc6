"""``paceline gc [ROOT]``: remove what a retention policy does not keep."""

from __future__ import annotations

import dataclasses
import json as json_module
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from paceline.core.options import parse_duration_s

if TYPE_CHECKING:
    from rich.progress import Progress

    from paceline.insight.gc import Artifact, Decision, Policy

Flag = Annotated[bool, Parameter(negative="")]
_DEFAULT_ROOT = Path("runs")
_WHAT: tuple[Literal["runs", "checkpoints", "packages"], ...] = ("runs", "checkpoints", "packages")
_PIPE_COLUMNS = 250


def gc(
    root: Path = _DEFAULT_ROOT,
    *,
    keep_last: int | None = None,
    older_than: str | None = None,
    keep_best: Flag = False,
    only: Annotated[
        tuple[Literal["runs", "checkpoints", "packages"], ...],
        Parameter(consume_multiple=True, negative="", show_default=False),
    ] = _WHAT,
    yes: Flag = False,
    json: Flag = False,
) -> int:
    """Show which runs, checkpoints and packages a policy would remove; remove them with --yes.

    Never removed: active runs; the newest checkpoint of a run that verifies, and its best; packages with a tag,
    and those that a roll-back would restore; sources of runs and packages that are kept; damaged checkpoints;
    links. Files that killed processes left in /dev/shm and in the temporary directory are removed, too, unless
    --only is given. The exit code is 0 if everything selected was removed.

    Parameters
    ----------
    root
        The folder that holds the runs.
    keep_last
        Keep the newest N runs of each task, checkpoints of each run and packages of each name.
    older_than
        Keep items younger than this, such as 30d or 12h.
    keep_best
        Keep each task's best run and each name's best package, by --best-metric of the run, or the loss.
    only
        What to remove: runs, checkpoints, packages. Default: all three.
    yes
        Remove the items. Without it, nothing is removed.
    json
        Print one JSON object.
    """
    from paceline.core import owned_names
    from paceline.insight.gc import Policy, decide, packages_in, remove, runs_in
    from paceline.runs.package_registry import Registry
    from paceline.runs.status import check_folder

    policy = Policy(
        keep_last=keep_last,
        older_than_s=None if older_than is None else parse_duration_s(older_than, "older_than"),
        keep_best=keep_best,
    )
    if root != _DEFAULT_ROOT:
        check_folder(root)
    registry = Registry.of_user()
    with _progress(json) as progress:
        # Always read both runs and packages: one may be the source of another.
        items = [*runs_in(root.resolve()), *packages_in(registry)]
        inactive = {item.path for item in items if item.kept_because is None}
        verdicts = decide([_exclude_unselected(item, only) for item in items], policy)
        removals = [v.item for v in verdicts if v.reason is None]
        damaged: list[str] = []
        if "checkpoints" in only:
            kept = [v.item for v in verdicts if v.reason is not None]
            runs = [item for item in kept if item.kind == "run" and item.path in inactive]
            checkpoints, damaged = _checkpoints(runs, kept, policy, progress)
            removals += checkpoints
        failures: dict[str, str] = {}
        leftovers = owned_names.leftovers(everywhere=True) if only == _WHAT else []
        if yes:
            owned_names.remove_names(leftovers)
            remove(removals, root.resolve(), registry, _on_removed(removals, failures, progress))
    # Items that could not be removed, or came into use meanwhile, are listed separately.
    removed = [item for item in removals if str(item.path) not in failures]
    if json:
        print(json_module.dumps(_as_json(removals, verdicts, failures, damaged, leftovers, only, yes=yes)))
    else:
        _print(removals, verdicts, failures, only)
        for name in damaged:
            print(f"{name} is damaged and is kept; see: paceline checkpoint verify")
        if leftovers:
            what = "were removed" if yes else "can be removed; give --yes"
            print(f"{len(leftovers)} files that killed processes left in /dev/shm and temporary directories {what}.")
        if removals or not leftovers:
            print(_summarize(removed, failures, yes=yes))
    return 1 if failures else 0


def _exclude_unselected(item: Artifact, only: tuple[str, ...]) -> Artifact:
    if f"{item.kind}s" in only or item.kept_because is not None:
        return item
    return dataclasses.replace(item, kept_because="not selected by --only")


def _checkpoints(
    runs: list[Artifact], kept: list[Artifact], policy: Policy, progress: Progress | None
) -> tuple[list[Artifact], list[str]]:
    """Return the removable and the damaged checkpoints of the inactive runs that are kept."""
    from rich.markup import escape

    from paceline.insight.gc import checkpoints_to_remove

    found: list[Artifact] = []
    damaged: list[str] = []
    for run in runs:
        bar = None if progress is None else progress.add_task(escape(f"verifying {run.name}"), total=None)

        def on_read(done: int, total: int, bar: Any = bar) -> None:
            if progress is not None:
                progress.update(bar, completed=done, total=total)

        removable, broken = checkpoints_to_remove(run, policy, kept, on_read)
        found += removable
        damaged += [f"{run.name}/{name}" for name in broken]
        if progress is not None:
            progress.remove_task(bar)  # type: ignore[arg-type]
    return found, damaged


def _on_removed(
    removals: list[Artifact], failures: dict[str, str], progress: Progress | None
) -> Callable[[Artifact, str | None], None]:
    bar = None if progress is None else progress.add_task("removing", total=len(removals))

    def on_item(item: Artifact, why: str | None) -> None:
        if why is not None:
            failures[str(item.path)] = why
        if progress is not None and bar is not None:
            progress.advance(bar)

    return on_item


def _summarize(removed: list[Artifact], failures: dict[str, str], *, yes: bool) -> str:
    from rich.filesize import decimal

    size = decimal(sum(item.size_bytes for item in removed))
    if not removed and not failures:
        return "There is nothing to remove."
    if not yes:
        return f"{len(removed)} to remove, {size}. Nothing was removed; give --yes to remove them."
    return f"{len(removed)} removed, {size}." + (f" {len(failures)} could not be removed." if failures else "")


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress | None]:
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    from paceline.core.rich_console import Console

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield progress


def _selected(verdicts: list[Decision], only: tuple[str, ...]) -> list[Decision]:
    """Return the decisions to keep an item of a selected kind."""
    return [v for v in verdicts if v.reason is not None and f"{v.item.kind}s" in only]


def _print(removals: list[Artifact], verdicts: list[Decision], failures: dict[str, str], only: tuple[str, ...]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    from paceline.cli.runs import short_time
    from paceline.core.rich_console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_COLUMNS)
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("")
    table.add_column("name", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)
    table.add_column("")
    now = time.time()
    rows = [(item, failures.get(str(item.path), "remove"), "red") for item in removals]
    rows += [(v.item, f"keep: {v.reason}", "") for v in _selected(verdicts, only)]
    for item, what, style in rows:
        # Names are Text so that markup in them is not interpreted.
        cells = (item.kind, item.name, decimal(item.size_bytes), short_time(max(0.0, now - item.time)), what)
        table.add_row(*map(Text, cells), style=style or None)
    if rows:
        console.print(table)


def _as_json(
    removals: list[Artifact],
    verdicts: list[Decision],
    failures: dict[str, str],
    damaged: list[str],
    leftovers: list[Path],
    only: tuple[str, ...],
    *,
    yes: bool,
) -> dict[str, Any]:
    def record(item: Artifact) -> dict[str, Any]:
        return {
            "kind": item.kind,
            "name": item.name,
            "path": str(item.path),
            "bytes": item.size_bytes,
            "time": item.time,
        }

    return {
        "removed": yes,
        "goes": [record(item) for item in removals if str(item.path) not in failures],
        "left": [
            {**record(item), "problem": failures[str(item.path)]} for item in removals if str(item.path) in failures
        ],
        "stays": [{**record(v.item), "reason": v.reason} for v in _selected(verdicts, only)],
        "damaged_checkpoints": damaged,
        "leftovers": [str(path) for path in leftovers],
    }
