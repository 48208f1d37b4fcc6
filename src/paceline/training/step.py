"""What one shard computes in a step, and what a rank does that has none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from torch import nn

from paceline.data.microbatch import MicroBatch
from paceline.errors import TaskError
from paceline.strategies.base import Strategy
from paceline.task import Loss
from paceline.training.evaluation import as_loss
from paceline.training.randomness import seed_shard
from paceline.training.run import Run


def shard_loss(run: Run, model: nn.Module, step: int, microbatch: MicroBatch) -> Loss:
    """A shard's forward, with the randomness of this step and shard.

    Raises:
        TaskError: the loss is none, or nothing can be learned from it.
    """
    seed_shard(run.config.seed, step, microbatch.shard)
    with run.autocast():
        loss = as_loss(run.task, run.task.loss(model, microbatch.batch), microbatch.num_samples)
    if not loss.sum.requires_grad:
        raise TaskError(
            f"{type(run.task).__name__}.loss does not depend on the model's parameters, so it has no "
            "gradient. Do not detach it, and do not turn it into a number."
        )
    return loss


class SpareBatch:
    """Data seen before, for the backward of a rank that has no shard in a step but is waited for."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._batch: Any = None

    def take_part(self, strategy: Strategy, microbatches: Sequence[MicroBatch], epoch: int) -> None:
        """Remember a batch; a rank without one runs a backward that weighs nothing."""
        if microbatches:
            self._batch = microbatches[-1].batch
            return
        run = self._run
        if self._batch is None:
            # Apart from the loader, whose streams must stay where they are.
            with closing(run.build_loader()) as loader:
                first = loader.fetch(epoch, 0, range(run.num_shards))
            if not first:
                return  # nor has anybody else; the reducer says so
            self._batch = first[0].batch
        strategy.begin_shard()
        with run.autocast():
            loss = as_loss(run.task, run.task.loss(strategy.model, self._batch), 1)
        strategy.backward(loss.sum * 0.0)
