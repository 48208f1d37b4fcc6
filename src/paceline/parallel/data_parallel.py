"""Data parallelism: one process, DDP, and replicas that train apart between two averages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.parallel.microbatches import ReducerStrategy, ShardByShard
from paceline.parallel.reducer import StepSums
from paceline.parallel.reduction_tree import ReductionPlan
from paceline.parallel.strategy import StrategyOptions
from paceline.parallel.world import Mesh

# --- One process computes all shards ---


class Single(ReducerStrategy):
    """The strategy of a world of one.

    Raises:
        ConfigError: there are several processes.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, options: StrategyOptions) -> None:
        processes = mesh.world.world_size
        if processes != 1:
            raise ConfigError(f"--strategy single is for one process, but there are {processes}. Use ddp.")
        super().__init__(module, mesh, options)


# --- Distributed data parallel: every rank holds the model and computes its share of the shards ---


class DDP(ReducerStrategy):
    """Data parallelism with Paceline's reducer (``--reduction exact`` or ``fast``)."""


# --- Ranks that train apart for some steps (``--sync-every``): each sums its own shards' gradients only ---


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
