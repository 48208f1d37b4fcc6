"""The thread that sends a run's records to a tracker.

A run is deterministic, so steps repeated after a fault give the values already sent, and are not sent twice.
``trackers/NAME.json`` records the progress and the tracker's id of the run. A tracker that fails is disabled after
one warning, and gets the missing records if the run continues later; training never waits for it.
"""

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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.core.built_in import BUILT_IN
from paceline.core.errors import ConfigError
from paceline.core.files import rename
from paceline.core.plugins import install_command
from paceline.runs.directory import RunDirectory
from paceline.runs.metric_writers import Media, final_scalars, scalars
from paceline.runs.trackers import RunInfo, Tracker, load_tracker
from paceline_trackers.media import read_media

_log = logging.getLogger(__name__)
_MOST_WAITING = 10_000  # records
_CLOSE_S = 5.0  # while the run continues elsewhere, or is being stopped
_LAST_S = 1.0  # to record the piece being sent
_FINISH_S = 60.0
_CREDENTIALS = re.compile(r"//[^/@\s]+@")


def require_trackers(names: Iterable[str]) -> None:
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


def start_writers(
    names: Iterable[str], directory: RunDirectory, earlier: Sequence[Mapping[str, Any]]
) -> list[TrackerWriter]:
    """Start a writer for each tracker of ``--log-to``; the other arguments are those of :class:`TrackerWriter`."""
    run = RunInfo.read(directory)
    media = read_media(directory, max((record["step"] for record in earlier), default=-1))
    known: list[Mapping[str, Any] | Media] = [*earlier, *media]
    known.sort(key=lambda it: it.step if isinstance(it, Media) else it["step"])
    return [TrackerWriter(name, load_tracker(name)(), run, known) for name in dict.fromkeys(names)]


class TrackerWriter:
    """Sends a run's records to a tracker, in a thread that shields the training from one that fails or hangs.

    Args:
        name: the value of ``--log-to``.
        earlier: the run's records so far, and its images, texts and histograms; those missing in the tracker are sent.
    """

    def __init__(
        self, name: str, tracker: Tracker, run: RunInfo, earlier: Sequence[Mapping[str, Any] | Media] = ()
    ) -> None:
        self._name = name
        self._tracker = tracker
        self._run = run
        self._earlier = earlier
        self._path = run.directory.path / "trackers" / f"{name}.json"
        self._waiting: queue.Queue[Mapping[str, Any] | Media | None] = queue.Queue(_MOST_WAITING)
        self._result: Mapping[str, Any] | None = None
        self._lost = 0
        self._abandoned = False
        self._has_warned = False
        self._sent: dict[str, int] = {}
        self._thread = threading.Thread(target=self._work, name=f"paceline-{name}", daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, Any] | Media) -> None:
        """Queue a record, whose keys :mod:`paceline.runs.monitor` has, or an image, a text or a histogram."""
        if not self._thread.is_alive():
            return  # already reported
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._lost += 1

    write_media = write

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
                if isinstance(record, Media):
                    self._send_media(record, run_id)
                else:
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

    def _send_media(self, media: Media, run_id: str) -> None:
        """Send an image, a text or a histogram to a tracker that takes them, unless it was sent before."""
        log_media, stream = getattr(self._tracker, "log_media", None), f"media/{media.name}{media.path.suffix}"
        if log_media is not None and media.step > self._sent.get(stream, -1):
            log_media(media.step, time.time(), media)
            self._sent[stream] = media.step
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
