"""PyTorch's own DistributedDataParallel (``--reduction ddp``)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.core.errors import ConfigError
from paceline.parallel.peer_errors import translate_peer_errors
from paceline.parallel.reduction_tree import ReductionPlan
from paceline.parallel.strategy import ExternalReduceStrategy, StrategyOptions, compile_model
from paceline.parallel.world import ParallelDims
from paceline.torch_internals import foreach_mul_, leave_buffers, silence_search_warning


class TorchDDP(ExternalReduceStrategy):
    """``DistributedDataParallel`` sums the gradients during the backward of a rank's last micro-batch.

    Unless the task says that its graph is static, it searches each step's graph for unused parameters: a rank that did
    not use one would otherwise keep the others waiting for its gradient.

    Raises:
        ConfigError: there is only one process.
    """

    def __init__(self, module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> None:
        world = mesh.world
        if world.world_size == 1:
            option = next(iter(options.config.changes.own_state), "--reduction ddp")
            raise ConfigError(f"{option} needs at least two processes. Leave it out for one.")
        plan = ReductionPlan(sum(options.work_split), world.world_size, "allreduce", options.work_split)
        super().__init__(module, mesh, plan, options)
        # torch's static graph fails an assertion if a backward has no reduction.
        is_static = options.static_graph and max(options.work_split) == 1
        if not is_static:
            silence_search_warning(world.group, world.device)
        self._ddp = DistributedDataParallel(
            module,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=not is_static,
            static_graph=is_static,
        )
        leave_buffers(self._ddp)  # the reducer averages them
        self._scale = 1.0  # of the gradients before they are sent
        self.model = compile_model(self._ddp) if options.config.training.compile else self._ddp
        self._world = world

    def _begin_microbatch(self) -> None:
        super()._begin_microbatch()
        # Reduce only in the rank's last micro-batch, as with DDP.no_sync().
        self._ddp.require_backward_grad_sync = self._micro_steps_left == 0

    def backward(self, loss: torch.Tensor) -> None:
        if self._micro_steps_left == 0:
            self._world.progress_tracker.begin_collective(
                "all-reduce"
            )  # DistributedDataParallel enters it during backward
        with translate_peer_errors():
            super().backward(loss * self._scale)
        if self._micro_steps_left == 0:
            self._world.progress_tracker.end_collective()

    def _take_mean(self, gradients: list[torch.Tensor], weight: float) -> None:
        # DDP divides by the number of ranks instead of the sum of the weights.
        foreach_mul_(gradients, self._world.world_size / (weight * self._scale))
