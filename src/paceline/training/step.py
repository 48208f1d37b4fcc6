"""What one shard computes in a step, and what a rank does that has none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch
from torch import nn

from paceline.callback import BatchPlace
from paceline.data.microbatch import MicroBatch
from paceline.distributed.activity import Activity
from paceline.errors import TaskError
from paceline.monitoring.phases import PhaseTimer
from paceline.strategies.base import Strategy
from paceline.task import Loss
from paceline.training.evaluation import as_loss
from paceline.training.randomness import seed_shard
from paceline.training.run import Run
from paceline.training.state import TrainingState


def shard_loss(run: Run, model: nn.Module, step: int, microbatch: MicroBatch) -> Loss:
    """A shard's forward, with the randomness of this step and shard.

    Raises:
        TaskError: the loss is none, or nothing can be learned from it.
    """
    seed_shard(run.config.seed, step, microbatch.shard)
    return _loss(run, model, step, microbatch)


def _loss(run: Run, model: nn.Module, step: int, microbatch: MicroBatch) -> Loss:
    run.task.begin_batch(
        BatchPlace(split="train", step=step, number=microbatch.shard, samples=microbatch.num_samples)
    )
    with run.autocast():
        loss = as_loss(run.task, run.task.loss(model, microbatch.batch), microbatch.num_samples)
    if not loss.sum.requires_grad:
        raise TaskError(
            f"{type(run.task).__name__}.loss does not depend on the model's parameters, so it has no "
            "gradient. Do not detach it, and do not turn it into a number."
        )
    return loss


class StepWork:
    """What a rank does for each of its shards in the steps of one world.

    Args:
        run: what is trained.
        state: whose model computes, and whose scaler scales.
        activity: told of what is done.
        timer: of the phases.
    """

    def __init__(self, run: Run, state: TrainingState, activity: Activity, timer: PhaseTimer) -> None:
        self._run, self._state, self._activity, self._timer = run, state, activity, timer

    def forward(self, model: nn.Module, microbatch: MicroBatch, *, ahead: int = 0) -> Loss:
        """The shard's loss; backward comes next."""
        self._activity.move("forward")
        try:
            return shard_loss(self._run, model, self._state.progress.step + ahead, microbatch)
        finally:  # a stage of a pipeline leaves the loss in its middle
            self._timer.mark("forward")
            self._activity.move("backward")

    def forward_unseeded(self, model: nn.Module, microbatch: MicroBatch) -> Loss:
        """The shard's loss with whatever randomness there is; several threads may call this at once."""
        return _loss(self._run, model, self._state.progress.step, microbatch)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as backward gets it."""
        return self._state.scaled(loss)

    def done(self) -> None:
        """The shard's backward has been run, or enqueued."""
        self._timer.mark("backward")


class SpareBatch:
    """Data seen before, for the backwards of a rank that has fewer shards in a step than others wait for."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._batch: Any = None

    def take_part(self, strategy: Strategy, microbatches: Sequence[MicroBatch], epoch: int) -> None:
        """Remember a batch, and run as many backwards that weigh nothing as the strategy asks for."""
        if microbatches:
            self._batch = microbatches[-1].batch
        for _ in range(strategy.spare_rounds):
            self._run_one(strategy, epoch)

    def _run_one(self, strategy: Strategy, epoch: int) -> None:
        run = self._run
        if self._batch is None:
            # Apart from the loader, whose streams must stay where they are.
            with closing(run.build_loader()) as loader:
                first = loader.fetch(epoch, 0, range(run.num_shards))
            if not first:
                return  # nor has anybody else; the reducer says so
            self._batch = first[0].batch
        batch = self._batch

        def loss(model: nn.Module) -> torch.Tensor:
            run.task.begin_batch(BatchPlace(split="train", step=0, number=0, samples=0))
            with run.autocast():
                return as_loss(run.task, run.task.loss(model, batch), 1).sum

        strategy.spare_round(loss)
