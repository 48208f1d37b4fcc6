"""MLflow: to where its own variables and defaults lead, such as ``MLFLOW_TRACKING_URI``."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.monitoring.tracker import RUN_ID, Tracked

if TYPE_CHECKING:
    from collections.abc import Iterator

_LONGEST = 500  # characters of a parameter, which all stores take
_MOST_AT_ONCE = 100  # parameters; MLflow's own limit
_TELEMETRY = "MLFLOW_DISABLE_TELEMETRY"


class MlflowTracker:
    """Through ``MlflowClient``, which names its run in each call: a script's own active run is left alone."""

    def __init__(self) -> None:
        self._client: Any = None
        self._run = ""
        self._finished = False

    def open(self, run: Tracked, earlier: str | None) -> str:
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

    def _experiment(self, run: Tracked) -> str:
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
    with tempfile.TemporaryDirectory(
        dir=place.parent, prefix=f".{place.name}-", ignore_cleanup_errors=True
    ) as folder:
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
