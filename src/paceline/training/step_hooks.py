"""Additions of options to a step: the group context makes a hook for each that is set.

The hooks of --local-sgd-steps, --sdc-check-every and --purity have files of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import nn

from paceline.core.callback import BatchInfo
from paceline.data.samples import Loader, MicroBatch
from paceline.parallel.load_balancing import LoadBalancer
from paceline.parallel.reducer import StepSums
from paceline.parallel.strategy import Strategy
from paceline.training.control import ControlFlags
from paceline.training.evaluation import as_loss
from paceline.training.run_context import RunContext
from paceline.training.schedule import Schedule
from paceline.training.state import TrainingState, TrainProgress


class StepHook:
    """An option's addition to a synchronous step; each method does nothing unless it is overridden."""

    def before_microbatches(self, strategy: Strategy, microbatches: Sequence[MicroBatch]) -> None:
        """Run after the strategy's step has begun, before forward and backward."""

    def after_microbatches(self, strategy: Strategy, microbatches: Sequence[MicroBatch]) -> None:
        """Run after the last backward of this rank's micro-batches has run, or is enqueued."""

    def report(self, flags: ControlFlags) -> ControlFlags:
        """Change this rank's control flags, before they travel with the step's sums."""
        return flags

    def after_reduce(self, sums: StepSums) -> StepSums:
        """Change the step's sums, before they are used."""
        return sums

    def filter_request(self, flags: ControlFlags) -> ControlFlags:
        """Select the flags that the ranks obey after the step, from the control flags of all."""
        return flags


class StepOverlap(StepHook):
    """Reads one step ahead if a strategy can begin the next step within the current one (PipeDream).

    It decides where the ranks must finish a step before the next one begins: before an epoch's end, an evaluation, a
    save and the run's end, which follow from the progress alone, and in the step after one in which a rank set a
    control flag. So all ranks make the same decision.

    Args:
        save_is_due: returns whether a save is due at some progress.
    """

    def __init__(
        self, schedule: Schedule, loader: Loader, state: TrainingState, save_is_due: Callable[[TrainProgress], bool]
    ) -> None:
        self._schedule, self._loader, self._state, self._save_is_due = schedule, loader, state, save_is_due
        self._read: tuple[tuple[int, int], list[MicroBatch]] | None = None
        self._asked = False
        self._overlapping = False

    def fetch(self, epoch: int, step: int, microbatches: range) -> list[MicroBatch]:
        """Fetch as :meth:`Loader.fetch`, or return the micro-batches that were read ahead."""
        read, self._read = self._read, None
        if read is not None and read[0] == (epoch, step):
            return read[1]
        return self._loader.fetch(epoch, step, microbatches)

    def before_microbatches(self, strategy: Strategy, microbatches: Sequence[MicroBatch]) -> None:
        """Let the step overlap with the next one, unless an action is due between them."""
        progress, schedule = self._state.progress, self._schedule
        after = dataclasses.replace(
            progress,
            version=progress.version + 1,
            step=progress.step + 1,
            step_in_epoch=progress.step_in_epoch + 1,
        )
        self._overlapping = not (
            self._asked
            or schedule.finished(after)
            or schedule.epoch_ends(after)
            or schedule.evaluation_is_due(after)
            or self._save_is_due(after)
        )
        if self._overlapping:
            following = self._loader.fetch(after.epoch, after.step_in_epoch, strategy.microbatches)
            self._read = ((after.epoch, after.step_in_epoch), following)
            strategy.overlap_next(following)

    def filter_request(self, flags: ControlFlags) -> ControlFlags:
        """Return no flag while steps overlap: the next step then waits for all ranks, and returns them."""
        if not self._overlapping:
            self._asked = False
            return flags
        self._asked = bool(flags.stop or flags.save or flags.reform)
        return ControlFlags()


class SpeedMeasurement(StepHook):
    """Measures this rank's forwards and backwards for the load balancer."""

    def __init__(self, balancer: LoadBalancer) -> None:
        self._balancer = balancer

    def before_microbatches(self, strategy: Strategy, microbatches: Sequence[MicroBatch]) -> None:
        """Begin to measure."""
        self._balancer.begin()

    def after_microbatches(self, strategy: Strategy, microbatches: Sequence[MicroBatch]) -> None:
        """End, and count the micro-batches."""
        self._balancer.end(len(microbatches))


class DummyMicrobatch(StepHook):
    """Repeats a batch for the backwards of a rank with fewer micro-batches in a step than other ranks expect."""

    def __init__(self, run: RunContext, state: TrainingState) -> None:
        self._run, self._state = run, state
        self._batch: Any = None

    def after_microbatches(self, strategy: Strategy, microbatches: Sequence[MicroBatch]) -> None:
        """Keep a batch, and run the strategy's number of backwards with weight 0."""
        if microbatches:
            self._batch = microbatches[-1].batch
        for _ in range(strategy.num_dummy_steps):
            self._run_one(strategy)

    def _run_one(self, strategy: Strategy) -> None:
        run = self._run
        if self._batch is None:
            # With another loader, so that the run's own keeps its position in streams.
            with closing(run.build_loader()) as loader:
                first = loader.fetch(self._state.progress.epoch, 0, range(run.num_microbatches))
            if not first:
                return  # no rank has a batch; the reducer reports it
            self._batch = first[0].batch
        batch = self._batch

        def loss(model: nn.Module) -> torch.Tensor:
            run.task.on_batch_begin(BatchInfo(split="train", step=0, number=0, samples=0))
            with run.autocast():
                return as_loss(run.task, run.task.loss(model, batch), 1).sum

        strategy.run_dummy(loss)
