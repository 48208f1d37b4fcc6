"""Data parallelism: one process, DDP, and replicas that train apart between two averages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.parallel.microbatches import MicrobatchStrategy, ReducerStrategy
from paceline.parallel.reducer import StepSums
from paceline.parallel.reduction_tree import ReductionPlan
from paceline.parallel.strategy import StrategyOptions
from paceline.parallel.world import ParallelDims

# --- One process computes all micro-batches ---


class Single(ReducerStrategy):
    """The strategy of a world of one.

    Raises:
        ConfigError: there are several processes.
    """

    def __init__(self, module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> None:
        processes = mesh.world.world_size
        if processes != 1:
            raise ConfigError(f"--strategy single is for one process, but there are {processes}. Use ddp.")
        super().__init__(module, mesh, options)


# --- Distributed data parallel: every rank holds the model and computes its share of the micro-batches ---


class DDP(ReducerStrategy):
    """Data parallelism with Paceline's reducer (``--reduction exact`` or ``allreduce``)."""


# --- Ranks that train apart for some steps (``--local-sgd-steps``): each sums its own micro-batches' gradients only ---


class LocalSGDStrategy(MicrobatchStrategy):
    """A step of this rank alone, on the micro-batches that are its own.

    Stich, "Local SGD Converges Fast and Communicates Little", 2019. The gradient is summed along the tree
    over all micro-batches, of which the others' are absent. A rank without a micro-batch in a short batch steps with a
    gradient of zero.
    """

    def __init__(self, module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> None:
        num_microbatches = sum(options.work_split)
        alone = ReductionPlan(num_microbatches, 1)
        super().__init__(module, mesh.single_rank, alone, options, sums_gradients=True)
        self.microbatches = ReductionPlan(
            num_microbatches, mesh.data.world_size, work_split=options.work_split
        ).microbatches_of(mesh.data.rank)
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._present = 0

    def begin_step(self, present: Sequence[int]) -> None:
        self._present = len(present)
        super().begin_step(present)

    def reduce(self, row: Sequence[float]) -> StepSums:
        """This rank's sums; the others' rows come with the synchronisation."""
        if self._present:
            return replace(self.reducer.finish(row), rows=[])
        self.reducer.rollback()
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        return StepSums(samples=0, weight=0.0, loss=0.0, checksum=0, rows=[], bad_microbatch=None, finite=True)
