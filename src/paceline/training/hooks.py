"""Hooks, by which options and engines add to a run, and to the steps of one group of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.core.task import BatchInfo
from paceline.data.samples import MicroBatch
from paceline.parallel.reducer import StepSums
from paceline.parallel.strategy import Strategy
from paceline.parallel.world import World
from paceline.training.control import ControlFlags, StopCause
from paceline.training.evaluation import as_loss
from paceline.training.state import TrainingState

if TYPE_CHECKING:
    from paceline.training.group_context import GroupContext
    from paceline.training.run_context import RunContext
    from paceline.training.state_manager import StateManager
    from paceline.training.trainer import Trainer


class RunHook:
    """An option's addition to a run, one object in each process; each method does nothing unless it is overridden.

    A group of options names a subclass in :attr:`paceline.core.options.Changes.hooks`.

    Attributes:
        checks_samples: whether the loader reads some samples twice, for :attr:`paceline.data.samples.Loader.checked`.
    """

    checks_samples = False

    def __init__(self, run: RunContext) -> None:
        self.run = run

    def validate(self) -> None:
        """Reject a run with which the option does not work, before the run is created.

        Raises:
            ConfigError: names the option to change.
        """

    def step_hook(self, group: GroupContext, states: StateManager) -> StepHook | None:
        """Return the addition to the steps of a group, if there is one; all ranks call this together."""
        return None

    def check_state(self, group: GroupContext, state: TrainingState) -> None:
        """Check the state before it is evaluated or saved; all ranks call this together."""

    def watch_evaluation(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context for an evaluation of the model."""
        return nullcontext()

    def after_evaluation(self, trainer: Trainer, group: GroupContext) -> StopCause:
        """Follow up on an evaluation during training; return why to stop, the same on all ranks, or NONE."""
        return StopCause.NONE

    def results(self, world: World) -> Mapping[str, Any]:
        """Return entries of ``result.json``; all ranks call this together."""
        return {}

    def close(self) -> None:
        """Free what the hook holds, at the end of the training."""


class StepHook:
    """An addition to the synchronous steps of a group; each method does nothing unless it is overridden."""

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

    def on_step_end(self, step: int) -> None:
        """Run when so many steps of the run are done: after the commit, or what was due after it."""

    def close(self) -> None:
        """Free what the hook holds, when the rank leaves the group."""


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
