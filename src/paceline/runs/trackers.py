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
from paceline.runs.metrics import final_scalars, scalars
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
_MOST_AT_ONCE = 100  # parameters; MLflow's own limit
_TELEMETRY = "MLFLOW_DISABLE_TELEMETRY"
_PARENT = "mlflow.parentRunId"


class MlflowTracker:
    """Logs through ``MlflowClient``, which names its run in each call and leaves a script's active run alone."""

    def __init__(self) -> None:
        self._client: Any = None
        self._run = ""
        self._parent: str | None = None
        self._finished = False
        self.url: str | None = None

    def open(self, run: RunInfo, earlier: str | None) -> str:
        with disable_telemetry():
            import mlflow
            from mlflow.tracking import MlflowClient
        make_database(mlflow.get_tracking_uri())
        self._client = MlflowClient()
        if earlier is not None:
            self._run = earlier
            self._client.update_run(earlier, status="RUNNING")
            self._parent = self._client.get_run(earlier).data.tags.get(_PARENT)
            self.url = self._page(mlflow.get_tracking_uri(), self._client.get_run(earlier).info.experiment_id)
            return earlier
        experiment = self._experiment(run)
        tags = mlflow_tags(run.task, f"`{run.task}`, trained in `{run.directory.path.absolute()}`.") | dict(run.tags)
        if (search := search_of(run.directory)) is not None:
            self._parent = self._join_search(search, experiment, run.task)
            tags[_PARENT] = self._parent
        # An earlier process may have died between creating the run and recording its id.
        begun = self._client.search_runs([experiment], f"tags.`{RUN_ID}` = '{run.id}'", max_results=1)
        created = begun or [self._client.create_run(experiment, tags=tags, run_name=run.name)]
        self._run = str(created[0].info.run_id)
        log_mlflow_params(self._client, self._run, run.options)
        self.url = self._page(mlflow.get_tracking_uri(), experiment)
        return self._run

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        self._client.log_batch(self._run, metrics=mlflow_metrics(step, at, values), synchronous=True)

    def conclude(self, tags: Mapping[str, str], values: Mapping[str, float]) -> None:
        for name, text in tags.items():
            self._client.set_tag(self._run, name, text)
        for name, value in values.items():
            self._client.log_metric(self._run, mlflow_name(name), value)
        self._finished = True

    def close(self) -> None:
        self._client.set_terminated(self._run, "FINISHED" if self._finished else "KILLED")
        if self._parent is not None:
            self._client.set_terminated(self._parent)

    def _page(self, uri: str, experiment: str) -> str | None:
        """Return the address of the run's page; None for a store without a server."""
        is_server = uri.startswith(("http://", "https://"))
        return f"{uri.rstrip('/')}/#/experiments/{experiment}/runs/{self._run}" if is_server else None

    def _join_search(self, search: Path, experiment: str, task: str) -> str:
        """Return the id of the search's own run, of which trials are children; the first trial creates it."""
        note = _note_of_search(search)
        try:
            parent = str(json.loads(read_document(note))["run"])
            self._client.update_run(parent, status="RUNNING")
            return parent
        except FileNotFoundError:
            pass
        parent = create_mlflow_search(self._client, search, experiment, task)
        note.parent.mkdir(exist_ok=True)
        own = note.with_name(f".{note.name}-{parent}")
        own.write_text(json.dumps({"run": parent}))
        try:
            link(own, note)
        except FileExistsError:  # a trial that started at the same time was first
            self._client.delete_run(parent)
            return str(json.loads(read_document(note))["run"])
        finally:
            own.unlink(missing_ok=True)
        return parent

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


def create_mlflow_search(client: Any, search: Path, experiment: str, task: str, **started: Any) -> str:
    """Create the run of a search, with its settings as parameters, and return its id.

    Args:
        client: an ``MlflowClient``.
        search: the search's directory.
        experiment: the experiment's id.
        task: the task's name.
        started: ``start_time`` in ms.
    """
    try:
        settings = dict(json.loads(read_document(search / "tune.json")))
    except (OSError, ValueError, TypeError):
        settings = {}
    tags = mlflow_tags(task, f"A search of `{task}` in `{search}`; its trials are the child runs.")
    created = client.create_run(
        experiment, tags={**tags, "paceline.search": str(search)}, run_name=search.name, **started
    )
    run_id = str(created.info.run_id)
    settings.pop("options", None)
    log_mlflow_params(client, run_id, {n: v for n, v in settings.items() if v not in (None, {}, [], "")})
    return run_id


def log_mlflow_best(client: Any, run_id: str, result: Mapping[str, Any], at: float) -> None:
    """Log the best value of a search, and the trial that has it, in the search's own run.

    Args:
        client: an ``MlflowClient``.
        run_id: of the search's own run.
        result: the content of the search's ``result.json``.
        at: Unix time.
    """
    best, name = result.get("best"), str(result.get("metric", "")).partition(":")[0]
    if not isinstance(best, Mapping) or not isinstance(best.get(name), int | float):
        return
    trials = len(result.get("trials", ()))
    client.log_batch(run_id, metrics=mlflow_metrics(trials, at, {f"best/val/{name}": float(best[name])}))
    number = best.get("trial")
    name = f"{number:05d}" if isinstance(number, int) else str(number)
    client.set_tag(run_id, "paceline.best_trial", name[:_LONGEST])


def conclude_mlflow_search(search: Path, result: Mapping[str, Any]) -> str | None:
    """Log the best value of a search whose trials log to MLflow; return why that failed, or None.

    Args:
        search: the search's directory.
        result: the content of its ``result.json``.
    """
    try:
        run_id = str(json.loads(read_document(_note_of_search(search)))["run"])
    except FileNotFoundError:
        return None  # its trials do not log to MLflow
    except (OSError, ValueError, KeyError, TypeError) as error:
        return str(error)
    try:
        with disable_telemetry():
            from mlflow.tracking import MlflowClient
        client = MlflowClient()
        log_mlflow_best(client, run_id, result, time.time())
        client.set_terminated(run_id, "FINISHED" if result.get("done") else "KILLED")
    except Exception as error:  # a third-party library and a network can raise anything
        return _CREDENTIALS.sub("//", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    return None


def _note_of_search(search: Path) -> Path:
    """Return the file with the id of the search's own run."""
    return search / "trackers" / "mlflow.json"


def mlflow_tags(task: str, note: str) -> dict[str, str]:
    """Return the tags that MLflow's page shows as a run's source and description."""
    return {"mlflow.source.name": task, "mlflow.source.type": "LOCAL", "mlflow.note.content": note}


def log_mlflow_params(client: Any, run_id: str, options: Mapping[str, Any]) -> None:
    """Log options as parameters."""
    from mlflow.entities import Param

    params = (Param(mlflow_name(name), str(value)[:_LONGEST]) for name, value in options.items())
    while some := list(itertools.islice(params, _MOST_AT_ONCE)):
        client.log_batch(run_id, params=some)


def mlflow_metrics(step: int, at: float, values: Mapping[str, float]) -> list[Any]:
    """Return the values of a step as MLflow's metrics; ``at`` is Unix time."""
    from mlflow.entities import Metric

    return [Metric(mlflow_name(name), value, int(at * 1000), step) for name, value in values.items()]


_MLFLOW_MEANS = {"@": "_at_", "%": "_percent"}
_LONGEST_NAME = 250


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


def make_database(uri: str) -> None:
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
def disable_telemetry() -> Iterator[None]:
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
        self.url: str | None = None

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


def _mode() -> Any:
    return os.environ.get("WANDB_MODE") or "offline"


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
                if self._send(record):
                    self._save_progress(run_id)
            if self._result is not None:
                final = dict(final_scalars(self._result.get("metrics", {})))
                self._tracker.conclude(self._final_tags(self._result), final)
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
        self._tracker.log(step, float(record.get("time", time.time())), finite_scalars(record))
        self._sent[stream] = step
        return True

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

    def _final_tags(self, result: Mapping[str, Any]) -> dict[str, str]:
        tags = {"paceline.model_sha256": str(result.get("model_sha256"))}
        newest = self._run.directory.checkpoints / "LATEST"
        if newest.exists():
            tags["paceline.runs"] = str(newest.resolve())
        return tags

    def _warn(self, what: str) -> None:
        self._has_warned = True
        rest = "" if self._result is not None else " Training continues; a later resume of the run sends the rest."
        what = _CREDENTIALS.sub("//", what)
        _log.warning("--log-to %s %s. metrics.jsonl and TensorBoard have all records.%s", self._name, what, rest)


def finite_scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return a record's numbers, by the names that trackers show, without NaN and infinity."""
    return {name: float(value) for name, value in scalars(record) if math.isfinite(value)}
