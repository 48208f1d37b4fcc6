"""MLflow: to where its own variables and defaults lead, such as ``MLFLOW_TRACKING_URI``."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paceline.monitoring.tracker import Tracked

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
            from mlflow.entities import Param
            from mlflow.tracking import MlflowClient
        self._client = MlflowClient()
        if earlier is not None:
            self._run = earlier
            self._client.update_run(earlier, status="RUNNING")
            return earlier
        tags = {**run.tags, "mlflow.source.name": run.task, "mlflow.source.type": "LOCAL"}
        created = self._client.create_run(self._experiment(run), tags=tags, run_name=run.name)
        self._run = str(created.info.run_id)
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
        given = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if given:
            return given
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.task.rpartition("/")[2]
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))


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
