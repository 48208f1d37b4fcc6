"""What Prometheus is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.serving.deployment import Deployment, Observer

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self, deployments: Callable[[], Mapping[str, Deployment]]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "paceline_requests", "Inference requests, by status.", ("model", "code"), registry=self._registry
        )
        self._counters: dict[tuple[str, int], Counter] = {}  # looking a label up costs more than counting
        self._latency = Histogram(
            *("paceline_request_seconds", "From a whole request to its answer."),
            labelnames=("model",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._batch_rows = Histogram(
            *("paceline_batch_rows", "Rows of a batch."),
            labelnames=("model",),
            buckets=_ROWS,
            registry=self._registry,
        )
        self._batch_seconds = Histogram(
            *("paceline_batch_seconds", "From a replica's being sent a batch to its answer."),
            labelnames=("model",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._restarts = Counter(
            "paceline_replica_restarts", "Replicas that died.", ("model",), registry=self._registry
        )
        self._swaps = Counter("paceline_swaps", "Packages exchanged.", ("model",), registry=self._registry)
        self._registry.register(_Gauges(deployments))

    def request(self, model: str, status: int, seconds: float) -> None:
        """Count an inference request; the time of those that were answered is kept."""
        counter = self._counters.get((model, status))
        if counter is None:
            counter = self._counters[model, status] = self._requests.labels(model, str(status))
        counter.inc()
        if status == 200:
            self._latency.labels(model).observe(seconds)

    def observer(self, model: str) -> Observer:
        """What a model's deployment tells."""
        rows_of_model = self._batch_rows.labels(model)
        seconds_of_model = self._batch_seconds.labels(model)

        def count(rows: int, seconds: float) -> None:
            rows_of_model.observe(rows)
            seconds_of_model.observe(seconds)

        return Observer(count, self._restarts.labels(model).inc)

    def swapped(self, model: str) -> None:
        """Count an exchange of packages."""
        self._swaps.labels(model).inc()

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self._registry)


class _Gauges(Collector):
    """What is looked up when somebody asks."""

    def __init__(self, deployments: Callable[[], Mapping[str, Deployment]]) -> None:
        self._deployments = deployments

    def collect(self) -> Iterable[Metric]:
        waiting = GaugeMetricFamily(
            "paceline_waiting_rows", "Rows that wait for a replica.", labels=("model",)
        )
        ready = GaugeMetricFamily("paceline_ready_replicas", "Replicas that are ready.", labels=("model",))
        for name, deployment in self._deployments().items():
            waiting.add_metric((name,), deployment.batcher.waiting_rows)
            ready.add_metric((name,), deployment.ready_replicas)
        return [waiting, ready]
