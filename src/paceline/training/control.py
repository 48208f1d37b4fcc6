"""Control of the loop: requests that all ranks obey after a step, signals that ask to stop, and what is due."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from paceline.core.config import RunConfig
from paceline.core.errors import RESTART_EXIT_CODE, ConfigError
from paceline.core.options import BestMetric, Direction, Interval
from paceline.core.signals import ECHO_S, WORKER_STOP_SIGNALS, StopRequests, forwarded_signal
from paceline.runs.metric_writers import STATUS_WIDTH

if TYPE_CHECKING:
    from paceline.training.run_context import DataSetup
    from paceline.training.state import TrainProgress

# --- Control flags: they carry each rank's own decisions to all ranks ---
#
# A signal, the end of --walltime, a save that is due by the clock or the end of a stream is seen by one
# rank at its own time. Each puts it into its row of the step's reduction; after the step all ranks read
# the same rows, and obey alike.


class StopCause(IntEnum):
    """Why the ranks stop: a signal, by its number, or one of Paceline's own reasons, above all numbers of signals.

    If ranks have different causes, the highest counts.

    Attributes:
        description: for events and messages.
        exit_code: of the stopped run: 130 after Ctrl-C, else 75, "run me again".
    """

    NONE = 0
    SIGINT = signal.SIGINT
    SIGUSR1 = signal.SIGUSR1
    SIGTERM = signal.SIGTERM
    WALLTIME = 1000
    TRIAL_SCHEDULER = 1001
    """A search's scheduler ends this trial."""

    @property
    def description(self) -> str:
        return {StopCause.WALLTIME: "walltime", StopCause.TRIAL_SCHEDULER: "the search"}.get(self, self.name)

    @property
    def exit_code(self) -> int:
        return 130 if self is StopCause.SIGINT else RESTART_EXIT_CODE


@dataclass(frozen=True)
class ControlFlags:
    """The control flags of one rank, or the merged ones of all.

    Attributes:
        save: a save is due by the clock.
        has_next_batch: there is another step's data in this epoch (streams; else always true).
        reform: the ranks shall leave their group after this step, for another one.
        computed, recomputed: fingerprints of the gradient that is verified in this step: of the rank that has its
            micro-batch, and of another one; 0 elsewhere.
        impure: the purity guard found something that the ranks have to settle.
        samples_fingerprint: of some samples, as this rank reads them; 0 if it does not know. Merged: negative if two
            ranks have different ones.
        has_values: the losses of this rank's micro-batches gave values to record.
        microbatch_s, step_s: this rank's seconds for a micro-batch, and further ones for a step; 0 if not measured.
    """

    stop: StopCause = StopCause.NONE
    save: bool = False
    has_next_batch: bool = True
    reform: bool = False
    computed: int = 0
    recomputed: int = 0
    impure: bool = False
    samples_fingerprint: int = 0
    has_values: bool = False
    microbatch_s: float = 0.0
    step_s: float = 0.0

    def row(self, status: Sequence[float] | None = None) -> list[float]:
        """Return the rank's row, with its status if a record is due."""
        return [*map(float, vars(self).values()), *([0.0] * STATUS_WIDTH if status is None else status)]


_NAMES = [field.name for field in fields(ControlFlags)]
ROW_LENGTH = len(_NAMES) + STATUS_WIDTH
"""Numbers in a rank's row: the control flags, then its status."""


def merge(rows: Sequence[Sequence[float]]) -> ControlFlags:
    """Merge the control flags that all ranks obey; without any row, no flag is set."""
    if not rows:
        return ControlFlags()
    flags = [dict(zip(_NAMES, map(int, row), strict=False)) for row in rows]
    highest = {name: max(of_rank[name] for of_rank in flags) for name in _NAMES}
    fingerprints = {of_rank["samples_fingerprint"] for of_rank in flags} - {0}
    return ControlFlags(
        stop=StopCause(highest["stop"]),
        save=bool(highest["save"]),
        has_next_batch=bool(highest["has_next_batch"]),
        reform=bool(highest["reform"]),
        computed=highest["computed"],
        recomputed=highest["recomputed"],
        impure=bool(highest["impure"]),
        samples_fingerprint=-1 if len(fingerprints) > 1 else max(fingerprints, default=0),
        has_values=bool(highest["has_values"]),
    )


def statuses(rows: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """Return each rank's status."""
    return [row[len(_NAMES) : ROW_LENGTH] for row in rows]


def values_of(rows: Sequence[Sequence[float]], name: str) -> list[float]:
    """Return each rank's value of a control flag."""
    return [row[_NAMES.index(name)] for row in rows]


# --- The signals by which a worker is asked to stop ---


_END = b"\0"
_entered: list[StopSignals] = []


class StopSignals:
    """Turns SIGTERM, SIGUSR1 and SIGINT into a flag; Ctrl-C after another signal ends the process immediately.

    The end of its terminal (SIGHUP) counts as SIGTERM where no launcher hears it, and ``nohup`` has not been used.

    Python runs handlers in the main thread, and not while that is inside C++ (a long operation, a
    wait for a dead peer). So a thread of its own reads the signals' numbers from a pipe, and
    judges them. Outside the main thread signals cannot be handled, and none is.

    Args:
        launched: another process may pass on what a terminal sends to this one, too.

    Attributes:
        received: the first signal, or ``StopCause.NONE``.
    """

    def __init__(self, *, launched: bool = False) -> None:
        self.received = StopCause.NONE
        self._launched = launched
        self._requests = StopRequests(ECHO_S if launched else 0.0)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(self._pipe[1], False)
            self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            self._watcher = threading.Thread(target=self._watch, name="paceline-signals", daemon=True)
            self._watcher.start()
            hears_hangup = not self._launched and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
            for number in (*WORKER_STOP_SIGNALS, *([signal.SIGHUP] if hears_hangup else [])):
                self._before[number] = signal.signal(number, self._on_signal)
            _entered.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            _entered.remove(self)
            signal.set_wakeup_fd(self._wakeup_before)
            os.write(self._pipe[1], _END)
            self._watcher.join()
            for descriptor in self._pipe:
                os.close(descriptor)

    @property
    def handled(self) -> tuple[int, ...]:
        """The signals that it handles now."""
        return tuple(self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or StopCause(forwarded_signal(number))

    def _watch(self) -> None:
        while (content := os.read(self._pipe[0], 1)) != _END:
            if content[0] in self._before:
                if self._requests.hear(content[0]) == "end":
                    os._exit(128 + content[0])
                self.received = self.received or StopCause(forwarded_signal(content[0]))


def _let_go() -> None:
    """Reset the handlers in a forked child, whose signals must not reach its parent's pipe."""
    if _entered:
        signal.set_wakeup_fd(-1)
        for number in _entered[-1].handled:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_let_go)


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
