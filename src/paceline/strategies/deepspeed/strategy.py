"""Data parallelism by DeepSpeed (ZeRO 1 to 3): its engine sums, shards and steps.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from paceline.distributed.mesh import Mesh
from paceline.distributed.reducer import StepSums
from paceline.distributed.tree import ReductionPlan
from paceline.distributed.world import lost_peers_reported
from paceline.strategies.base import StrategyOptions
from paceline.strategies.deepspeed.library import forget_world
from paceline.strategies.deepspeed.optimizer import optimizer_of
from paceline.strategies.shard_by_shard import SummedElsewhere


class DeepSpeed(SummedElsewhere):
    """DeepSpeed's engine runs forward and backward, and sums the gradients, each rank its part.

    Args:
        module: as :class:`~paceline.strategies.deepspeed.placement.Partitioned` placed it.
        mesh: the ranks.
        options: the strategy's.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, options: StrategyOptions) -> None:
        plan = ReductionPlan(sum(options.shares), mesh.world.world_size, "fast", options.shares)
        super().__init__(module, mesh, plan, options)
        self._world = mesh.world
        self._optimizer = optimizer_of(module)
        self.model = self._optimizer.engine

    def begin_step(self, present: Sequence[int]) -> None:
        self._optimizer.discard()
        super().begin_step(present)

    def _count_rounds(self, present: Sequence[int]) -> int:
        # Every backward, and in stage 3 every forward, is one of all ranks.
        rounds = super()._count_rounds(present)
        return int(max(of_rank[0] for of_rank in self._mesh.gather_rows([rounds])))

    def _begin_shard(self) -> None:
        super()._begin_shard()
        self.model.set_gradient_accumulation_boundary(self._rounds_left == 0)  # type: ignore[operator]

    def backward(self, loss: torch.Tensor) -> None:
        self._world.activity.enter("reduce-scatter")
        with lost_peers_reported():
            self.model.backward(loss, scale_wrt_gas=False)  # type: ignore[operator]
        self._world.activity.leave()

    def finish_step(self, row: Sequence[float]) -> StepSums:
        sums = self.reducer.finish(row)
        gradients = self._optimizer.gradients()
        if sums.weight > 0:
            # DeepSpeed divides by the number of ranks; what is wanted is the sum over the summed weights.
            torch._foreach_mul_(gradients, self._world.world_size / sums.weight)
            finite = sums.finite and all(bool(torch.isfinite(part.sum())) for part in gradients)
            sums = replace(sums, finite=finite)
        finite = all(told for (told,) in self._mesh.gather_rows([float(sums.finite)]))
        return replace(sums, finite=finite)

    def close(self) -> None:
        super().close()
        self.model.destroy()  # type: ignore[operator]
        forget_world()
        gc.collect()  # the engine refers to itself, and so to the process group, which must end first
