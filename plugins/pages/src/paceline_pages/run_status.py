"""Summaries of runs and of their checkpoints, from the files of their directories. No torch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.core.errors import CheckpointError, ConfigError, RunDirectoryError
from paceline.core.files import open_regular, parse_json, parse_json_records, read_document
from paceline.core.options import parse_best
from paceline.runs.checkpoint_manifest import MANIFEST, read_manifest
from paceline.runs.checkpoint_store import checkpoint_name, parse_name, scan
from paceline.runs.directory import RunDirectory

State = Literal["running", "finished", "stopped", "failed", "crashed", "damaged"]

_TAIL_BYTES = 64 * 1024
_SPLITS = ("test", "val", "train")
_SPLITS_OF_TRIAL = ("val", "test", "train")  # a search ranks by the validation split, and few trials have the other

FOREIGN = (RunDirectoryError, OSError, ValueError, TypeError, KeyError, AttributeError)
"""Errors of reading a run, whose files may be damaged in any way."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The summary of one run.

    Attributes:
        state: from the last event that begins or ends a run, and the run's lock; ``crashed``: none ended it (killed, or
            the node went down); ``damaged``: see ``problem``.
        step: the last step in a record, a checkpoint or the result.
        metric: the main metric's name, ``SPLIT.NAME``: the one of ``--best-metric``, else the first.
        created: Unix time.
        seconds: active time over all restarts.
        problem: the failure or the damage.
    """

    name: str
    path: str
    state: State
    task: str | None = None
    step: int | None = None
    total_steps: int | None = None
    epoch: int | None = None
    world_size: int | None = None
    microbatches: int | None = None
    metric: str | None = None
    value: float | None = None
    created: float | None = None
    seconds: float | None = None
    problem: str | None = None


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if it is missing, damaged or anything else."""
    try:
        document = parse_json(read_document(path))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def check_folder(root: Path) -> None:
    """Require that a directory exists and is readable."""
    try:
        problem = None if root.is_dir() else f"there is no directory {root}"
    except OSError as error:
        problem = f"{root} cannot be read: {error.strerror}"
    if problem is not None:
        raise RunDirectoryError(f"{problem}. Give the directory that contains the runs.")


def find_runs(root: Path, unreadable: list[OSError] | None = None) -> list[RunSummary]:
    """Return all runs directly under ``root``, oldest first, including damaged ones.

    Args:
        unreadable: receives the errors of what cannot be read, and may be a run.

    Raises:
        RunDirectoryError: the directory cannot be read.
    """
    summaries = [summarise(directory) for directory in run_directories(root, unreadable)]
    return sorted(summaries, key=lambda run: (run.created or 0.0, run.name))


def run_directories(root: Path, unreadable: list[OSError] | None = None) -> list[RunDirectory]:
    """Return the directories of the runs directly in a directory; none if it does not exist; see :func:`find_runs`.

    Raises:
        RunDirectoryError: the directory cannot be read.
    """
    try:
        # Names with a dot are drafts, and what `paceline gc` removes.
        directories = [RunDirectory(path) for path in root.iterdir() if not path.name.startswith(".")]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunDirectoryError(f"{root} cannot be read: {error.strerror}.") from error
    return [directory for directory in directories if _looks_like_run(directory, unreadable)]


def search_directories(root: Path) -> list[Path]:
    """Return the directories of the searches directly in a directory, or the directory itself if it is one's.

    Raises:
        OSError: the directory cannot be read.
    """
    if not root.is_dir():
        return []
    return [path for path in (root, *root.iterdir()) if not path.name.startswith(".") and is_search(path)]


def is_search(path: Path) -> bool:
    """Return whether a search was started here."""
    try:
        return (path / "tune.json").is_file()
    except OSError:  # another user's, or on a broken disk
        return False


def search_of(directory: RunDirectory) -> Path | None:
    """Return the directory of the search of which a run is a trial; None if it belongs to no search."""
    trials = directory.path.absolute().parent
    return trials.parent if trials.name == "trials" and is_search(trials.parent) else None


def summarise(directory: RunDirectory) -> RunSummary:
    """Summarise one run's directory; errors become its ``problem``."""
    try:
        return _summarise(directory)
    except FOREIGN as error:
        return damaged(directory, error)


def damaged(directory: RunDirectory, error: Exception) -> RunSummary:
    """Return the summary of a run whose reading raised this error."""
    known = isinstance(error, RunDirectoryError | OSError)
    problem = str(error) if known else f"unexpected contents: {error!r}"
    return RunSummary(name=directory.path.name, path=str(directory.path), state="damaged", problem=problem)


def _looks_like_run(directory: RunDirectory, unreadable: list[OSError] | None) -> bool:
    """Return whether a run was started here, even if its files are damaged by now."""
    try:
        return directory.exists() or directory.events.exists() or directory.checkpoints.is_dir()
    except OSError as error:  # another user's, or on a broken disk
        if unreadable is not None:
            unreadable.append(error)
        return False


def _summarise(directory: RunDirectory) -> RunSummary:
    if not directory.exists():
        raise RunDirectoryError("has no run.toml")
    manifest = directory.read_manifest()
    config, task = manifest.get("config", {}), manifest.get("task", {})
    events = directory.read_events()
    if not events and directory.events.exists() and directory.events.stat().st_size:
        raise RunDirectoryError("has no intact record in events.jsonl")
    records = last_records(directory.metrics)
    result = parse_json(read_document(directory.result)) if directory.result.is_file() else {}
    started: dict[str, Any] = next((e for e in reversed(events) if e["event"] == "started"), {})
    steps = [r["step"] for r in (*events, *records) if r.get("step") is not None]
    last = last_deciding(events)
    ended: State | None = last.get("event") if last.get("event") in ("finished", "stopped", "failed") else None
    state: State = "running" if directory.is_running() else ended or "crashed"
    problem = None
    if state == "failed":
        error = (str(last.get("error", "")).strip().splitlines() or ["unknown error"])[0]
        problem = error if last.get("rank") is None else f"rank {last['rank']}: {error}"
    splits = _SPLITS if search_of(directory) is None else _SPLITS_OF_TRIAL
    metric, value = _main_metric(config, result, records, splits)
    summary = RunSummary(
        name=directory.path.name,
        path=str(directory.path),
        state=state,
        task=result.get("task") or config.get("task") or task.get("spec"),
        step=result["steps"] if state == "finished" and "steps" in result else max(steps, default=None),
        total_steps=started.get("total_steps"),
        epoch=records[-1]["epoch"] + 1 if records else None,
        world_size=started.get("world_size"),
        microbatches=started.get("microbatches"),
        metric=metric,
        value=value,
        created=float(events[0]["time"]) if events else directory.manifest.stat().st_mtime,
        seconds=_active_seconds(directory, events, state),
        problem=problem,
    )
    return msgspec.convert(asdict(summary), RunSummary)  # a damaged file may hold values of any type


def last_deciding(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the last record of a beginning or an end: a backup, a note about a node and others may follow an end."""
    deciding = ("created", "started", "finished", "stopped", "failed")
    return next((event for event in reversed(events) if event["event"] in deciding), {})


def _active_seconds(directory: RunDirectory, events: list[dict[str, Any]], state: State) -> float:
    """Return the sum over all starts of the time from the start to the last sign of activity."""
    total, last = 0.0, 0.0
    begin: float | None = None
    for event in events:
        if event["event"] == "started":
            total += max(0.0, last - begin) if begin is not None else 0.0  # a clock may be set back
            begin = float(event["time"])
        last = float(event["time"])
    if begin is None:
        return 0.0
    if state == "running":
        last = time.time()
    elif state == "crashed" and directory.metrics.exists():
        last = max(last, directory.metrics.stat().st_mtime)
    return round(total + max(0.0, last - begin), 3)


def final_metrics(
    result: Mapping[str, Any], records: Iterable[Mapping[str, Any]]
) -> dict[str, dict[str, float | None]]:
    """Return the metrics of ``result.json``, and the last ones of the splits that it lacks: split -> name -> value."""
    return {r["split"]: r["metrics"] for r in records if r["kind"] == "eval"} | dict(result.get("metrics", {}))


def _main_metric(
    config: dict[str, Any], result: dict[str, Any], records: list[dict[str, Any]], splits: Sequence[str]
) -> tuple[str | None, float | None]:
    by_split = final_metrics(result, records)
    try:
        best = parse_best(config["best_metric"])[0] if config.get("best_metric") else None
    except ConfigError:
        best = None
    for split in (*(s for s in splits if s in by_split), *by_split):
        metrics = by_split[split]
        if metrics:
            name = best if best in metrics else next(iter(metrics))
            return f"{split}.{name}", metrics[name]
    return None, None


def last_records(path: Path) -> list[dict[str, Any]]:
    """Return the records at the end of a JSONL file, which may be large; malformed lines are skipped."""
    try:
        return parse_json_records(read_tail(path).splitlines())
    except FileNotFoundError:
        return []


def read_tail(path: Path) -> str:
    """Return the last whole lines of a file, at most 64 KiB."""
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        text = file.read(_TAIL_BYTES).decode(errors="replace")
    return text if size <= _TAIL_BYTES else text.partition("\n")[2]


# --- Checkpoints and their backups, by their manifests ---


@dataclass(frozen=True, kw_only=True)
class CheckpointEntry:
    """One checkpoint or backup.

    Attributes:
        epoch: epochs done; None if the manifest is damaged.
        best_version: the version of the best model then.
        created: Unix time.
        marks: "latest" (the newest), "best" (of the newest), "backup" (it is one), "backed up" (it has one), "damaged".
        problem: the error in its manifest or the sizes of its files, if any.
    """

    name: str
    path: Path
    step: int
    version: int
    epoch: int | None
    best_version: int | None
    size_bytes: int
    created: float
    in_backup: bool
    marks: tuple[str, ...] = ()
    problem: str | None = None


def checkpoint_entries(checkpoints: Path, backup: Path | None) -> list[CheckpointEntry]:
    """Return all checkpoints of a run, oldest first, then its backups."""
    own = [_checkpoint_entry(path, in_backup=False) for path in reversed(scan(checkpoints))]
    copies = [] if backup is None else [_checkpoint_entry(path, in_backup=True) for path in reversed(scan(backup))]
    all_entries = [*own, *copies]
    newest = max((e for e in all_entries if e.problem is None), key=lambda e: e.version, default=None)
    backed_up = {e.name for e in copies if e.problem is None}

    def marks(entry: CheckpointEntry) -> tuple[str, ...]:
        good = entry.problem is None
        conditions = {
            "latest": good and newest is not None and entry.version == newest.version,
            "best": good and newest is not None and entry.version == newest.best_version,
            "backup": entry.in_backup,
            "backed up": not entry.in_backup and entry.name in backed_up,
            "damaged": not good,
        }
        return tuple(mark for mark, holds in conditions.items() if holds)

    return [replace(entry, marks=marks(entry)) for entry in all_entries]


def _checkpoint_entry(path: Path, *, in_backup: bool) -> CheckpointEntry:
    step, version = parse_name(path.name)
    epoch = best = problem = None
    size = 0
    try:
        manifest = read_manifest(path)
        epoch, best = manifest.info.epoch, manifest.info.best_version
        if checkpoint_name(manifest.info) != path.name:
            problem = f"its {MANIFEST} is that of {checkpoint_name(manifest.info)}"
        for name, record in manifest.files.items():
            try:
                actual_size = (path / name).lstat().st_size
            except OSError:
                problem = f"{name} is missing"
                continue
            size += actual_size
            if actual_size != record.size:
                problem = f"{name} has {actual_size} bytes, but its {MANIFEST} says {record.size}"
    except CheckpointError as error:
        problem = str(error.__cause__ or error)
    created = 0.0
    with suppress(OSError):
        created = path.stat().st_mtime
    return CheckpointEntry(
        name=path.name,
        path=path,
        step=step,
        version=version,
        epoch=epoch,
        best_version=best,
        size_bytes=size,
        created=created,
        in_backup=in_backup,
        problem=problem,
    )
