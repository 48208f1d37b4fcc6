"""Experiment trackers beside TensorBoard: MLflow and Weights & Biases, fed from a thread.

A run is a function, so steps that are done again after a fault give the values that were sent already: they
are not sent twice. What was sent is kept in ``trackers/NAME.json``, with the tracker's own name of the run. A
tracker that fails is left alone after one warning, and gets what it lacks when the run is continued; training
never waits for it.
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
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import ConfigError
from paceline.monitoring.tracker import Tracked, Tracker
from paceline.monitoring.writers import scalars

_log = logging.getLogger(__name__)
_MOST_WAITING = 10_000  # records
_CLOSE_S = 5.0  # while the run goes on elsewhere, or is being stopped
_LAST_S = 1.0  # for what is being sent to be noted as sent
_FINISH_S = 60.0
_CREDENTIALS = re.compile(r"//[^/@\s]+@")


def require(names: tuple[str, ...]) -> None:
    """Refuse trackers whose library is not installed, before anything is begun.

    Raises:
        ConfigError: names the command that installs it.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"--log-to {name}: it is not installed. Install it: pip install 'paceline[{name}]', or leave "
                f"--log-to {name} out."
            )


def make_tracker(name: str) -> Tracker:
    """The tracker that ``--log-to`` calls so; its library is imported when it is opened."""
    if name == "mlflow":
        from paceline.monitoring.mlflow_tracker import MlflowTracker

        return MlflowTracker()
    from paceline.monitoring.wandb_tracker import WandbTracker

    return WandbTracker()


class TrackerWriter:
    """Sends a run's records to a tracker.

    Args:
        name: what ``--log-to`` calls it.
        tracker: where to.
        run: what it is told.
        earlier: the run's records so far, of which those are sent that the tracker does not have.
    """

    def __init__(
        self, name: str, tracker: Tracker, run: Tracked, earlier: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self._name, self._tracker, self._run = name, tracker, run
        self._earlier = earlier
        self._path = run.directory.path / "trackers" / f"{name}.json"
        self._waiting: queue.Queue[Mapping[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._result: Mapping[str, Any] | None = None
        self._lost = 0
        self._abandoned = False
        self._told = False
        self._sent: dict[str, int] = {}
        self._thread = threading.Thread(target=self._work, name=f"paceline-{name}", daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, Any]) -> None:
        """Send a record, soon; see :mod:`paceline.monitoring.monitor` for its keys."""
        if not self._thread.is_alive():
            return  # it was said why
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._lost += 1

    def finish(self, result: Mapping[str, Any]) -> None:
        """The run has finished; ``result`` is what ``result.json`` holds."""
        self._result = result

    def close(self) -> None:
        """Send what waits, within a few seconds; a second call does nothing."""
        with_patience = _FINISH_S if self._result is not None else _CLOSE_S
        if not self._thread.is_alive():
            return
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            self._abandoned = True
        self._thread.join(with_patience)
        if self._thread.is_alive():
            self._abandoned = True
            self._warn(f"did not take all records within {with_patience:.0f} s; a resume sends the others")
            self._thread.join(_LAST_S)
        elif self._lost:
            self._warn(f"was too slow for {self._lost} records")

    def _work(self) -> None:
        try:
            note = self._read_note()
            self._sent = dict(note.get("sent", {}))
            there = self._tracker.open(self._run, note.get("run"))
            self._keep(there)
            for record in itertools.chain(self._earlier, iter(self._waiting.get, None)):
                if self._abandoned:
                    break
                if self._send(record):
                    self._keep(there)
            if self._result is not None:
                self._tracker.conclude(self._final_tags(self._result), _final_values(self._result))
            self._tracker.close()
        except Exception as error:  # a library of others, and a network
            if not self._told:
                self._warn(f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}")

    def _send(self, record: Mapping[str, Any]) -> bool:
        """Send a record, unless it was; whether it was sent now."""
        stream = f"eval/{record['split']}" if record["kind"] == "eval" else "train"
        step = int(record["step"])
        if step <= self._sent.get(stream, 0):
            return False
        values = {name: float(value) for name, value in scalars(record) if math.isfinite(value)}
        self._tracker.log(step, float(record.get("time", time.time())), values)
        self._sent[stream] = step
        return True

    def _keep(self, there: str) -> None:
        # Without a sync: after a power cut a record may be sent twice, and no step waits for the disk.
        self._path.parent.mkdir(exist_ok=True)
        temporary = self._path.with_name(f".{self._path.name}")
        temporary.write_text(json.dumps({"run": there, "sent": self._sent}))
        temporary.replace(self._path)

    def _read_note(self) -> dict[str, Any]:
        try:
            note = json.loads(self._path.read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return note if isinstance(note, dict) else {}

    def _final_tags(self, result: Mapping[str, Any]) -> dict[str, str]:
        tags = {"paceline.model_sha256": str(result.get("model_sha256"))}
        newest = self._run.directory.checkpoints / "LATEST"
        if newest.exists():
            tags["paceline.checkpoint"] = str(newest.resolve())
        return tags

    def _warn(self, what: str) -> None:
        self._told = True
        _log.warning(
            "--log-to %s %s. Training goes on; metrics.jsonl and TensorBoard have all records.",
            *(self._name, _CREDENTIALS.sub("//", what)),
        )


def _final_values(result: Mapping[str, Any]) -> dict[str, float]:
    return {
        f"final/{split}/{name}": float(value)
        for split, values in result.get("metrics", {}).items()
        for name, value in values.items()
        if value is not None
    }
