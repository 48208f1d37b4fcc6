"""Single-process training, DDP with Paceline's reducer, and Local SGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
            raise ConfigError(f"--strategy single needs one process, but there are {processes}. Use ddp.")
        super().__init__(module, mesh, options)


# --- Distributed data parallel: every rank holds the model and computes a part of the micro-batches ---


class DDP(ReducerStrategy):
    """Data parallelism with Paceline's reducer (``--reduction exact`` or ``allreduce``)."""


# --- Local SGD (``--local-sgd-steps``): each rank sums the gradients of its own micro-batches only ---


class LocalSGDStrategy(MicrobatchStrategy):
    """Steps this rank alone, on its own micro-batches.

    Stich, "Local SGD Converges Fast and Communicates Little", 2019. The gradient is summed along the tree over all
    micro-batches, with those of other ranks absent. A rank without a micro-batch in a short batch has no gradient.
    """

    def __init__(self, module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> None:
        num_microbatches = sum(options.work_split)
        plan = ReductionPlan(num_microbatches, 1)
        super().__init__(module, mesh.single_rank, plan, options, sums_gradients=True)
        self.microbatches = ReductionPlan(
            num_microbatches, mesh.data.world_size, work_split=options.work_split
        ).microbatches_of(mesh.data.rank)
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._present = 0

    def begin_step(self, present: Sequence[int]) -> None:
        self._present = len(present)
        super().begin_step(present)

    def reduce(self, row: Sequence[float]) -> StepSums:
        """Return this rank's sums; other ranks' rows come with the synchronisation."""
        if self._present:
            return replace(self.reducer.finish(row), rows=[])
        self.reducer.rollback()
        for parameter in self._parameters:
            parameter.grad = None
        return StepSums(samples=0, weight=0.0, loss=0.0, checksum=0, rows=[], bad_microbatch=None, finite=True)
