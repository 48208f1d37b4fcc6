"""Which runs there are, and where each stands: read again only where a file has changed."""

from __future__ import annotations

import hashlib
import secrets
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.dashboard.alerts import SILENT_S, Facts, alerts
from paceline.errors import RunDirectoryError
from paceline.monitoring.heartbeat import Beat, read_beats
from paceline.monitoring.overview import (
    FOREIGN,
    RunSummary,
    damaged,
    last_records,
    run_directories,
    summarise,
)
from paceline.run_directory import RunDirectory

REFRESH_S = 1.0
"""Seconds for which an answer holds, whoever asks."""

_AT_WORK = ("running", "waiting")
_Signature = tuple[object, ...]


@dataclass
class Known:
    """A run, as it was when its files last changed."""

    directory: RunDirectory
    signature: _Signature
    row: dict[str, Any]
    revision: int


class Index:
    """The runs in some folders; safe to use from several threads.

    Args:
        roots: folders of runs, or runs.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = tuple(roots)
        self._runs: dict[str, Known] = {}
        self._removed: dict[str, int] = {}
        self._revision = 0
        self._epoch = secrets.token_hex(4)  # another server's revisions are no revisions of ours
        self._lock = threading.Lock()
        self._read_at = -REFRESH_S

    def directory(self, run: str) -> RunDirectory | None:
        """The directory of a run that was listed; what a client sends is never part of a path."""
        with self._lock:
            known = self._runs.get(run)
        return None if known is None else known.directory

    def id_of(self, path: Path) -> str | None:
        """What the run in a directory is called here; None where it is not listed."""
        name = _name(RunDirectory(path))
        with self._lock:
            return name if name in self._runs else None

    def row(self, run: str) -> dict[str, Any] | None:
        """A run's row, as of now."""
        with self._lock:
            self._refresh()
            known = self._runs.get(run)
            return None if known is None else dict(known.row)

    def rows(self, since: str = "") -> tuple[str, dict[str, Any]]:
        """A tag for the present state, and the rows that changed since an earlier one (else all).

        Args:
            since: the tag that an earlier call gave; anything else is answered with all rows.
        """
        with self._lock:
            self._refresh()
            epoch, _, number = since.partition("-")
            part = epoch == self._epoch and number.isdecimal()
            seen = int(number) if part else -1
            rows = [known.row for known in self._runs.values() if known.revision > seen]
            removed = [run for run, revision in self._removed.items() if revision > seen] if part else []
            tag = f"{self._epoch}-{self._revision}"
            return tag, {"tag": tag, "part": part, "runs": rows, "removed": removed}

    def _refresh(self) -> None:
        if time.monotonic() - self._read_at < REFRESH_S:
            return
        found = {_name(directory): directory for directory in self._directories()}
        revision = self._revision + 1
        for run in self._runs.keys() - found.keys():
            del self._runs[run]
            self._removed[run] = self._revision = revision
        for run, directory in found.items():
            signature, known = _signature(directory), self._runs.get(run)
            if known is not None and known.signature == signature and known.row["state"] not in _AT_WORK:
                continue
            row = {"id": run, **_row(directory)}
            changed = known is None or known.row != row
            if changed:
                self._revision = revision
                self._removed.pop(run, None)
            self._runs[run] = Known(
                directory, signature, row, revision if changed or known is None else known.revision
            )
        self._read_at = time.monotonic()

    def _directories(self) -> list[RunDirectory]:
        found: dict[Path, RunDirectory] = {}
        for root in self._roots:
            itself = RunDirectory(root)
            try:
                directories = [itself] if itself.exists() else run_directories(root)
            except (RunDirectoryError, OSError):
                continue  # it cannot be read now
            for directory in directories:
                found.setdefault(directory.path.absolute(), directory)
        return list(found.values())


def _name(directory: RunDirectory) -> str:
    return hashlib.sha256(str(directory.path.absolute()).encode()).hexdigest()[:16]


def _signature(directory: RunDirectory) -> _Signature:
    told: list[object] = [directory.is_running()]
    for path in (directory.manifest, directory.events, directory.metrics, directory.result):
        try:
            status = path.stat()
            told.append((status.st_mtime_ns, status.st_size, status.st_ino))
        except OSError:
            told.append(None)
    return tuple(told)


def _row(directory: RunDirectory) -> dict[str, Any]:
    """What is told of a run; of one that cannot be read, what is wrong with it."""
    summary = summarise(directory)
    try:
        events, records = last_records(directory.events), last_records(directory.metrics)
        return _row_of(directory, summary, events, records, read_beats(directory))
    except FOREIGN as error:
        if summary.state != "damaged":
            summary = damaged(directory, error)
        return _row_of(directory, summary, [], [], [])


def _row_of(
    directory: RunDirectory,
    summary: RunSummary,
    events: Sequence[Mapping[str, Any]],
    records: Sequence[Mapping[str, Any]],
    beats: Sequence[Beat],
) -> dict[str, Any]:
    now = time.time()
    state = state_of(summary, events, beats, now)
    at_work = state in _AT_WORK
    row = asdict(summary)
    del row["path"]
    worlds = (event for event in reversed(events) if event.get("event") in ("view", "started"))
    world: Mapping[str, Any] = next(worlds, {})
    row["world_size"] = world.get("computing", world.get("world_size", summary.world_size))
    row["state"] = state
    row["folder"] = directory.path.parent.name
    facts = Facts(
        state=state,
        problem=summary.problem,
        events=events,
        beats=beats,
        nonfinite=[
            r["step"]
            for r in records
            if r.get("kind") == "train" and r.get("loss", 0.0) is None and "step" in r
        ],
        disk=_disk(directory) if at_work else None,
        now=now,
    )
    row["alerts"] = [asdict(alert) for alert in alerts(facts)]
    moving = [beat.steps_per_s for beat in beats if beat.steps_per_s is not None and not beat.left]
    row["steps_per_s"] = max(moving, default=None) if at_work else None
    if at_work and beats:
        row["step"] = max([row["step"] or 0, *(beat.step for beat in beats)])
    return row


def state_of(
    summary: RunSummary, events: Sequence[Mapping[str, Any]], beats: Sequence[Beat], now: float
) -> str:
    """The run's state in a word.

    Besides those of ``paceline runs``: "preempted" for a run that something else than Ctrl-C stopped,
    "waiting" for one whose machine reaches too few others. A run whose lock is on another machine is at work
    as long as its ranks beat.
    """
    state: str = summary.state
    last = events[-1] if events else {}
    if state == "stopped" and last.get("cause") != "SIGINT":
        return "preempted"
    if state == "crashed" and any(not beat.left and now - beat.time < SILENT_S for beat in beats):
        state = "running"
    if state == "running" and last.get("event") == "paused":
        return "waiting"
    return state


def _disk(directory: RunDirectory) -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage(directory.path)
    except OSError:
        return None
    return usage.free, usage.total
