"""The dashboard's index of runs, their curves and their alerts."""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.core.errors import RunDirectoryError
from paceline.core.files import open_regular, parse_json, read_document
from paceline.core.ownership import is_locked
from paceline.runs.directory import RunDirectory
from paceline.runs.rank_progress import HeartbeatRecord
from paceline_pages.run_status import (
    FOREIGN,
    RunSummary,
    damaged,
    last_deciding,
    last_records,
    read_object,
    run_directories,
    search_directories,
    search_of,
    summarise,
)

# --- Heartbeats ---


def read_beats(directory: RunDirectory) -> list[HeartbeatRecord]:
    """Return the last beat of each rank of the newest group, by rank.

    Ranks of earlier, larger groups are omitted.
    """
    beats = [beat for path in directory.heartbeats.glob("rank-*.json") if (beat := _read_beat(path)) is not None]
    newest = max(beats, key=lambda beat: beat.time, default=None)
    if newest is None:
        return []
    return sorted((beat for beat in beats if beat.rank < newest.world_size), key=lambda beat: beat.rank)


def _read_beat(path: Path) -> HeartbeatRecord | None:
    try:
        return msgspec.convert(parse_json(read_document(path)), HeartbeatRecord)
    except (OSError, ValueError):
        return None


# --- Curves: follow a growing ``metrics.jsonl`` in bounded memory ---


MAX_POINTS = 800
"""Number of points of a curve above which neighbours are merged."""

_MAX_CURVES = 64
_MAX_NAME_LENGTH = 100
_CHUNK = 4 * 2**20  # bytes per read
_MAX_BYTES = 512 * 2**20  # of a new file; earlier bytes are skipped


class Curve:
    """A curve of at most :data:`MAX_POINTS` points, in which a spike stays visible as ``high`` or ``low``.

    A point is the mean of neighbouring records, as many for each point; the newest ones are collected apart until they
    are as many. Columns and plain numbers, so that the page of a run with 300,000 records appears in a second or two.
    """

    def __init__(self) -> None:
        self._columns: tuple[list[int], list[float], list[float], list[float]] = ([], [], [], [])
        self._group = 1  # records per point
        self._step = 0
        self._begin_point()

    def _begin_point(self) -> None:
        self._count = 0  # newest records
        self._sum = 0.0
        self._low = math.inf
        self._high = -math.inf

    def add(self, step: int, value: float) -> None:
        self._step = step
        self._count += 1
        self._sum += value
        if value < self._low:
            self._low = value
        if value > self._high:
            self._high = value
        if self._count == self._group:
            steps, means, lows, highs = self._columns
            steps.append(step)
            means.append(self._sum / self._count)
            lows.append(self._low)
            highs.append(self._high)
            self._begin_point()
            if len(steps) == MAX_POINTS:
                self._halve()

    def _halve(self) -> None:
        steps, means, lows, highs = self._columns
        pairs = range(0, len(steps), 2)
        self._columns = (
            steps[1::2],
            [(means[i] + means[i + 1]) / 2 for i in pairs],
            [min(lows[i], lows[i + 1]) for i in pairs],
            [max(highs[i], highs[i + 1]) for i in pairs],
        )
        self._group *= 2

    def as_json(self) -> dict[str, Any]:
        """Return the points as columns, with lows and highs only if records were merged.

        The newest records belong to the last point: the mean of a few of them would look like a drop or a rise at the
        end of the curve.
        """
        if self._group == 1:
            return {"step": list(self._columns[0]), "mean": list(self._columns[1])}
        steps, means, lows, highs = (list(column) for column in self._columns)
        if self._count:
            steps[-1] = self._step
            means[-1] = (means[-1] * self._group + self._sum) / (self._group + self._count)
            lows[-1], highs[-1] = min(lows[-1], self._low), max(highs[-1], self._high)
        return {"step": steps, "mean": means, "low": lows, "high": highs}


class _Record(msgspec.Struct):
    """The parts of a line of ``metrics.jsonl`` that are shown; the rows of ranks only of the newest one."""

    kind: str
    step: int
    loss: Any = None
    lr: Any = None
    samples_per_s: Any = None
    imbalance: Any = None
    logged: Any = None
    split: Any = None
    metrics: Any = None
    ranks: msgspec.Raw = msgspec.Raw(b"null")


class Curves:
    """The curves of one file, of which each update reads the new lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(_Record)
        self._reset()

    def _reset(self) -> None:
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._curves: dict[str, Curve] = {}
        self._ranks = msgspec.Raw(b"null")

    def update(self) -> None:
        """Read the new lines; if the file was replaced, as by a resume, read it from the start."""
        try:
            with open_regular(self._path) as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != self._file or status.st_size < self._offset:
                    self._reset()
                    self._file = (status.st_dev, status.st_ino)
                    self._offset = max(0, status.st_size - _MAX_BYTES)
                file.seek(self._offset)
                while chunk := file.read(_CHUNK):
                    whole, newline, rest = chunk.rpartition(b"\n")
                    if not newline:
                        break  # an incomplete line is read again later
                    self._offset += len(whole) + 1
                    file.seek(self._offset)
                    for line in whole.split(b"\n"):
                        self._read(line)
                    if (len(rest) == 0 and len(chunk) < _CHUNK) or self._offset >= status.st_size:
                        break  # what was added meanwhile is for the next update
        except OSError:
            self._reset()

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """Return the newest record's rows, one per rank."""
        try:
            rows = parse_json(bytes(self._ranks))
        except ValueError:
            return []
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    def as_json(self) -> dict[str, Any]:
        curves = {name: curve.as_json() for name, curve in self._curves.items()}
        return {name: curve for name, curve in curves.items() if curve["step"]}

    def _read(self, line: bytes) -> None:
        try:
            record = self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return  # a foreign or incomplete line
        step = record.step
        if record.kind == "train":
            self._ranks = record.ranks
            for name in ("loss", "lr", "samples_per_s", "imbalance"):
                self._add(name, step, getattr(record, name))
            self._add_all("logged", step, record.logged)
        elif record.kind == "eval":
            self._add_all(str(record.split), step, record.metrics)

    def _add_all(self, group: str, step: int, values: object) -> None:
        if isinstance(values, dict):
            for name, value in values.items():
                self._add(f"{group}.{name}"[:_MAX_NAME_LENGTH], step, value)

    def _add(self, name: str, step: int, value: object) -> None:
        if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
            return
        curve = self._curves.get(name)
        if curve is None:
            if len(self._curves) >= _MAX_CURVES:
                return
            curve = self._curves[name] = Curve()
        curve.add(step, value)  # type: ignore[arg-type]


# --- Alerts: pure functions of the known state of a run ---


SILENT_S = 15.0
"""Seconds without a heartbeat after which a rank is silent."""

STUCK_S = 120.0
"""Seconds without a step after which a run makes no progress."""

RECENT_S = 600.0
"""Seconds for which an active run is marked after a fault."""

MIN_DISK = (0.02, 2 * 2**30)
"""A disk is nearly full with less than this share *and* fewer bytes than this free."""

_FAULT_TEXTS = {"fault": "a worker was lost", "node lost": "a node was lost", "hang": "training hung"}


@dataclass(frozen=True)
class Alert:
    """A condition that needs attention.

    Attributes:
        kind: "loss", "progress", "silent", "disk", "fault", "checkpoint", "corruption", "ended" or "damaged".
        severity: "error": the run is broken; "warning": it continues.
    """

    kind: str
    severity: Literal["error", "warning"]
    text: str


def alerts(
    *,
    state: str,
    problem: str | None,
    events: Sequence[Mapping[str, Any]],
    beats: Sequence[HeartbeatRecord],
    nonfinite: Sequence[int],
    disk: tuple[int, int] | None,
    now: float,
) -> list[Alert]:
    """Return a run's alerts, the most severe first.

    Args:
        problem: description of a failure or damage, if any.
        events: the last ones, oldest first.
        beats: last heartbeat of each rank.
        nonfinite: steps whose loss was NaN or infinite.
        disk: free and total bytes of the run's disk, None if unknown.
        now: Unix time.
    """
    found = []
    if state in ("failed", "crashed", "damaged"):
        killed = "it ended without a final event: it was killed, or its node went down"
        found.append(Alert("ended", "error", killed if state == "crashed" else problem or state))
    if nonfinite:
        found.append(Alert("loss", "error", f"the loss was NaN or infinite at step {nonfinite[-1]}"))
    if state in ("running", "waiting"):
        found += _alerts_of_active(events, beats, disk, now)
    # Saves that failed since the last success.
    last = {event.get("event"): (number, event) for number, event in enumerate(events)}
    for good in ("checkpoint", "backup"):
        number, event = last.get(f"{good} failed", (-1, {}))
        if number > last.get(good, (-1,))[0]:
            found.append(Alert("checkpoint", "warning", f"the last {good} failed: {event.get('error', '')}"))
    if "corruption" in last:
        sentence = last["corruption"][1].get("sentence", "the ranks' bits differed")
        found.append(Alert("corruption", "warning", str(sentence)))
    return sorted(found, key=lambda alert: alert.severity != "error")


def _alerts_of_active(
    events: Sequence[Mapping[str, Any]], beats: Sequence[HeartbeatRecord], disk: tuple[int, int] | None, now: float
) -> Iterator[Alert]:
    silent = [beat for beat in beats if not beat.left and now - beat.time > SILENT_S]
    if silent:
        ranks = ", ".join(f"{beat.rank} ({beat.host})" for beat in silent[:4])
        more = f" and {len(silent) - 4} more" if len(silent) > 4 else ""
        oldest_s = now - min(beat.time for beat in silent)
        yield Alert("silent", "error", f"no heartbeat for {oldest_s:.0f} s from rank {ranks}{more}")
    moved = max((beat.stepped for beat in beats), default=now)
    if now - moved > STUCK_S:
        yield Alert("progress", "warning", f"no step for {now - moved:.0f} s")
    if disk is not None and disk[0] < min(MIN_DISK[1], MIN_DISK[0] * disk[1]):
        yield Alert("disk", "warning", f"the disk is nearly full: {disk[0] / 2**30:.2f} GiB free")
    recent = Counter(event.get("event") for event in events if now - float(event.get("time", 0.0)) < RECENT_S)
    for kind, text in _FAULT_TEXTS.items():
        if recent[kind]:
            times = f" ({recent[kind]} times)" if recent[kind] > 1 else ""
            yield Alert("fault", "warning", f"{text} in the last {RECENT_S / 60:.0f} minutes{times}")


# --- The index: read a run again only after one of its files has changed ---


REFRESH_S = 1.0
"""Seconds for which an answer is cached for all clients."""

_ACTIVE = ("running", "waiting")


class IndexedSearch:
    """A search; its two files are read again only when they have changed.

    Attributes:
        row: as the page shows it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._signature: tuple[object, ...] | None = None
        self.row: dict[str, Any] = {}

    def update(self) -> bool:
        """Read what has changed; return whether the search still exists."""
        files = [self._path / name for name in ("tune.json", "result.json")]
        signature = (is_locked(self._path / "tune.lock"), *map(file_signature, files))
        if signature != self._signature:
            self._signature = signature
            settings, result = map(read_object, files)
            state = "running" if signature[0] else "finished" if result.get("done") is True else "stopped"
            best, metric = result.get("best"), str(settings.get("metric", "")).partition(":")[0]
            best = best if isinstance(best, dict) and isinstance(best.get(metric), int | float) else None
            options, planned = settings.get("options"), result.get("planned", settings.get("trials"))
            self.row = {
                "id": page_name(self._path),
                "name": self._path.name,
                "state": state,
                "task": str(options.get("task", "")) if isinstance(options, dict) else "",
                "planned": planned if isinstance(planned, int) else None,
                "metric": metric,
                "value": None if best is None else best[metric],
                "best": None if best is None else page_name(self._path / str(best.get("run", ""))),
            }
        return signature[1] is not None


def page_name(path: Path) -> str:
    """Return the name of a directory in a page's address."""
    return hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:16]


def file_signature(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with a file; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


@dataclass
class IndexedRun:
    """A run as it was when its files last changed."""

    directory: RunDirectory
    signature: tuple[object, ...]
    row: dict[str, Any]
    revision: int


class Index:
    """The runs in some folders; safe to use from several threads."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = tuple(roots)
        self._runs: dict[str, IndexedRun] = {}
        self._searches: dict[str, IndexedSearch] = {}
        self._removed: dict[str, int] = {}
        self._revision = 0
        self._epoch = secrets.token_hex(4)  # tells this server's revisions from another's
        self._lock = threading.Lock()
        self._read_at = -REFRESH_S

    def directory(self, run: str) -> RunDirectory | None:
        """Return the directory of a listed run; a client's text never becomes part of a path."""
        with self._lock:
            indexed = self._runs.get(run)
        return None if indexed is None else indexed.directory

    def id_of(self, path: Path) -> str | None:
        """Return the id of the run in a directory; None if it is not listed."""
        name = page_name(path)
        return None if self.directory(name) is None else name

    def row(self, run: str) -> dict[str, Any] | None:
        with self._lock:
            self._refresh()
            indexed = self._runs.get(run)
            return None if indexed is None else dict(indexed.row)

    def rows(self, since: str = "") -> dict[str, Any]:
        """Return the rows that changed since the tag ``since`` (else all rows), with a tag of the current state."""
        with self._lock:
            self._refresh()
            epoch, _, number = since.partition("-")
            is_partial = epoch == self._epoch and number.isdecimal()
            seen = int(number) if is_partial else -1
            rows = [indexed.row for indexed in self._runs.values() if indexed.revision > seen]
            removed = [run for run, revision in self._removed.items() if revision > seen] if is_partial else []
            tag = f"{self._epoch}-{self._revision}"
            searches = [search.row for search in self._searches.values()]
            return {"tag": tag, "part": is_partial, "runs": rows, "removed": removed, "searches": searches}

    def _refresh(self) -> None:
        if time.monotonic() - self._read_at < REFRESH_S:
            return
        found = {page_name(directory.path): directory for directory in self._directories()}
        revision = self._revision + 1
        for run in self._runs.keys() - found.keys():
            del self._runs[run]
            self._removed[run] = self._revision = revision
        for run, directory in found.items():
            signature, indexed = _signature(directory), self._runs.get(run)
            if indexed is not None and indexed.signature == signature and indexed.row["state"] not in _ACTIVE:
                continue
            search = search_of(directory)
            row = {"id": run, "search": None, "search_name": None, **_row(directory)}
            if search is not None:
                row |= {"search": page_name(search), "search_name": search.name}
            if indexed is not None and indexed.row == row:
                indexed.signature = signature
                continue
            self._revision = revision
            self._removed.pop(run, None)
            self._runs[run] = IndexedRun(directory, signature, row, revision)
        self._read_at = time.monotonic()

    def _directories(self) -> list[RunDirectory]:
        found: dict[Path, RunDirectory] = {}
        for root in self._roots:
            run = RunDirectory(root)
            try:
                searches = search_directories(root)
                directories = [run] if run.exists() else run_directories(root)
                directories += [trial for path in searches for trial in run_directories(path / "trials")]
            except (RunDirectoryError, OSError):
                continue  # it cannot be read at present
            for directory in directories:
                found.setdefault(directory.path.absolute(), directory)
            for path in searches:
                known = self._searches.get(page_name(path))
                self._searches[page_name(path)] = known or IndexedSearch(path)
        for name, search in list(self._searches.items()):
            if not search.update():
                del self._searches[name]
        return list(found.values())


def _signature(directory: RunDirectory) -> tuple[object, ...]:
    files = (directory.manifest, *directory.event_files(), directory.metrics, directory.result)
    return directory.is_running(), *map(file_signature, files)


def _row(directory: RunDirectory) -> dict[str, Any]:
    """Return a run's row; if it cannot be read, a row with the problem."""
    summary = summarise(directory)
    try:
        events, records = directory.read_events(), last_records(directory.metrics)
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
    state = state_of(summary, events)
    is_active = state in _ACTIVE
    row = asdict(summary)
    del row["path"]
    worlds = (event for event in reversed(events) if event.get("event") in ("group", "started"))
    world: Mapping[str, Any] = next(worlds, {})
    row["world_size"] = world.get("computing", world.get("world_size", summary.world_size))
    row["state"] = state
    row["folder"] = directory.path.parent.name
    disk = None
    if is_active:
        with suppress(OSError):
            usage = shutil.disk_usage(directory.path)
            disk = usage.free, usage.total
    found = alerts(
        state=state,
        problem=summary.problem,
        events=events,
        beats=beats,
        nonfinite=[
            r["step"] for r in records if r.get("kind") == "train" and r.get("loss", 0.0) is None and "step" in r
        ],
        disk=disk,
        now=time.time(),
    )
    row["alerts"] = [asdict(alert) for alert in found]
    moving = [beat.steps_per_s for beat in beats if beat.steps_per_s is not None and not beat.left]
    row["steps_per_s"] = max(moving, default=None) if is_active else None
    if is_active and beats:
        row["step"] = max([row["step"] or 0, *(beat.step for beat in beats)])
    return row


def state_of(summary: RunSummary, events: Sequence[Mapping[str, Any]]) -> str:
    """Return the run's state in a word.

    In addition to the states of ``paceline runs``: "preempted" if something other than Ctrl-C or its search stopped
    the run, "waiting" if its node reaches too few others.
    """
    state: str = summary.state
    if state == "stopped" and last_deciding(events).get("cause") not in ("SIGINT", "the search"):
        return "preempted"
    if state == "running" and events and events[-1].get("event") == "paused":
        return "waiting"
    return state
