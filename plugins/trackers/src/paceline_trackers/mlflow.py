"""A run in MLflow, which is configured by its own variables such as ``MLFLOW_TRACKING_URI``."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import posixpath
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.core.files import link, read_document
from paceline.runs.metric_writers import Media
from paceline.runs.trackers import RUN_ID, RunInfo
from paceline_pages.run_status import read_object, search_of
from paceline_trackers.media import LoggedImage
from paceline_trackers.writer import describe

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
        settings = read_object(search / "tune.json")
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

    def log_media(self, step: int, at: float, media: Media) -> None:
        """Add an image to those of the run's page, and the file of a text or a histogram to its artifacts."""
        if isinstance(media, LoggedImage):
            from PIL import Image

            with Image.open(media.path) as image:
                name = mlflow_name(media.name)
                self._store.client.log_image(
                    self._run, image, key=name, step=step, timestamp=int(at * 1000), synchronous=True
                )
        else:
            self._store.client.log_artifact(self._run, str(media.path), f"media/{media.name}")

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
        if (found := self._store.client.get_experiment_by_name(name)) is None:
            try:
                return str(self._store.client.create_experiment(name))
            except MlflowException:  # another process may have created it
                if (found := self._store.client.get_experiment_by_name(name)) is None:
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
        return describe(error)
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
