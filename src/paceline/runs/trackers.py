"""Experiment trackers: a thread sends the records to MLflow or Weights & Biases."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import logging
import math
import os
import posixpath
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

from paceline.core.built_in import BUILT_IN
from paceline.core.errors import ConfigError
from paceline.core.files import link, read_document, rename
from paceline.core.option_sets import select
from paceline.core.plugins import load
from paceline.runs.directory import RunDirectory
from paceline.runs.metric_writers import final_scalars, scalars
from paceline.runs.status import search_of

if TYPE_CHECKING:
    from collections.abc import Iterator


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
        return cls(
            id=manifest["id"],
            name=directory.path.resolve().name,
            task=manifest["task"]["spec"],
            directory=directory,
            options={**{n: v for n, v in manifest["config"].items() if n not in _NOT_TRACKED}, **fields},
            tags={RUN_ID: manifest["id"], "paceline.run": str(directory.path.absolute())},
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


# --- MLflow, configured by its own variables such as ``MLFLOW_TRACKING_URI`` ---


_LONGEST = 500  # characters of a parameter, which all stores take
_LONGEST_NAME = 250
_MOST_AT_ONCE = 100  # parameters; MLflow's own limit
_TELEMETRY = "MLFLOW_DISABLE_TELEMETRY"
_PARENT = "mlflow.parentRunId"
_MLFLOW_MEANS = {"@": "_at_", "%": "_percent"}


class MlflowStore:
    """Runs in MLflow, by ``MlflowClient``, which names the run in each call and leaves a script's active run alone."""

    def __init__(self, uri: str | None = None) -> None:
        with disable_telemetry():
            import mlflow
            from mlflow.tracking import MlflowClient
        self.uri = uri or mlflow.get_tracking_uri()
        _make_database(self.uri)
        self.client = MlflowClient(self.uri)

    def create_run(
        self, experiment: str, name: str, tags: Mapping[str, str], options: Mapping[str, Any], **started: Any
    ) -> str:
        """Create a run with its options as parameters, and return its id; ``start_time`` is in ms."""
        created = self.client.create_run(experiment, tags=dict(tags), run_name=name, **started)
        self.log_params(created.info.run_id, options)
        return str(created.info.run_id)

    def create_search(self, search: Path, experiment: str, task: str, **started: Any) -> str:
        """Create the run of a search, with its settings as parameters, and return its id."""
        try:
            settings = dict(json.loads(read_document(search / "tune.json")))
        except (OSError, ValueError, TypeError):
            settings = {}
        options = {n: v for n, v in settings.items() if n != "options" and v not in (None, {}, [], "")}
        tags = mlflow_tags(task, f"A search of `{task}` in `{search}`; its trials are the child runs.")
        return self.create_run(experiment, search.name, {**tags, "paceline.search": str(search)}, options, **started)

    def log_params(self, run_id: str, options: Mapping[str, Any]) -> None:
        """Log options as parameters."""
        from mlflow.entities import Param

        params = (Param(mlflow_name(name), str(value)[:_LONGEST]) for name, value in options.items())
        while some := list(itertools.islice(params, _MOST_AT_ONCE)):
            self.client.log_batch(run_id, params=some)

    def log_best(self, run_id: str, result: Mapping[str, Any], at: float) -> None:
        """Log the best value in a search's ``result.json``, and the trial that has it; ``at`` is Unix time."""
        best, name = result.get("best"), str(result.get("metric", "")).partition(":")[0]
        if not isinstance(best, Mapping) or not isinstance(best.get(name), int | float):
            return
        trials = len(result.get("trials", ()))
        self.client.log_batch(run_id, metrics=mlflow_metrics(trials, at, {f"best/val/{name}": float(best[name])}))
        number = best.get("trial")
        trial = f"{number:05d}" if isinstance(number, int) else str(number)
        self.client.set_tag(run_id, "paceline.best_trial", trial[:_LONGEST])


class MlflowTracker:
    """One MLflow run, a child of its search's if it is a trial."""

    def __init__(self) -> None:
        self._store: Any = None
        self._run = ""
        self._parent: str | None = None
        self._finished = False
        self.url: str | None = None

    def open(self, run: RunInfo, earlier: str | None) -> str:
        store = self._store = MlflowStore()
        if earlier is not None:
            self._run = earlier
            store.client.update_run(earlier, status="RUNNING")
            known = store.client.get_run(earlier)
            self._parent, experiment = known.data.tags.get(_PARENT), known.info.experiment_id
        else:
            experiment = self._experiment(run)
            note = f"`{run.task}`, trained in `{run.directory.path.absolute()}`."
            tags = mlflow_tags(run.task, note) | dict(run.tags)
            if (search := search_of(run.directory)) is not None:
                self._parent = tags[_PARENT] = self._join_search(search, experiment, run.task)
            # An earlier process may have died between creating the run and recording its id.
            begun = store.client.search_runs([experiment], f"tags.`{RUN_ID}` = '{run.id}'", max_results=1)
            if begun:
                self._run = str(begun[0].info.run_id)
                store.log_params(self._run, run.options)
            else:
                self._run = store.create_run(experiment, run.name, tags, run.options)
        if store.uri.startswith(("http://", "https://")):  # other stores have no pages
            self.url = f"{store.uri.rstrip('/')}/#/experiments/{experiment}/runs/{self._run}"
        return self._run

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        self._store.client.log_batch(self._run, metrics=mlflow_metrics(step, at, values), synchronous=True)

    def conclude(self, tags: Mapping[str, str], values: Mapping[str, float]) -> None:
        for name, text in tags.items():
            self._store.client.set_tag(self._run, name, text)
        for name, value in values.items():
            self._store.client.log_metric(self._run, mlflow_name(name), value)
        self._finished = True

    def close(self) -> None:
        self._store.client.set_terminated(self._run, "FINISHED" if self._finished else "KILLED")
        if self._parent is not None:
            self._store.client.set_terminated(self._parent)

    def _join_search(self, search: Path, experiment: str, task: str) -> str:
        """Return the id of the search's own run, of which trials are children; the first trial creates it."""
        if (parent := _run_of_search(search)) is not None:
            self._store.client.update_run(parent, status="RUNNING")
            return parent
        created: str = self._store.create_search(search, experiment, task)
        note = search / _SEARCH_NOTE
        note.parent.mkdir(exist_ok=True)
        own = note.with_name(f".{note.name}-{created}")
        own.write_text(json.dumps({"run": created}))
        try:
            link(own, note)
        except FileExistsError:  # a trial that started at the same time was first
            self._store.client.delete_run(created)
            return str(_run_of_search(search))
        finally:
            own.unlink(missing_ok=True)
        return created

    def _experiment(self, run: RunInfo) -> str:
        from mlflow.exceptions import MlflowException

        if configured := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return configured
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.task.rpartition("/")[2]
        found = self._store.client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._store.client.create_experiment(name))
            except MlflowException:  # another process may have created it
                found = self._store.client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)


_SEARCH_NOTE = Path("trackers") / "mlflow.json"


def _run_of_search(search: Path) -> str | None:
    """Return the id of the search's own run; None if no trial has created it."""
    try:
        return str(json.loads(read_document(search / _SEARCH_NOTE))["run"])
    except FileNotFoundError:
        return None


def conclude_mlflow_search(search: Path, result: Mapping[str, Any]) -> str | None:
    """Log the best value in the ``result.json`` of a search whose trials log to MLflow; return why that failed."""
    try:
        if (run_id := _run_of_search(search)) is not None:
            store = MlflowStore()
            store.log_best(run_id, result, time.time())
            store.client.set_terminated(run_id, "FINISHED" if result.get("done") else "KILLED")
    except Exception as error:  # a third-party library and a network can raise anything
        return _describe(error)
    return None


def mlflow_tags(task: str, note: str) -> dict[str, str]:
    """Return the tags that MLflow's page shows as a run's source and description."""
    return {"mlflow.source.name": task, "mlflow.source.type": "LOCAL", "mlflow.note.content": note}


def mlflow_metrics(step: int, at: float, values: Mapping[str, float]) -> list[Any]:
    """Return the values of a step as MLflow's metrics; ``at`` is Unix time."""
    from mlflow.entities import Metric

    return [Metric(mlflow_name(name), value, int(at * 1000), step) for name, value in values.items()]


def mlflow_name(name: str) -> str:
    """Return a name that MLflow takes, which refuses a whole record for one other: ``acc@5`` becomes ``acc_at_5``.

    Names that differ stay different: where a letter cannot be kept, digits that follow from the name are appended.
    """
    taken = "".join(_MLFLOW_MEANS.get(letter, letter) for letter in name)
    path = posixpath.normpath(re.sub(r"[^\w.\- :/]", "_", taken))
    if path != taken or path.startswith((".", "/")) or len(path) > _LONGEST_NAME:
        digits = hashlib.sha256(name.encode()).hexdigest()[:6]
        path = f"{path.lstrip('./')[: _LONGEST_NAME - len(digits) - 1]}_{digits}"
    return path


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
    prefix = f".{database.name}-"
    with tempfile.TemporaryDirectory(dir=database.parent, prefix=prefix, ignore_cleanup_errors=True) as folder:
        complete = Path(folder) / database.name
        uri = f"sqlite:///{complete}"
        SqlAlchemyStore(uri, DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH).engine.dispose()  # type: ignore[no-untyped-call]
        # Another process was first, or the file system has no links; then MLflow creates it in place.
        with suppress(OSError):
            os.link(complete, database)


@contextmanager
def disable_telemetry() -> Iterator[None]:
    """Import MLflow with telemetry disabled, unless the user has set its variable."""
    is_set = _TELEMETRY in os.environ
    os.environ.setdefault(_TELEMETRY, "true")
    try:
        yield
    finally:
        if not is_set:
            del os.environ[_TELEMETRY]


# --- Weights & Biases: in the run directory, offline unless ``WANDB_MODE`` is set ---


# Send neither the command line, nor details of the node, nor the output.
_WANDB_ON = ("silent", "disable_git", "disable_job_creation", "x_disable_meta", "x_disable_machine_info")
_WANDB_SETTINGS: Any = dict.fromkeys((*_WANDB_ON, "x_disable_stats"), True) | {"console": "off"}
_WANDB_SETTINGS |= dict.fromkeys(("save_code", "x_save_requirements"), False)


class WandbTracker:
    """One W&B run with the same id as this run; ``wandb sync RUN/wandb/offline-*`` joins its parts."""

    def __init__(self) -> None:
        self._run: Any = None
        self._finished = False
        self.url: str | None = None

    def open(self, run: RunInfo, earlier: str | None) -> str:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or "offline"
        run_id = earlier or run.id
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "paceline"),
            id=run_id,
            name=run.name,
            resume="allow",
            dir=run.directory.path,
            mode=mode,
            config={**run.options, **run.tags},
            reinit="create_new",
            settings=wandb.Settings(**_WANDB_SETTINGS),
        )
        self.url = self._run.url  # None while offline
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
        if name not in BUILT_IN["paceline.trackers"]:
            load_tracker(name)
        elif importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"--log-to {name} needs {name}, which is not installed. Install it: pip install 'paceline[{name}]', or "
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
        self._name, self._tracker, self._run, self._earlier = name, tracker, run, earlier
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
                self._warn(f"failed: {_describe(error)}")

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


def _describe(error: Exception) -> str:
    """Return the error's type and first line, without credentials."""
    return _CREDENTIALS.sub("//", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def finite_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return a record's numbers, by the names that trackers show, without NaN and infinity."""
    return {name: float(value) for name, value in scalars(record) if math.isfinite(value)}
