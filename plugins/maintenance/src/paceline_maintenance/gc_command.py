"""``paceline gc [ROOT]``: remove the runs and packages that nothing needs any more."""

from __future__ import annotations

import json as json_module
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from paceline_maintenance.gc import Artifact

Flag = Annotated[bool, Parameter(negative="")]
_DEFAULT_ROOT = Path("runs")


def gc(root: Path = _DEFAULT_ROOT, *, keep_last: int = 3, yes: Flag = False, json: Flag = False) -> int:
    """Show which runs and packages nothing needs any more; remove them with --yes.

    These stay: the newest of each task and name, and the best by the metric of --best-metric, or the loss; active
    runs; packages with a tag, and those that a roll-back would restore; sources of everything that stays; links;
    damaged runs and packages. Files that killed processes left in /dev/shm and in the temporary directory are
    removed, too. The exit code is 0 if everything that is listed was removed.

    Args:
        root: The folder that holds the runs.
        keep_last: Keep the newest N runs of each task and packages of each name.
        yes: Remove the items. Without it, nothing is removed.
        json: Print one JSON object.
    """
    from paceline.core.ownership import leftovers as find_leftovers
    from paceline.core.ownership import remove_names
    from paceline.runs.package_registry import Registry
    from paceline_maintenance.gc import keep, packages_in, remove, runs_in
    from paceline_pages.run_status import check_folder

    if keep_last < 1:
        raise ConfigError(f"--keep-last must be at least 1, but is {keep_last}.")
    if root != _DEFAULT_ROOT:
        check_folder(root)
    registry = Registry.of_user()
    items = [*runs_in(root.resolve()), *packages_in(registry)]
    keep(items, keep_last)
    items.sort(key=lambda item: (item.reason is not None, item.kind, -item.time))
    leftovers = find_leftovers(everywhere=True)
    rows = [(item, item.size_bytes) for item in items]
    problems: dict[Path, str] = {}
    if yes:
        remove_names(leftovers)
        for item in items:
            if item.reason is None and (problem := remove(item, registry)):
                problems[item.path] = problem
    if json:
        print(json_module.dumps(_as_json(rows, problems, leftovers, yes=yes)))
    else:
        _print(rows, problems, leftovers, yes=yes)
    return 1 if problems else 0


def _print(rows: list[tuple[Artifact, int]], problems: dict[Path, str], leftovers: list[Path], *, yes: bool) -> None:
    from rich.filesize import decimal

    from paceline.core.output import ListTable, short_time, wide_console

    table = ListTable("", "name", ">size", ">age", "", folds=("name", ""))
    for item, size in rows:
        what = f"keep: {item.reason}" if item.reason else problems.get(item.path, "removed" if yes else "remove")
        age, style = short_time(time.time() - item.time), None if item.reason else "red"
        table.add(item.kind, item.name, decimal(size), age, what, style=style)
    if rows:
        wide_console().print(table)
    sizes = [size for item, size in rows if item.reason is None and item.path not in problems]
    what = "removed" if yes else "to remove; give --yes to remove them"
    print(
        f"{len(sizes)} runs and packages, {decimal(sum(sizes))}, and {len(leftovers)} files of killed processes {what}."
    )
    if problems:
        print(f"{len(problems)} could not be removed.")


def _as_json(
    rows: list[tuple[Artifact, int]], problems: dict[Path, str], leftovers: list[Path], *, yes: bool
) -> dict[str, Any]:
    records = [
        {
            "kind": item.kind,
            "name": item.name,
            "path": str(item.path),
            "bytes": size,
            "time": item.time,
            "reason": item.reason,
            "problem": problems.get(item.path),
        }
        for item, size in rows
    ]
    return {
        "removed": yes,
        "goes": [record for record in records if not record["reason"] and not record["problem"]],
        "left": [record for record in records if record["problem"]],
        "stays": [record for record in records if record["reason"]],
        "leftovers": [str(path) for path in leftovers],
    }
