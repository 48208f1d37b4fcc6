"""Data parallelism by torch's own ``DistributedDataParallel`` (``--reduction torch``, ``--comm-hook``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.distributed.mesh import Mesh
from paceline.distributed.tree import ReductionPlan
from paceline.distributed.world import lost_peers_reported
from paceline.errors import ConfigError
from paceline.strategies.base import StrategyOptions
from paceline.strategies.comm_hooks import register
from paceline.strategies.shard_by_shard import SummedElsewhere, compiled

if TYPE_CHECKING:
    from paceline.strategies.powersgd import PowerSGD


class TorchDDP(SummedElsewhere):
    """``DistributedDataParallel`` sums the gradients while the backward of a rank's last shard runs.

    Args:
        module, mesh, options: as for every strategy.
        hook: how gradients are compressed; "none": not at all.
        powersgd_rank: columns of PowerSGD's matrices.

    Attributes:
        powersgd: the hook with a memory, if that is the one.

    Raises:
        ConfigError: there is only one process.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        options: StrategyOptions,
        hook: str = "none",
        powersgd_rank: int = 1,
    ) -> None:
        world = mesh.world
        if world.world_size == 1:
            option = "--reduction torch" if hook == "none" else f"--comm-hook {hook}"
            raise ConfigError(f"{option} needs at least two processes; with one, leave it out.")
        plan = ReductionPlan(sum(options.shares), world.world_size, "fast", options.shares)
        super().__init__(module, mesh, plan, options)
        self._ddp = DistributedDataParallel(
            module,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            forward_sync_buffers=False,  # the reducer takes their mean
            gradient_as_bucket_view=True,
            # Its static graph fails an assertion of torch's where a backward is not followed by a sum.
            static_graph=options.static_graph and max(options.shares) == 1,
        )
        self._scale = 1.0
        self.powersgd: PowerSGD | None = None
        if hook != "none":
            # About means over a rank's samples, by a power of two: sums may be more than fp16 can hold.
            self._scale = 0.5 ** (options.global_batch_size // world.world_size).bit_length()
        if hook == "powersgd":
            from paceline.strategies.powersgd import PowerSGD

            self.powersgd = PowerSGD(module, world, powersgd_rank, self._scale)
            # A lambda: DistributedDataParallel wants no annotations that are texts.
            self._ddp.register_comm_hook(self.powersgd, lambda memory, bucket: memory.hook(bucket))
        elif hook != "none":
            register(self._ddp, world.group, hook)
        self.model = compiled(self._ddp) if options.compile else self._ddp
        self._world = world

    def _begin_shard(self) -> None:
        super()._begin_shard()
        # Gradients travel with the rank's last shard, as under DDP.no_sync().
        self._ddp.require_backward_grad_sync = self._rounds_left == 0

    def backward(self, loss: torch.Tensor) -> None:
        if self._rounds_left == 0:
            self._world.activity.enter("all-reduce")  # somewhere in it, DistributedDataParallel does
        with lost_peers_reported():
            super().backward(loss * self._scale)
        if self._rounds_left == 0:
            self._world.activity.leave()

    def _take_mean(self, gradients: list[torch.Tensor], weight: float) -> None:
        # DDP divides by the number of ranks; what is wanted is the sum over the summed weights.
        torch._foreach_mul_(gradients, self._world.world_size / (weight * self._scale))
