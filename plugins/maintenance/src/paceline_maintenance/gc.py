"""``paceline gc [ROOT]``: remove the runs and packages that nothing needs any more."""

from __future__ import annotations

import json as json_module
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.filesize import decimal

from paceline.core.errors import ConfigError, PackageError, RunDirectoryError, UserError
from paceline.core.files import fsync_directory, remove_directory, rename
from paceline.core.options import parse_best
from paceline.core.output import ListTable, short_time, wide_console
from paceline.core.ownership import leftovers as find_leftovers
from paceline.core.ownership import remove_names
from paceline.runs.checkpoint_manifest import temporary_directory
from paceline.runs.checkpoint_store import remove_stale
from paceline.runs.directory import RunDirectory
from paceline.runs.package import read_manifest
from paceline.runs.package_registry import Registry
from paceline_pages.run_status import check_folder, run_directories, summarise

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


# --- What stays, and the removal of the rest ---


FRESH_S = 600.0
"""A younger package may be about to get its tag."""


@dataclass(kw_only=True)
class Artifact:
    """A run or a package.

    Attributes:
        time: Unix time of the last sign of life.
        reason: why it stays; None if it may be removed.
        name: of the run's directory; for a package, its name and the start of its digest.
        group: runs of a task or packages of a name, among which it may be the best or one of the newest.
        identity: the run's id, or the package's digest.
        sources: identities of the runs and packages from which it was made.
        score: higher is better; None if unknown.
        criterion: of the score, such as "val accuracy:max"; only equal criteria can be compared.
    """

    kind: Literal["run", "package"]
    path: Path
    time: float
    reason: str | None
    name: str = ""
    group: str = ""
    identity: str = ""
    sources: tuple[str, ...] = ()
    score: float | None = None
    criterion: str = ""

    @property
    def size_bytes(self) -> int:
        """Return the bytes of its files, without the targets of links; files that vanish count zero."""
        size = 0
        for folder, _, files in () if self.path.is_symlink() else os.walk(self.path):
            for name in files:
                with suppress(OSError):
                    size += os.lstat(os.path.join(folder, name)).st_size
        return size


def runs_in(root: Path) -> list[Artifact]:
    """Return the runs directly in a folder.

    Raises:
        RunDirectoryError: the folder cannot be read.
    """
    return [_run(directory) for directory in run_directories(root)]


def _run(directory: RunDirectory) -> Artifact:
    path, summary = directory.path, summarise(directory)
    reason = {"running": "active", "damaged": "damaged"}.get(summary.state)
    run = Artifact(kind="run", path=path, name=path.name, time=_last_activity(directory), reason=reason)
    if path.is_symlink():
        run.reason = "a link"
        return run
    try:
        manifest = directory.read_complete_manifest()
        source = dict(manifest.get("parent", {}))
        run.group = summary.task or ""
        run.identity = str(manifest["id"])
        run.sources = tuple(str(source[kind]) for kind in ("run", "package") if source.get(kind))
        metrics = dict((directory.read_result() or {}).get("metrics", {}))
    except (RunDirectoryError, OSError, TypeError, ValueError):
        run.reason = run.reason or "damaged"
        return run
    run.score, run.criterion = _score(manifest["config"].get("best_metric"), metrics)
    return run


def packages_in(registry: Registry) -> list[Artifact]:
    """Return the packages of a registry.

    Raises:
        PackageError: a tag cannot be read, so its package is unknown.
    """
    tagged = _tagged(registry)
    found = []
    for digest in registry.digests():
        with suppress(FileNotFoundError):  # removed by another gc meanwhile
            found.append(_package(registry.path_of(digest), digest, tagged.get(digest)))
    return found


def _tagged(registry: Registry) -> dict[str, str]:
    """Return the packages that tags name, and those that a roll-back would restore."""
    tagged: dict[str, str] = {}
    for reference, tag in registry.references(strict=True).items():
        for digest in tag.earlier[:1]:
            tagged.setdefault(digest, f"previous package of {reference}")
        tagged[tag.digest] = str(reference)
    return tagged


def _package(path: Path, digest: str, reason: str | None) -> Artifact:
    written = path.lstat().st_mtime
    package = Artifact(kind="package", path=path, name=digest[:12], identity=digest, time=written, reason=reason)
    if path.is_symlink():
        package.reason = "a link"
        return package
    if time.time() - written < FRESH_S:
        package.reason = reason = reason or "just created"
    try:
        manifest, _ = read_manifest(path)
    except PackageError:
        package.reason = reason or "damaged"
        return package
    origin = manifest.provenance
    evaluation = origin.data.get("evaluation")
    best = evaluation.get("best_metric") if isinstance(evaluation, dict) else None
    package.name = f"{manifest.name} {digest[:12]}"
    package.group = manifest.name
    package.sources = (origin.run,)
    package.score, package.criterion = _score(best, {str(origin.data.get("compared_split", "test")): manifest.metrics})
    return package


def _score(best: object, metrics: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return the ``--best-metric`` or the loss, negated if lower is better, and its criterion."""
    with suppress(ConfigError):
        name, mode = parse_best(str(best or "loss:min"))
        for split in ("val", "test"):  # models are selected by the validation split
            values = metrics.get(split)
            value = values.get(name) if isinstance(values, Mapping) else None
            if isinstance(value, int | float) and value == value:
                return -value if mode == "min" else value, f"{split} {name}:{mode}"
    return None, ""


def _last_activity(directory: RunDirectory) -> float:
    times = [0.0]
    for path in (directory.manifest, *directory.event_files(), directory.metrics, directory.result):
        with suppress(OSError):
            times.append(path.lstat().st_mtime)
    return max(times)


def keep(items: Iterable[Artifact], keep_last: int) -> None:
    """Give a reason to the newest and the best of each group, and to the sources of everything that stays.

    Args:
        items: runs and packages together, since one may be the source of the other.
        keep_last: number of the newest runs of each task and packages of each name, at least 1.
    """
    newest = sorted(items, key=lambda item: (-item.time, item.name))
    groups: dict[tuple[str, str], list[Artifact]] = defaultdict(list)
    best: dict[tuple[str, str, str], Artifact] = {}
    for item in newest:
        group = groups[item.kind, item.group]
        group.append(item)
        if len(group) <= keep_last:
            item.reason = item.reason or "one of the newest"
        champion = best.setdefault((item.kind, item.group, item.criterion), item)
        if item.score is not None and (champion.score is None or item.score > champion.score):
            best[item.kind, item.group, item.criterion] = item
    for item in best.values():
        if item.score is not None:
            item.reason = item.reason or f"the best by {item.criterion}"
    pending = [item for item in newest if item.reason is not None]
    while pending:
        child = pending.pop()
        for item in newest:
            if item.reason is None and item.identity in child.sources:
                item.reason = f"source of {child.name}"
                pending.append(item)


def remove(item: Artifact, registry: Registry) -> str | None:
    """Rename a run or package out of sight, and delete it; return why it stays after all, or None.

    A run that was active since it was chosen stays, and a package that a tag names by now.
    """
    try:
        remove_stale(item.path.parent)  # of removals that were killed
        with temporary_directory(item.path.parent) as doomed:
            if item.kind == "package":
                with registry.unchanging():
                    if reference := _tagged(registry).get(item.identity):
                        return f"it is now {reference}"
                    rename(item.path, doomed / item.path.name)
            else:
                directory = RunDirectory(item.path)
                if item.path.is_symlink() or directory.is_running():
                    return "it is active"
                with directory.locked():
                    if _last_activity(directory) > item.time:
                        return "it was active meanwhile"
                    rename(item.path, doomed / item.path.name)
            # Only after the lock's file is closed: NFS keeps open files, and with them the directory.
            fsync_directory(item.path.parent)
            remove_directory(doomed)
    except UserError as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)
    return None
