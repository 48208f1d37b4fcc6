"""The schedule of a run: evaluations, saves, synchronizations, deadlines, and the choice of the best model."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.core.options import BestMetric, Direction, Interval
from paceline.training.state import TrainProgress

if TYPE_CHECKING:
    from paceline.training.run_context import DataSetup

# --- When ranks that train apart come together: pure functions of where a run stands ---


@dataclass(frozen=True)
class SyncSchedule:
    """The intervals between synchronizations, after which all ranks hold the same state.

    An interval has ``every`` steps, but ends with its epoch and with the run, so that actions at an epoch's end need no
    further synchronization.

    Attributes:
        every: steps per interval; 1 if each step sums gradients.
        steps_per_epoch: None for streams, whose intervals are single steps.
        total_steps: of the run; None if it ends by epochs of a stream.
    """

    every: int
    steps_per_epoch: int | None
    total_steps: int | None

    def is_sync_step(self, progress: TrainProgress) -> bool:
        """Return whether the last step was the last of its interval.

        Args:
            progress: after that step, before or after the epoch's end was counted.
        """
        done = progress.step_in_epoch
        return done % self.every == 0 or done == self.steps_per_epoch or progress.step == self.total_steps

    def interval_start(self, progress: TrainProgress) -> int:
        """Return the step after which the interval began that ends at ``progress``."""
        done = progress.step_in_epoch or self.steps_per_epoch or 0
        return progress.step - (done % self.every or self.every)


# --- The end of ``--walltime``: when to stop so that the state is saved by then ---


_LEAST_S, _MOST_S, _SHARE = 5.0, 120.0, 0.02
_MARGIN = 2.0  # steps and saves vary; the step after a decision is still done, too
_RECENT = 16


class Deadline:
    """Measures steps and evaluations, and compares them with the time that is left.

    Only rank 0 uses it, once per step, because clocks differ; the control flags carry its decision to the others.

    Args:
        walltime_s: the seconds that the job may take; None for no end.
        started: when the job began, in seconds since the epoch: its launcher's clock, so that it is the
            same for all ranks, and for those that replace others.
    """

    def __init__(self, walltime_s: float | None, started: float) -> None:
        self._end = math.inf
        self._least_s = 0.0
        if walltime_s is not None:
            self._end = time.monotonic() + started + walltime_s - time.time()
            self._least_s = min(_MOST_S, max(_LEAST_S, _SHARE * walltime_s))
        self._steps_s: deque[float] = deque(maxlen=_RECENT)
        self._evaluation_s = 0.0

    @property
    def is_set(self) -> bool:
        """Whether there is one."""
        return self._end < math.inf

    def step_took(self, seconds: float) -> None:
        """Learn from a step."""
        self._steps_s.append(seconds)

    def evaluation_took(self, seconds: float) -> None:
        """Learn from an evaluation, whole or not."""
        self._evaluation_s = seconds

    def is_due(self, *, save_s: float, evaluates: bool) -> bool:
        """Return whether the time is too short for another step and the save after it.

        Args:
            save_s: how long a save takes.
            evaluates: an evaluation would come before the next such question.
        """
        step_s = max(self._steps_s, default=0.0)
        reserve_s = max(self._least_s, _MARGIN * (step_s + save_s))
        return time.monotonic() + reserve_s + evaluates * self._evaluation_s >= self._end


# --- Which evaluation is the best, and when to stop for want of a better one ---


class ModelSelector:
    """Applies ``--best-metric`` and ``--early-stop`` to validation metrics.

    Without ``--best-metric`` the lowest loss is the best. ``--early-stop`` without a direction takes that of
    ``--best-metric`` if both name the same metric; otherwise lower is better for names that end in "loss", higher for
    all others.
    """

    def __init__(self, config: RunConfig) -> None:
        self._metric, self._direction = config.evaluation.best_metric or BestMetric("loss", "min")
        self._early_metric: str | None = None
        self._patience = 0
        if config.evaluation.early_stop is not None:
            self._early_metric, given, self._patience = config.evaluation.early_stop
            by_name: Direction = "min" if self._early_metric.endswith("loss") else "max"
            self._early_direction = given or (self._direction if self._early_metric == self._metric else by_name)

    def value(self, metrics: Mapping[str, float]) -> float:
        """Return the value of the metric that decides the best model.

        Raises:
            ConfigError: the task has no such metric; names those it has.
        """
        return _lookup(metrics, self._metric, "--best-metric")

    def require(self, metrics: Mapping[str, float]) -> None:
        """Check that the metrics are there which the options name.

        Raises:
            ConfigError: one does not exist.
        """
        self.value(metrics)
        if self._early_metric is not None:
            _lookup(metrics, self._early_metric, "--early-stop")

    def apply(self, metrics: Mapping[str, float], progress: TrainProgress) -> bool:
        """Note an evaluation in ``progress``; return whether it is the best so far.

        Raises:
            ConfigError: a metric does not exist.
        """
        value = self.value(metrics)
        improved = _better(value, progress.best, self._direction)
        if improved:
            progress.best = value
            progress.best_step = progress.step
            progress.best_version = progress.version
            progress.best_metrics = dict(metrics)
        if self._early_metric is not None:
            early = _lookup(metrics, self._early_metric, "--early-stop")
            if _better(early, progress.early_best, self._early_direction):
                progress.early_best = early
                progress.bad_evaluations = 0
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


# --- When something is due: pure functions of where a run stands ---


class Schedule:
    """When a run's epochs, evaluations and the run itself end.

    Args:
        data: gives the run's length.

    Attributes:
        sync_schedule: evaluations happen at the ends of its intervals only.
    """

    def __init__(self, config: RunConfig, data: DataSetup) -> None:
        self.sync_schedule = SyncSchedule(config.changes.sync_every, data.steps_per_epoch, data.total_steps)
        self._epochs = config.training.epochs or 0
        self._evaluate_every = config.evaluation.eval_every
        self._total_steps = data.total_steps
        self._steps_per_epoch = data.steps_per_epoch

    def finished(self, progress: TrainProgress) -> bool:
        """Return whether no step is left."""
        if progress.stopped_early:
            return True
        total = self._total_steps
        return progress.step >= total if total is not None else progress.epoch >= self._epochs

    def epoch_ends(self, progress: TrainProgress) -> bool:
        """Return whether the last step was its epoch's last."""
        if progress.step_in_epoch == 0:
            return False
        steps = self._steps_per_epoch
        return progress.epoch_ended if steps is None else progress.step_in_epoch >= steps

    def evaluation_is_due(self, progress: TrainProgress) -> bool:
        """Return whether an evaluation is due now, once the epoch's end has been counted."""
        if progress.step == progress.evaluated_step:
            return False
        every = self._evaluate_every
        # A run may come from another strategy, in the middle of an interval.
        since = max(self.sync_schedule.interval_start(progress), progress.evaluated_step)
        return is_due(every, progress, since) or (self.finished(progress) and every != Interval())

    def evaluation_follows(self, progress: TrainProgress, *, has_next_batch: bool) -> bool:
        """Return whether an evaluation will be due after the current step.

        Args:
            progress: before that step.
            has_next_batch: there is another step's data in this epoch (streams).
        """
        after = dataclasses.replace(
            progress,
            step=progress.step + 1,
            step_in_epoch=progress.step_in_epoch + 1,
            epoch_ended=not has_next_batch,
        )
        if self.epoch_ends(after):
            after.epoch = after.epoch + 1
            after.step_in_epoch = 0
        return self.evaluation_is_due(after)


def is_due(every: Interval, progress: TrainProgress, since: int) -> bool:
    """Return whether an action with the interval ``every`` became due after step ``since``."""
    if every.steps is not None:
        return progress.step // every.steps > since // every.steps
    return every.epochs is not None and progress.step_in_epoch == 0 and progress.epoch % every.epochs == 0
