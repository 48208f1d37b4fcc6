"""What PipeDream computes, in one process: the same weights for the same shards, one after the other.

It is what a pipeline is checked against, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paceline.data.microbatch import MicroBatch
from paceline.distributed.mesh import Mesh
from paceline.distributed.reducer import StepSums
from paceline.strategies.base import ShardWork, StrategyOptions
from paceline.strategies.pipeline.pipedream.schedule import Staleness, begins, forwards_ahead
from paceline.strategies.pipeline.pipedream.weights import (
    At,
    assign_buffers,
    buffers_of,
    gradients_shared,
    stashed,
)
from paceline.strategies.pipeline.staged import Stage
from paceline.strategies.shard_by_shard import ReducerStrategy


class Reference(ReducerStrategy):
    """PipeDream in one process.

    Args:
        module: the model.
        mesh: of one rank.
        options: the strategy's.
        stages: the model's, as :func:`~paceline.strategies.pipeline.staged.cut` gives them.
    """

    overlaps_steps = True

    def __init__(
        self, module: nn.Module, mesh: Mesh, options: StrategyOptions, stages: Sequence[Stage]
    ) -> None:
        super().__init__(module, mesh, options)
        self._stages = stages
        self._ahead = [forwards_ahead(stage.number, len(stages)) for stage in stages]
        self._names = frozenset(name for stage in stages for name in stage.holds)
        self._begun = [0] * len(stages)  # of the step's forwards, by stage, within the step before
        self._following = 0
        self._old: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
        self._staleness = Staleness()

    @property
    def figures(self) -> Mapping[str, Any]:
        return self._staleness.figures

    def begin_step(self, present: Sequence[int]) -> None:
        super().begin_step(present)
        self._base = buffers_of(self.module)
        self._following = 0

    def go_on(self, following: Sequence[MicroBatch]) -> None:
        self._following = len(following)

    def compute(self, microbatches: Sequence[MicroBatch], work: ShardWork) -> None:
        for begun in self._begun:
            self._staleness.count(len(microbatches), begun)
        for position, microbatch in enumerate(microbatches):
            self._begin_shard()
            stale = [
                name
                for stage, begun in zip(self._stages, self._begun, strict=True)
                if position < begun
                for name in stage.holds
            ]
            weights, old_buffers = ({n: old[n] for n in stale if n in old} for old in self._old)
            buffers = buffers_of(self.module) | {name: value.clone() for name, value in old_buffers.items()}
            with gradients_shared(self.module, weights):
                loss = work.forward(At(self.module, weights | buffers), microbatch)
                self.backward(work.scaled(loss.sum))
            assign_buffers(self.module, buffers)
            self.reducer.end_shard(microbatch.num_samples, loss.weight, loss.sum, microbatch.checksum)
            work.done()

    def finish_step(self, row: Sequence[float]) -> StepSums:
        # The next step's first forwards come before this step's update, and before its buffers' mean.
        self._old = (stashed(self.module, self._names), self._base) if self._following else ({}, {})
        self._begun = [begins(ahead, self._following) for ahead in self._ahead]
        return super().finish_step(row)
