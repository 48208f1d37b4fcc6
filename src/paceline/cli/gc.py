"""``paceline gc [ROOT]``: remove what a policy does not keep."""

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
    """Show which runs in ROOT, their checkpoints, and packages may go; remove them with --yes.

    What is never removed: a running run; the newest checkpoint of a run that verifies, and its best; a
    package with a tag, and the one that a roll-back would bring back; what a run or package that stays
    came from; what is damaged, and links. The exit code is 0 if all that was to go is gone.

    Parameters
    ----------
    root
        The folder that holds the runs.
    keep_last
        Keep the newest N of each task's runs, each run's checkpoints and each name's packages.
    older_than
        Keep what is younger, such as 30d or 12h.
    keep_best
        Keep the best of each task's runs and each name's packages, by their --best-metric metrics, or the loss.
    only
        What to look at: runs, checkpoints, packages. Default: all three.
    yes
        Remove them. Without it, nothing is removed.
    json
        Print one JSON object.
    """
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
        # All of both, whatever is asked for: one may have come from the other.
        items = [*runs_in(root.resolve()), *packages_in(registry)]
        at_rest = {item.path for item in items if item.kept_because is None}
        verdicts = decide([_asked(item, only) for item in items], policy)
        goes = [v.item for v in verdicts if v.reason is None]
        damaged: list[str] = []
        if "checkpoints" in only:
            stays = [v.item for v in verdicts if v.reason is not None]
            runs = [item for item in stays if item.kind == "run" and item.path in at_rest]
            found, damaged = _checkpoints(runs, stays, policy, progress)
            goes += found
        left: dict[str, str] = {}
        if yes:
            remove(goes, root.resolve(), registry, _removed(goes, left, progress))
    # What could not go, or was taken up meanwhile, is told apart.
    gone = [item for item in goes if str(item.path) not in left]
    if json:
        print(json_module.dumps(_as_json(goes, verdicts, left, damaged, only, yes=yes)))
    else:
        _print(goes, verdicts, left, only)
        for name in damaged:
            print(f"{name} is damaged and stays; see: paceline checkpoint verify")
        print(_closing(gone, left, yes=yes))
    return 1 if left else 0


def _asked(item: Artifact, only: tuple[str, ...]) -> Artifact:
    if f"{item.kind}s" in only or item.kept_because is not None:
        return item
    return dataclasses.replace(item, kept_because="not asked about")


def _checkpoints(
    runs: list[Artifact], stays: list[Artifact], policy: Policy, progress: Progress | None
) -> tuple[list[Artifact], list[str]]:
    """Of the runs that stay and are not at work; every byte is verified first."""
    from rich.markup import escape

    from paceline.insight.gc import checkpoints_to_remove

    found: list[Artifact] = []
    damaged: list[str] = []
    for run in runs:
        bar = None if progress is None else progress.add_task(escape(f"verifying {run.name}"), total=None)

        def on_read(done: int, total: int, bar: Any = bar) -> None:
            if progress is not None:
                progress.update(bar, completed=done, total=total)

        more, bad = checkpoints_to_remove(run, policy, stays, on_read)
        found += more
        damaged += [f"{run.name}/{name}" for name in bad]
        if progress is not None:
            progress.remove_task(bar)  # type: ignore[arg-type]
    return found, damaged


def _removed(
    goes: list[Artifact], left: dict[str, str], progress: Progress | None
) -> Callable[[Artifact, str | None], None]:
    bar = None if progress is None else progress.add_task("removing", total=len(goes))

    def on_item(item: Artifact, why: str | None) -> None:
        if why is not None:
            left[str(item.path)] = why
        if progress is not None and bar is not None:
            progress.advance(bar)

    return on_item


def _closing(gone: list[Artifact], left: dict[str, str], *, yes: bool) -> str:
    from rich.filesize import decimal

    size = decimal(sum(item.size_bytes for item in gone))
    if not gone and not left:
        return "Nothing may go."
    if not yes:
        return f"{len(gone)} may go, {size}. Nothing was removed; say --yes to remove them."
    return f"{len(gone)} removed, {size}." + (f" {len(left)} stayed." if left else "")


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress | None]:
    """Bars on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield progress


def _shown(verdicts: list[Decision], only: tuple[str, ...]) -> list[Decision]:
    """Of what stays, what was asked about."""
    return [v for v in verdicts if v.reason is not None and f"{v.item.kind}s" in only]


def _print(goes: list[Artifact], verdicts: list[Decision], left: dict[str, str], only: tuple[str, ...]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    from paceline.cli.runs import short_time

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
    rows = [(item, left.get(str(item.path), "goes"), "red") for item in goes]
    rows += [(v.item, f"stays: {v.reason}", "") for v in _shown(verdicts, only)]
    for item, what, style in rows:
        # Names are Text, in which nothing is markup.
        cells = (item.kind, item.name, decimal(item.size_bytes), short_time(max(0.0, now - item.time)), what)
        table.add_row(*map(Text, cells), style=style or None)
    if rows:
        console.print(table)


def _as_json(
    goes: list[Artifact],
    verdicts: list[Decision],
    left: dict[str, str],
    damaged: list[str],
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
        "goes": [record(item) for item in goes if str(item.path) not in left],
        "left": [{**record(item), "problem": left[str(item.path)]} for item in goes if str(item.path) in left],
        "stays": [{**record(v.item), "reason": v.reason} for v in _shown(verdicts, only)],
        "damaged_checkpoints": damaged,
    }
