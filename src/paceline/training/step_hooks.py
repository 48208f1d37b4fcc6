"""Additions of options to a step: the group context makes a hook for each that is set.

The hooks of --sdc-check-every and --purity have files of their own; an engine brings its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch
from torch import nn

from paceline.core.task import BatchInfo
from paceline.data.samples import MicroBatch
from paceline.parallel.load_balancing import LoadBalancer
from paceline.parallel.reducer import StepSums
from paceline.parallel.strategy import Strategy
from paceline.training.control import ControlFlags
from paceline.training.evaluation import as_loss
from paceline.training.run_context import RunContext
from paceline.training.state import TrainingState


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
        self._run = run
        self._state = state
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
