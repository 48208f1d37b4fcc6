"""A run's metrics for Prometheus, read from its directory whenever they are asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from paceline.core.plugins import import_library
from paceline.core.standard_streams import print_status
from paceline.runs.directory import RunDirectory, starts
from paceline.runs.timeline import timeline
from paceline_pages.dashboard import PageServer, read_or_create_token
from paceline_pages.metrics_options import MetricsOptions
from paceline_pages.run_index import read_beats
from paceline_pages.run_status import FOREIGN, last_records
from paceline_serving.static_assets import Asset

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from paceline.core.config import RunConfig

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_OF_RECORD = {
    "epoch": ("epoch", "Epoch of the last record, from 0."),
    "loss": ("loss", "Mean loss of the last recorded step."),
    "lr": ("learning_rate", "Learning rate of the first parameter group."),
    "samples_per_s": ("samples_per_second", "Samples per second of all processes, without evaluations."),
    "seconds": ("seconds", "Seconds of the run, over all starts."),
    "time": ("record_timestamp_seconds", "Unix time of the last record."),
}


class RunMetrics:
    """Collects the metrics of one run; Prometheus's library calls :meth:`collect`."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def collect(self) -> Iterable[Metric]:
        """Read the run's files, and leave out missing and damaged ones."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        gauges: dict[str, GaugeMetricFamily] = {}

        def add(name: str, help: str, value: object, /, **labels: str) -> None:
            if isinstance(value, int | float):
                if name not in gauges:
                    gauges[name] = GaugeMetricFamily(f"paceline_run_{name}", help, labels=(*labels,))
                gauges[name].add_metric((*labels.values(),), value)

        for read in (self._add_progress, self._add_history):
            try:
                read(add)
            except FOREIGN:
                continue
        yield from gauges.values()
        try:
            counts = starts(self._directory.read_events())
        except FOREIGN:
            return
        yield CounterMetricFamily("paceline_run_restarts", "Restarts of the run.", counts["restarts"])
        help = "Groups that formed after a fault, within a start."
        yield CounterMetricFamily("paceline_run_recoveries", help, counts["recoveries"])

    def _add_progress(self, add: Callable[..., None]) -> None:
        manifest = self._directory.read_complete_manifest()
        name = self._directory.path.resolve().name
        add("info", "The run; its value is 1.", 1, run=name, id=manifest["id"], task=str(manifest["task"]["spec"]))
        add("total_steps", "Steps of the whole run.", manifest.get("data", {}).get("total_steps"))
        records, beats = last_records(self._directory.metrics), read_beats(self._directory)
        add("processes", "Processes that have sent a heartbeat.", len(beats))
        steps = [record["step"] for record in records] + [beat.step for beat in beats]
        add("step", "Steps done.", max(steps, default=0))
        last: dict[str, Any] = next((record for record in reversed(records) if record["kind"] == "train"), {})
        for key, (name, help) in _OF_RECORD.items():
            add(name, help, last.get(key))
        evaluations = {record["split"]: record for record in records if record["kind"] == "eval"}
        for split, record in evaluations.items():
            for name, value in record["metrics"].items():
                add("evaluation", "The last evaluation.", value, split=split, name=name)

    def _add_history(self, add: Callable[..., None]) -> None:
        goodput = timeline(self._directory.read_events(), until=time.time()).goodput
        add("active_seconds", "Active time, over all starts.", goodput.active_s)
        add("goodput_ratio", "Share of the active time in steps that count.", goodput.share)
        for cause, seconds in goodput.lost_s.items():
            add("lost_seconds", "Active time that was lost, by cause.", seconds, cause=cause)
        for cause, number in goodput.interruptions.items():
            add("interruptions", "Interruptions, by cause.", number, cause=cause)


class RunMetricsServer(PageServer):
    """Serves a run's metrics next to its processes, while the context is open.

    Raises:
        ConfigError: the library is missing, the token file cannot be used, or the address is not available.
    """

    def __init__(self, config: RunConfig, directory: RunDirectory) -> None:
        options = config[MetricsOptions]
        import_library("prometheus_client", "--metrics-port", "pip install prometheus-client")
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(RunMetrics(directory))

        def find(path: str, query: dict[str, list[str]]) -> Asset | None:
            return Asset(_CONTENT_TYPE, generate_latest(registry), tag="") if path == "/metrics" else None

        file = options.metrics_token_file
        super().__init__(
            find,
            host=options.metrics_host,
            port=options.metrics_port or 0,
            token=None if file is None else read_or_create_token(Path(file)),
            prefix="metrics-",
        )

    def __enter__(self) -> Self:
        print_status(f"the run's metrics are at {self.url}metrics")
        return super().__enter__()
