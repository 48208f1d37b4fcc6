"""Data parallelism by torch's own ``DistributedDataParallel`` (``--reduction torch``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.distributed.reducer import GradientReducer, StepSums
from paceline.distributed.tree import ReductionPlan
from paceline.distributed.world import World, lost_peers_reported
from paceline.errors import ConfigError
from paceline.strategies.base import StrategyOptions, compiled


class TorchDDP:
    """``DistributedDataParallel`` sums the gradients; the reducer sums buffers, losses and rows.

    Raises:
        ConfigError: there is only one process.
    """

    needs_backward = True

    def __init__(self, module: nn.Module, world: World, options: StrategyOptions) -> None:
        if world.world_size == 1:
            raise ConfigError("--reduction torch needs at least two processes; with one, leave it out.")
        plan = ReductionPlan(sum(options.shares), world.world_size, "fast", options.shares)
        self.module = module
        self.shards = plan.shards_of(world.rank)
        self._ddp = DistributedDataParallel(
            module,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            forward_sync_buffers=False,  # the reducer takes their mean
            gradient_as_bucket_view=True,
            static_graph=options.static_graph,
        )
        self.model: nn.Module = compiled(self._ddp) if options.compile else self._ddp
        self._world_size = world.world_size
        self._activity = world.activity
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._reducer = GradientReducer(
            module,
            plan,
            world,
            row_length=options.row_length,
            timeout_s=options.timeout_s,
            with_gradients=False,
        )
        self._left = 0

    def begin_step(self, present: Sequence[int]) -> None:
        self._left = len(present)
        for parameter in self._parameters:
            parameter.grad = None
        self._reducer.begin(present)

    def begin_shard(self) -> None:
        self._left -= 1
        # Gradients travel with the rank's last shard, as under DDP.no_sync().
        self._ddp.require_backward_grad_sync = self._left <= 0
        if self._left >= 0:
            self._reducer.begin_shard()

    def backward(self, loss: torch.Tensor) -> None:
        is_last = self._left <= 0
        if is_last:
            self._activity.enter("all-reduce")  # somewhere in it, DistributedDataParallel does
        with lost_peers_reported():
            loss.backward()  # type: ignore[no-untyped-call]
        if is_last:
            self._activity.leave()

    def end_shard(
        self, samples: int, weight: torch.Tensor | float, loss_sum: torch.Tensor, checksum: int
    ) -> None:
        self._reducer.end_shard(samples, weight, loss_sum, checksum)

    def finish_step(self, row: Sequence[float]) -> StepSums:
        sums = self._reducer.finish(row)
        if not sums.weight > 0:
            return sums
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        # DDP divides by the number of ranks; what is wanted is the sum over the summed weights.
        torch._foreach_mul_(gradients, self._world_size / sums.weight)
        finite = sums.finite and all(bool(torch.isfinite(gradient.sum())) for gradient in gradients)
        return sums if finite == sums.finite else StepSums(**{**vars(sums), "finite": finite})

    def abandon(self) -> None:
        self._reducer.abandon()

    def close(self) -> None:
        self._reducer.close()
