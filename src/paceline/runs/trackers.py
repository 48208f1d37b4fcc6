"""Experiment trackers: a thread sends the records to MLflow or Weights & Biases."""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import math
import os
import queue
import re
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from paceline.core.errors import ConfigError
from paceline.core.plugins import BUILT_IN, load
from paceline.runs.directory import RunDirectory
from paceline.runs.metrics import scalars

if TYPE_CHECKING:
    from collections.abc import Iterator


# --- The interface of a tracker ---


RUN_ID = "paceline.run_id"
"""The tag with the run's id."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The description of a run for a tracker.

    Attributes:
        id: the run's id, from ``run.toml``.
        name: its directory's name.
        task: the task's name, as the user gave it.
        directory: the run directory.
        options: the resolved options; ``task.FIELD`` for the task's fields.
        tags: search tags.
    """

    id: str
    name: str
    task: str
    directory: RunDirectory
    options: Mapping[str, Any]
    tags: Mapping[str, str]


@runtime_checkable
class Tracker(Protocol):
    """One tracking service; all methods are called from one thread, and may raise anything."""

    def open(self, run: RunInfo, earlier: str | None) -> str:
        """Begin a run, or continue the ``earlier`` one; return the tracker's id of it."""

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Log the values of a step; ``at`` is Unix time."""

    def conclude(self, tags: Mapping[str, str], values: Mapping[str, float]) -> None:
        """Log the final tags and values of a finished run."""

    def close(self) -> None:
        """Send queued data; the run may continue later."""


# --- MLflow, configured by its own variables such as ``MLFLOW_TRACKING_URI`` ---


_LONGEST = 500  # characters of a parameter, which all stores take
_MOST_AT_ONCE = 100  # parameters; MLflow's own limit
_TELEMETRY = "MLFLOW_DISABLE_TELEMETRY"


class MlflowTracker:
    """Logs through ``MlflowClient``, which names its run in each call and leaves a script's active run alone."""

    def __init__(self) -> None:
        self._client: Any = None
        self._run = ""
        self._finished = False

    def open(self, run: RunInfo, earlier: str | None) -> str:
        with _disable_telemetry():
            import mlflow
            from mlflow.entities import Param
            from mlflow.tracking import MlflowClient
        _make_database(mlflow.get_tracking_uri())
        self._client = MlflowClient()
        if earlier is not None:
            self._run = earlier
            self._client.update_run(earlier, status="RUNNING")
            return earlier
        tags = {**run.tags, "mlflow.source.name": run.task, "mlflow.source.type": "LOCAL"}
        experiment = self._experiment(run)
        # An earlier process may have died between creating the run and recording its id.
        begun = self._client.search_runs([experiment], f"tags.`{RUN_ID}` = '{run.id}'", max_results=1)
        created = begun or [self._client.create_run(experiment, tags=tags, run_name=run.name)]
        self._run = str(created[0].info.run_id)
        params = (Param(name, str(value)[:_LONGEST]) for name, value in run.options.items())
        while some := list(itertools.islice(params, _MOST_AT_ONCE)):
            self._client.log_batch(self._run, params=some)
        return self._run

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(name, value, int(at * 1000), step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics, synchronous=True)

    def conclude(self, tags: Mapping[str, str], values: Mapping[str, float]) -> None:
        for name, text in tags.items():
            self._client.set_tag(self._run, name, text)
        for name, value in values.items():
            self._client.log_metric(self._run, name, value)
        self._finished = True

    def close(self) -> None:
        self._client.set_terminated(self._run, "FINISHED" if self._finished else "KILLED")

    def _experiment(self, run: RunInfo) -> str:
        from mlflow.exceptions import MlflowException

        configured = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if configured:
            return configured
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.task.rpartition("/")[2]
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another process may have created it
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)


def _make_database(uri: str) -> None:
    """Create a new SQLite store atomically.

    MLflow takes seconds to create the tables. A process that dies meanwhile leaves an unusable file, and two that start
    at once fail.
    """
    if not uri.startswith("sqlite:"):
        return
    from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    from sqlalchemy.engine import make_url

    name = make_url(uri).database
    if not name or name.startswith((":", "file:")) or Path(name).exists():
        return
    database = Path(name).absolute()
    database.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=database.parent, prefix=f".{database.name}-", ignore_cleanup_errors=True
    ) as folder:
        complete = Path(folder) / database.name
        store = SqlAlchemyStore(  # type: ignore[no-untyped-call]
            f"sqlite:///{complete}", DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
        )
        store.engine.dispose()
        # Another process was first, or the file system has no links; then MLflow creates it in place.
        with suppress(OSError):
            os.link(complete, database)


@contextmanager
def _disable_telemetry() -> Iterator[None]:
    """Import MLflow with telemetry disabled, unless the user has set its variable."""
    if _TELEMETRY in os.environ:
        yield
        return
    os.environ[_TELEMETRY] = "true"
    try:
        yield
    finally:
        del os.environ[_TELEMETRY]


# --- Weights & Biases: in the run directory, offline unless ``WANDB_MODE`` is set ---


class WandbTracker:
    """One W&B run with the same id as this run; ``wandb sync RUN/wandb/offline-*`` joins its parts."""

    def __init__(self) -> None:
        self._run: Any = None
        self._finished = False

    def open(self, run: RunInfo, earlier: str | None) -> str:
        import wandb

        run_id = earlier or run.id
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "paceline"),
            id=run_id,
            name=run.name,
            resume="allow",
            dir=run.directory.path,
            mode=_mode(),
            config={**run.options, **run.tags},
            reinit="create_new",
            # Send neither the command line, nor details of the node, nor the output.
            settings=wandb.Settings(
                console="off",
                silent=True,
                save_code=False,
                disable_git=True,
                disable_job_creation=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        return run_id

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        self._run.log({**values, "time": at}, step=step)

    def conclude(self, tags: Mapping[str, str], values: Mapping[str, float]) -> None:
        self._run.summary.update({**tags, **values})
        self._finished = True

    def close(self) -> None:
        import wandb

        self._run.finish(exit_code=0 if self._finished else 1)
        wandb.teardown()  # otherwise its helper process stays as long as this one


def _mode() -> Any:
    return os.environ.get("WANDB_MODE") or "offline"


# --- The writer thread ---
#
# A run is deterministic, so steps repeated after a fault give the values already sent, and are not sent twice.
# ``trackers/NAME.json`` records the progress and the tracker's id of the run. A tracker that fails is disabled after
# one warning, and gets the missing records when the run resumes; training never waits for it.


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
        if name not in BUILT_IN["paceline.trackers"]:
            load_tracker(name)
        elif importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"--log-to {name} needs {name}, which is not installed. Install it: pip install "
                f"'paceline[{name}]', or leave "
                f"--log-to {name} out."
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
    """Sends a run's records to a tracker.

    Args:
        name: the value of ``--log-to``.
        tracker: the tracker.
        run: the description of the run.
        earlier: the run's records so far; those missing in the tracker are sent.
    """

    def __init__(self, name: str, tracker: Tracker, run: RunInfo, earlier: Sequence[Mapping[str, Any]] = ()) -> None:
        self._name, self._tracker, self._run = name, tracker, run
        self._earlier = earlier
        self._path = run.directory.path / "trackers" / f"{name}.json"
        self._waiting: queue.Queue[Mapping[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._result: Mapping[str, Any] | None = None
        self._lost = 0
        self._abandoned = False
        self._has_warned = False
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
            self._warn(f"did not take all records within {timeout_s:.0f} s; resuming the run sends the rest")
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
                if self._send(record):
                    self._save_progress(run_id)
            if self._result is not None:
                self._tracker.conclude(self._final_tags(self._result), _final_values(self._result))
            self._tracker.close()
        except Exception as error:  # a third-party library and a network can raise anything
            if not self._has_warned:
                self._warn(f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}")

    def _send(self, record: Mapping[str, Any]) -> bool:
        """Send a record unless it was sent before; return whether it was sent now."""
        stream = f"eval/{record['split']}" if record["kind"] == "eval" else "train"
        step = int(record["step"])
        if step <= self._sent.get(stream, 0):
            return False
        values = {name: float(value) for name, value in scalars(record) if math.isfinite(value)}
        self._tracker.log(step, float(record.get("time", time.time())), values)
        self._sent[stream] = step
        return True

    def _save_progress(self, run_id: str) -> None:
        # Without fsync, so that no step waits for the disk; after a power cut a record may be sent twice.
        self._path.parent.mkdir(exist_ok=True)
        temporary = self._path.with_name(f".{self._path.name}")
        temporary.write_text(json.dumps({"run": run_id, "sent": self._sent}))
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
            tags["paceline.runs"] = str(newest.resolve())
        return tags

    def _warn(self, what: str) -> None:
        self._has_warned = True
        _log.warning(
            "--log-to %s %s. Training continues; metrics.jsonl and TensorBoard have all records.",
            *(self._name, _CREDENTIALS.sub("//", what)),
        )


def _final_values(result: Mapping[str, Any]) -> dict[str, float]:
    return {
        f"final/{split}/{name}": float(value)
        for split, values in result.get("metrics", {}).items()
        for name, value in values.items()
        if value is not None
    }
