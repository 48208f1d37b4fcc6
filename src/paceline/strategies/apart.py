"""Ranks that train apart for some steps (``--sync-every``): each sums its own shards' gradients only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from paceline.distributed.mesh import Mesh
from paceline.distributed.reducer import StepSums
from paceline.distributed.tree import ReductionPlan
from paceline.strategies.base import StrategyOptions
from paceline.strategies.shard_by_shard import ShardByShard


class Apart(ShardByShard):
    """A step of this rank alone, on the shards that are its own.

    Stich, "Local SGD Converges Fast and Communicates Little", 2019. The gradient is summed along the tree
    over all shards, of which the others' are absent. A rank without a shard in a short batch steps with a
    gradient of zero.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, options: StrategyOptions) -> None:
        num_shards = sum(options.shares)
        alone = ReductionPlan(num_shards, 1)
        super().__init__(module, mesh.alone, alone, options, sums_gradients=True)
        self.shards = ReductionPlan(num_shards, mesh.data.world_size, shares=options.shares).shards_of(
            mesh.data.rank
        )
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._present = 0

    def begin_step(self, present: Sequence[int]) -> None:
        self._present = len(present)
        super().begin_step(present)

    def finish_step(self, row: Sequence[float]) -> StepSums:
        """This rank's sums; the others' rows come with the synchronisation."""
        if self._present:
            return replace(self.reducer.finish(row), rows=[])
        self.reducer.abandon()
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        return StepSums(samples=0, weight=0.0, loss=0.0, checksum=0, rows=[], bad_shard=None, finite=True)
