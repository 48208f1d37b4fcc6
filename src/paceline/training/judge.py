"""Which evaluation is the best, and when to stop for want of a better one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from paceline.config import RunConfig, parse_best, parse_early_stop
from paceline.errors import ConfigError
from paceline.training.state import Progress

Direction = Literal["min", "max"]


class Judge:
    """Applies ``--best`` and ``--early-stop`` to validation metrics.

    Without ``--best`` the lowest loss is the best. ``--early-stop`` takes the direction of
    ``--best`` where both name the same metric; else ``loss`` is to fall and all others to rise.
    """

    def __init__(self, config: RunConfig) -> None:
        best: tuple[str, Direction] = ("loss", "min") if config.best is None else parse_best(config.best)
        self._metric, self._direction = best
        self._early_metric: str | None = None
        self._patience = 0
        if config.early_stop is not None:
            self._early_metric, self._patience = parse_early_stop(config.early_stop)
            same = self._early_metric == self._metric
            self._early_direction: Direction = (
                self._direction if same else "min" if self._early_metric == "loss" else "max"
            )

    def value(self, metrics: Mapping[str, float]) -> float:
        """The metric that decides the best model.

        Raises:
            ConfigError: the task has no such metric; names those it has.
        """
        return _lookup(metrics, self._metric, "--best")

    def apply(self, metrics: Mapping[str, float], progress: Progress) -> bool:
        """Note an evaluation in ``progress``; return whether it is the best so far.

        Raises:
            ConfigError: a metric does not exist.
        """
        value = self.value(metrics)
        improved = _better(value, progress.best, self._direction)
        if improved:
            progress.best = value
            progress.best_step, progress.best_version = progress.step, progress.version
            progress.best_metrics = dict(metrics)
        if self._early_metric is not None:
            early = _lookup(metrics, self._early_metric, "--early-stop")
            if _better(early, progress.early_best, self._early_direction):
                progress.early_best, progress.bad_evaluations = early, 0
            else:
                progress.bad_evaluations += 1
                progress.stopped_early = progress.bad_evaluations >= self._patience
        return improved


def _better(value: float, best: float | None, direction: Direction) -> bool:
    if value != value:  # NaN is never the best
        return False
    return best is None or (value < best if direction == "min" else value > best)


def _lookup(metrics: Mapping[str, float], name: str, option: str) -> float:
    if name not in metrics:
        raise ConfigError(f"{option}: there is no metric {name!r}. The task evaluates: {', '.join(metrics)}.")
    return metrics[name]
