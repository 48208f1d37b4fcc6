"""Experiment trackers: their interface, and the thread that sends a run's records to one."""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import math
import queue
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from paceline.core.built_in import BUILT_IN
from paceline.core.config import select
from paceline.core.errors import ConfigError
from paceline.core.files import rename
from paceline.core.plugins import install_command, load
from paceline.runs.code_record import read_code
from paceline.runs.directory import RunDirectory
from paceline.runs.metric_writers import final_scalars, scalars

# --- The interface of a tracker ---


RUN_ID = "paceline.run_id"
"""The tag with the run's id."""

_NOT_TRACKED = select(lambda its: its.scope == "place")


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The description of a run for a tracker.

    Attributes:
        id: the run's id, from ``run.toml``.
        name: its directory's name.
        task: the task's name, as the user gave it.
        options: the resolved options; ``task.FIELD`` for the task's fields.
    """

    id: str
    name: str
    task: str
    directory: RunDirectory
    options: Mapping[str, Any]
    tags: Mapping[str, str]

    @classmethod
    def read(cls, directory: RunDirectory) -> RunInfo:
        """Read the description of a run from its ``run.toml``.

        Raises:
            RunDirectoryError: the directory contains no complete one.
        """
        manifest = directory.read_complete_manifest()
        fields = {f"task.{name}": value for name, value in manifest["task"]["fields"].items()}
        commit = {"paceline.commit": code["commit"]} if "commit" in (code := read_code(directory)) else {}
        return cls(
            id=manifest["id"],
            name=directory.path.resolve().name,
            task=manifest["task"]["spec"],
            directory=directory,
            options={**{n: v for n, v in manifest["config"].items() if n not in _NOT_TRACKED}, **fields},
            tags={RUN_ID: manifest["id"], "paceline.run": str(directory.path.absolute()), **commit},
        )


@runtime_checkable
class Tracker(Protocol):
    """One tracking service; all methods are called from one thread, and may raise anything.

    If it has an attribute ``url`` with the address of the run's page, the dashboard links to it.
    """

    def open(self, run: RunInfo, earlier: str | None) -> str:
        """Begin a run, or continue the ``earlier`` one; return the tracker's id of it."""

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Log the values of a step; ``at`` is Unix time."""

    def conclude(self, tags: Mapping[str, str], values: Mapping[str, float]) -> None:
        """Log the final tags and values of a finished run."""

    def close(self) -> None:
        """Send queued data; the run may continue later."""


# --- The writer thread ---
#
# A run is deterministic, so steps repeated after a fault give the values already sent, and are not sent twice.
# ``trackers/NAME.json`` records the progress and the tracker's id of the run. A tracker that fails is disabled after
# one warning, and gets the missing records if the run continues later; training never waits for it.


_log = logging.getLogger(__name__)
_MOST_WAITING = 10_000  # records
_CLOSE_S = 5.0  # while the run continues elsewhere, or is being stopped
_LAST_S = 1.0  # to record the piece being sent
_FINISH_S = 60.0
_CREDENTIALS = re.compile(r"//[^/@\s]+@")


def require(names: tuple[str, ...]) -> None:
    """Reject trackers whose library is not installed, and plug-ins that cannot be used, before anything starts.

    Raises:
        ConfigError: gives the command that installs the library, or what is wrong with the plug-in.
    """
    for name in names:
        load_tracker(name)
        if name in BUILT_IN["paceline.trackers"] and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"--log-to {name} needs {name}, which is not installed. Install it: {install_command(name)}, or "
                f"leave --log-to {name} out."
            )


def load_tracker(name: str) -> type[Tracker]:
    """Return the tracker's class for a value of ``--log-to``; its library is imported when the tracker is opened.

    Raises:
        ConfigError: there is none of this name, or it is a plug-in that cannot be used.
    """
    requirement = "a class with the methods of paceline.runs.trackers.Tracker"
    tracker: type[Tracker] = load("paceline.trackers", name, requirement, _is_tracker)
    return tracker


def _is_tracker(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, Tracker)


class TrackerWriter:
    """Sends a run's records to a tracker, in a thread that shields the training from one that fails or hangs.

    Args:
        name: the value of ``--log-to``.
        earlier: the run's records so far; those missing in the tracker are sent.
    """

    def __init__(self, name: str, tracker: Tracker, run: RunInfo, earlier: Sequence[Mapping[str, Any]] = ()) -> None:
        self._name = name
        self._tracker = tracker
        self._run = run
        self._earlier = earlier
        self._path = run.directory.path / "trackers" / f"{name}.json"
        self._waiting: queue.Queue[Mapping[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._result: Mapping[str, Any] | None = None
        self._lost = 0
        self._abandoned = self._has_warned = False
        self._sent: dict[str, int] = {}
        self._thread = threading.Thread(target=self._work, name=f"paceline-{name}", daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, Any]) -> None:
        """Queue a record; see :mod:`paceline.runs.monitor` for its keys."""
        if not self._thread.is_alive():
            return  # already reported
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._lost += 1

    def finish(self, result: Mapping[str, Any]) -> None:
        """Report the end of the run; ``result`` is the content of ``result.json``."""
        self._result = result

    def close(self) -> None:
        """Send queued records within a few seconds; a second call does nothing."""
        timeout_s = _FINISH_S if self._result is not None else _CLOSE_S
        if not self._thread.is_alive():
            return
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            self._abandoned = True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._abandoned = True
            self._warn(f"did not take all records within {timeout_s:.0f} s")
            self._thread.join(_LAST_S)
        elif self._lost:
            self._warn(f"was too slow for {self._lost} records")

    def _work(self) -> None:
        try:
            note = self._read_note()
            self._sent = dict(note.get("sent", {}))
            run_id = self._tracker.open(self._run, note.get("run"))
            self._save_progress(run_id)
            for record in itertools.chain(self._earlier, iter(self._waiting.get, None)):
                if self._abandoned:
                    break
                self._send(record, run_id)
            if self._result is not None:
                tags = {"paceline.model_sha256": str(self._result.get("model_sha256"))}
                newest = self._run.directory.checkpoints / "LATEST"
                if newest.exists():
                    tags["paceline.runs"] = str(newest.resolve())
                self._tracker.conclude(tags, dict(final_scalars(self._result.get("metrics", {}))))
            self._tracker.close()
        except Exception as error:  # a third-party library and a network can raise anything
            if not self._has_warned:
                self._warn(f"failed: {describe(error)}")

    def _send(self, record: Mapping[str, Any], run_id: str) -> None:
        """Send a record unless it was sent before."""
        stream = f"eval/{record['split']}" if record["kind"] == "eval" else "train"
        step = int(record["step"])
        if step > self._sent.get(stream, 0):
            self._tracker.log(step, float(record.get("time", time.time())), finite_scalars(record))
            self._sent[stream] = step
            self._save_progress(run_id)

    def _save_progress(self, run_id: str) -> None:
        # Without fsync, so that no step waits for the disk; after a power cut a record may be sent twice.
        self._path.parent.mkdir(exist_ok=True)
        temporary = self._path.with_name(f".{self._path.name}")
        url = getattr(self._tracker, "url", None)
        url = _CREDENTIALS.sub("//", url) if isinstance(url, str) else None
        temporary.write_text(json.dumps({"run": run_id, "url": url, "sent": self._sent}))
        rename(temporary, self._path)

    def _read_note(self) -> dict[str, Any]:
        try:
            note = json.loads(self._path.read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return note if isinstance(note, dict) else {}

    def _warn(self, what: str) -> None:
        self._has_warned = True
        rest = "" if self._result is not None else " Training continues; a later resume of the run sends the rest."
        _log.warning("--log-to %s %s. metrics.jsonl and TensorBoard have all records.%s", self._name, what, rest)


def describe(error: Exception) -> str:
    """Return the error's type and first line, without credentials."""
    return _CREDENTIALS.sub("//", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def finite_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return a record's numbers, by the names that trackers show, without NaN and infinity."""
    return {name: float(value) for name, value in scalars(record) if math.isfinite(value)}
