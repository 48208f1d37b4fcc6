"""What the dashboard knows of runs: an index, their curves, and alerts."""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from paceline.core.errors import RunDirectoryError
from paceline.runs.directory import RunDirectory
from paceline.runs.status import (
    FOREIGN,
    HeartbeatRecord,
    RunSummary,
    damaged,
    last_records,
    read_beats,
    run_directories,
    summarise,
)

# --- The curves of a run: ``metrics.jsonl``, followed as it grows, in bounded memory ---


MOST_POINTS = 800
"""Of a curve; above, neighbours are merged."""

_MOST_CURVES = 64
_LONGEST_NAME = 100
_CHUNK = 4 * 2**20  # bytes read at once
_MOST_BYTES = 64 * 2**20  # of a file that was never read: what is before is left out


class MetricPoint(NamedTuple):
    """One or several neighbouring records.

    Attributes:
        step: of the last of them.
        mean, low, high: of their values.
        records: how many.
    """

    step: int
    mean: float
    low: float
    high: float
    records: int


class Curve:
    """At most :data:`MOST_POINTS` points; a spike stays visible as a point's ``high`` or ``low``."""

    def __init__(self) -> None:
        self.points: list[MetricPoint] = []
        self._group = 1  # records a point

    def add(self, step: int, value: float) -> None:
        """Add a record's value; steps do not fall."""
        last = self.points[-1] if self.points else None
        if last is None or last.records >= self._group:
            self.points.append(MetricPoint(step, value, value, value, 1))
        else:
            self.points[-1] = _merged(last, MetricPoint(step, value, value, value, 1))
        if len(self.points) > MOST_POINTS:
            halves = iter(self.points)
            self.points = [_merged(a, b) if (b := next(halves, None)) else a for a in halves]
            self._group *= 2

    def as_json(self) -> dict[str, Any]:
        """The points, as columns; lows and highs only where records were merged."""
        columns: dict[str, Any] = {
            "step": [p.step for p in self.points],
            "mean": [p.mean for p in self.points],
        }
        if self._group > 1:
            columns |= {"low": [p.low for p in self.points], "high": [p.high for p in self.points]}
        return columns


def _merged(a: MetricPoint, b: MetricPoint) -> MetricPoint:
    records = a.records + b.records
    mean = (a.mean * a.records + b.mean * b.records) / records
    return MetricPoint(b.step, mean, min(a.low, b.low), max(a.high, b.high), records)


class Curves:
    """Follows one file: each update reads what was added since the last one.

    Attributes:
        ranks: the newest record's rows, one a rank.
        nonfinite: steps whose loss was NaN or infinite, the newest ones.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._curves: dict[str, Curve] = {}
        self.ranks: list[dict[str, Any]] = []
        self.nonfinite: list[int] = []

    def update(self) -> None:
        """Read what is new; a file that was replaced, as a resume does, is read anew."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != self._file or status.st_size < self._offset:
                    self._forget()
                    self._file = (status.st_dev, status.st_ino)
                    self._offset = max(0, status.st_size - _MOST_BYTES)
                file.seek(self._offset)
                while chunk := file.read(_CHUNK):
                    whole, newline, rest = chunk.rpartition(b"\n")
                    if not newline:
                        break  # a line that has not ended is read again, once it has
                    self._offset += len(whole) + 1
                    file.seek(self._offset)
                    for line in whole.split(b"\n"):
                        self._read(line)
                    if len(rest) == 0 and len(chunk) < _CHUNK:
                        break
        except OSError:
            self._forget()

    def as_json(self) -> dict[str, Any]:
        """Each curve's points, as columns."""
        return {name: curve.as_json() for name, curve in self._curves.items()}

    def _read(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            step = int(record["step"])
            if record["kind"] == "train":
                rows = record.get("ranks")
                self.ranks = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
                if record.get("loss") is None:
                    self.nonfinite = [*self.nonfinite[-9:], step]
            for name, value in _values(record):
                self._add(name[:_LONGEST_NAME], step, value)
        except (ValueError, TypeError, KeyError, AttributeError):
            return  # a foreign or torn line

    def _add(self, name: str, step: int, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return
        curve = self._curves.get(name)
        if curve is None:
            if len(self._curves) >= _MOST_CURVES:
                return
            curve = self._curves[name] = Curve()
        curve.add(step, float(value))


def _values(record: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    if record["kind"] == "eval":
        for name, value in record["metrics"].items():
            yield f"{record['split']}.{name}", value
    elif record["kind"] == "train":
        for name in ("loss", "lr", "samples_per_s", "imbalance"):
            yield name, record.get(name)
        for name, value in record.get("logged", {}).items():
            yield f"logged.{name}", value


# --- What a person should look at: pure functions of what is known of a run ---


SILENT_S = 15.0
"""Seconds without a beat after which a rank is called silent."""

STUCK_S = 120.0
"""Seconds without a step after which a run is said to make no progress."""

RECENT_S = 600.0
"""How long after a fault a run at work is marked for it."""

LEAST_DISK = (0.02, 2 * 2**30)
"""A disk is nearly full with less than this share *and* less than so many bytes free."""

_TOLD = {"fault": "a worker was lost", "node lost": "a machine was lost", "hang": "training hung"}


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One thing to look at.

    Attributes:
        kind: "loss", "progress", "silent", "disk", "fault", "checkpoint", "corruption", "ended" or "damaged".
        severity: "error": the run is not all right; "warning": it goes on.
        text: what, in words.
    """

    kind: str
    severity: Literal["error", "warning"]
    text: str


@dataclass(frozen=True, kw_only=True)
class AlertInputs:
    """What alerts are made from.

    Attributes:
        state: the run's.
        problem: what failed or is damaged, where something is.
        events: the last ones, oldest first.
        beats: the last of each rank.
        nonfinite: steps whose loss was NaN or infinite.
        disk: free and all bytes of the run's disk, None where that is unknown.
        now: Unix time.
    """

    state: str
    problem: str | None
    events: Sequence[Mapping[str, Any]]
    beats: Sequence[HeartbeatRecord]
    nonfinite: Sequence[int]
    disk: tuple[int, int] | None
    now: float


def alerts(facts: AlertInputs) -> list[Alert]:
    """What to look at, the worst first."""
    found: list[Alert] = []
    if facts.state in ("failed", "crashed", "damaged"):
        found.append(Alert(kind="ended", severity="error", text=_end(facts)))
    if facts.nonfinite:
        text = f"the loss was NaN or infinite at step {facts.nonfinite[-1]}"
        found.append(Alert(kind="loss", severity="error", text=text))
    if facts.state in ("running", "waiting"):
        found += _is_active(facts)
    found += _saving(facts.events)
    return sorted(found, key=lambda alert: alert.severity != "error")


def _end(facts: AlertInputs) -> str:
    if facts.state == "crashed":
        return "it ended without a word: killed, or its machine went down"
    return facts.problem or facts.state


def _is_active(facts: AlertInputs) -> list[Alert]:
    found = []
    silent = [beat for beat in facts.beats if is_silent(beat, facts.now)]
    if silent:
        oldest = min(beat.time for beat in silent)
        who = ", ".join(f"{beat.rank} ({beat.host})" for beat in silent[:4])
        more = f" and {len(silent) - 4} more" if len(silent) > 4 else ""
        text = f"no heartbeat for {facts.now - oldest:.0f} s from rank {who}{more}"
        found.append(Alert(kind="silent", severity="error", text=text))
    moved = max((beat.stepped for beat in facts.beats), default=None)
    if moved is not None and facts.now - moved > STUCK_S:
        text = f"no step for {facts.now - moved:.0f} s"
        found.append(Alert(kind="progress", severity="warning", text=text))
    if facts.disk is not None:
        free, total = facts.disk
        if free < LEAST_DISK[1] and free < LEAST_DISK[0] * total:
            text = f"the disk is nearly full: {free / 2**30:.2f} GiB free"
            found.append(Alert(kind="disk", severity="warning", text=text))
    recent = [e for e in facts.events if facts.now - float(e.get("time", 0.0)) < RECENT_S]
    for kind, told in _TOLD.items():
        number = sum(event.get("event") == kind for event in recent)
        if number:
            times = f" ({number} times)" if number > 1 else ""
            text = f"{told} in the last {RECENT_S / 60:.0f} minutes{times}"
            found.append(Alert(kind="fault", severity="warning", text=text))
    return found


def _saving(events: Sequence[Mapping[str, Any]]) -> list[Alert]:
    """What was not saved since the last time that it was; a corruption, whenever it was."""
    found = []
    for good, bad in (("checkpoint", "checkpoint failed"), ("backup", "backup failed")):
        last = next((event for event in reversed(events) if event.get("event") in (good, bad)), None)
        if last is not None and last["event"] == bad:
            text = f"the last {good} failed: {last.get('error', '')}"
            found.append(Alert(kind="checkpoint", severity="warning", text=text))
    corrupt = next((event for event in reversed(events) if event.get("event") == "corruption"), None)
    if corrupt is not None:
        text = str(corrupt.get("sentence", "a rank computed other bits than the others"))
        found.append(Alert(kind="corruption", severity="warning", text=text))
    return found


def is_silent(beat: HeartbeatRecord, now: float) -> bool:
    """Whether a rank should have told something by now."""
    return not beat.left and now - beat.time > SILENT_S


# --- Which runs there are, and where each stands: read again only where a file has changed ---


REFRESH_S = 1.0
"""Seconds for which an answer holds, whoever asks."""

_AT_WORK = ("running", "waiting")
_Signature = tuple[object, ...]


@dataclass
class IndexedRun:
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
        self._runs: dict[str, IndexedRun] = {}
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
            self._runs[run] = IndexedRun(
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
    beats: Sequence[HeartbeatRecord],
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
    facts = AlertInputs(
        state=state,
        problem=summary.problem,
        events=events,
        beats=beats,
        nonfinite=[
            r["step"] for r in records if r.get("kind") == "train" and r.get("loss", 0.0) is None and "step" in r
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
    summary: RunSummary, events: Sequence[Mapping[str, Any]], beats: Sequence[HeartbeatRecord], now: float
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
