"""Experiment trackers: rows are sent to MLflow or Weights & Biases by a thread of their own."""

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


# --- What an experiment tracker is told of a run, and what it can be asked to do ---


RUN_ID = "paceline.run_id"
"""The tag that holds a run's own id."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a tracker is told of a run.

    Attributes:
        id: the run's own, from ``run.toml``.
        name: its directory's name.
        task: the task's name, as the user gave it.
        directory: where it is.
        options: what was resolved; ``task.FIELD`` for the task's fields.
        tags: what it can be found by.
    """

    id: str
    name: str
    task: str
    directory: RunDirectory
    options: Mapping[str, Any]
    tags: Mapping[str, str]


@runtime_checkable
class Tracker(Protocol):
    """One service; all methods are called from one thread, and may raise anything."""

    def open(self, run: RunInfo, earlier: str | None) -> str:
        """Begin a run, or go on with the one that an earlier call named; return its name there."""

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Add values of a step; ``at`` is Unix time."""

    def conclude(self, tags: Mapping[str, str], values: Mapping[str, float]) -> None:
        """The run has finished: its final tags and values."""

    def close(self) -> None:
        """Send what is left; the run may go on later."""


# --- MLflow: to where its own variables and defaults lead, such as ``MLFLOW_TRACKING_URI`` ---


_LONGEST = 500  # characters of a parameter, which all stores take
_MOST_AT_ONCE = 100  # parameters; MLflow's own limit
_TELEMETRY = "MLFLOW_DISABLE_TELEMETRY"


class MlflowTracker:
    """Through ``MlflowClient``, which names its run in each call: a script's own active run is left alone."""

    def __init__(self) -> None:
        self._client: Any = None
        self._run = ""
        self._finished = False

    def open(self, run: RunInfo, earlier: str | None) -> str:
        with _without_telemetry():
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
        # A process may have ended before it could note which run it had begun.
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

        given = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if given:
            return given
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.task.rpartition("/")[2]
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another run may have made it
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)


def _make_database(uri: str) -> None:
    """Make the file of an SQLite store aside, and put it in its place whole.

    MLflow makes the tables of a new one for seconds. A process that ends in between leaves a file that can
    never be opened again, and two that begin at once fail.
    """
    if not uri.startswith("sqlite:"):
        return
    from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
    from sqlalchemy.engine import make_url

    name = make_url(uri).database
    if not name or name.startswith((":", "file:")) or Path(name).exists():
        return
    place = Path(name).absolute()
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}-", ignore_cleanup_errors=True) as folder:
        whole = Path(folder) / place.name
        store = SqlAlchemyStore(  # type: ignore[no-untyped-call]
            f"sqlite:///{whole}", DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
        )
        store.engine.dispose()
        # Another was first, or there are no links here: then MLflow makes it in place.
        with suppress(OSError):
            os.link(whole, place)


@contextmanager
def _without_telemetry() -> Iterator[None]:
    """Import MLflow so that it reports to nobody, unless the user has said what it should do."""
    if _TELEMETRY in os.environ:
        yield
        return
    os.environ[_TELEMETRY] = "true"
    try:
        yield
    finally:
        del os.environ[_TELEMETRY]


# --- Weights & Biases: into the run's directory, offline, unless ``WANDB_MODE`` says otherwise ---


class WandbTracker:
    """One W&B run, with the id of ours: ``wandb sync RUN/wandb/offline-*`` puts its parts together."""

    def __init__(self) -> None:
        self._run: Any = None
        self._finished = False

    def open(self, run: RunInfo, earlier: str | None) -> str:
        import wandb

        there = earlier or run.id
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "paceline"),
            id=there,
            name=run.name,
            resume="allow",
            dir=run.directory.path,
            mode=_mode(),
            config={**run.options, **run.tags},
            reinit="create_new",
            # Neither the command line, nor the machine, nor what is printed leaves it.
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
        return there

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        self._run.log({**values, "time": at}, step=step)

    def conclude(self, tags: Mapping[str, str], values: Mapping[str, float]) -> None:
        self._run.summary.update({**tags, **values})
        self._finished = True

    def close(self) -> None:
        import wandb

        self._run.finish(exit_code=0 if self._finished else 1)
        wandb.teardown()  # else its helper process stays as long as this one


def _mode() -> Any:
    return os.environ.get("WANDB_MODE") or "offline"


# --- Experiment trackers beside TensorBoard: MLflow and Weights & Biases, fed from a thread ---
#
# A run is a function, so steps that are done again after a fault give the values that were sent already: they
# are not sent twice. What was sent is kept in ``trackers/NAME.json``, with the tracker's own name of the run.
# A tracker that fails is left alone after one warning, and gets what it lacks when the run is continued;
# training never waits for it.


_log = logging.getLogger(__name__)
_MOST_WAITING = 10_000  # records
_CLOSE_S = 5.0  # while the run goes on elsewhere, or is being stopped
_LAST_S = 1.0  # for what is being sent to be noted as sent
_FINISH_S = 60.0
_CREDENTIALS = re.compile(r"//[^/@\s]+@")


def require(names: tuple[str, ...]) -> None:
    """Refuse trackers whose library is not installed, and plug-ins that cannot be used, before anything is begun.

    Raises:
        ConfigError: names the command that installs the library, or what is wrong with the plug-in.
    """
    for name in names:
        if name not in BUILT_IN["paceline.trackers"]:
            load_tracker(name)
        elif importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"--log-to {name}: it is not installed. Install it: pip install 'paceline[{name}]', or leave "
                f"--log-to {name} out."
            )


def load_tracker(name: str) -> type[Tracker]:
    """The class of the tracker that ``--log-to`` calls so; the library of one of ours is imported when it is opened.

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
        name: what ``--log-to`` calls it.
        tracker: where to.
        run: what it is told.
        earlier: the run's records so far, of which those are sent that the tracker does not have.
    """

    def __init__(self, name: str, tracker: Tracker, run: RunInfo, earlier: Sequence[Mapping[str, Any]] = ()) -> None:
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
        """Send a record, soon; see :mod:`paceline.runs.monitor` for its keys."""
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
            tags["paceline.runs"] = str(newest.resolve())
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
