"""Data parallelism by Horovod (``--strategy horovod``): its ``DistributedOptimizer`` sums the gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.core.errors import ConfigError, PeerLostError
from paceline.parallel.reducer import StepSums
from paceline.parallel.reduction_tree import ReductionPlan
from paceline.parallel.strategy import ExternalReduceStrategy, StrategyOptions
from paceline.parallel.world import ParallelDims, World


class Horovod(ExternalReduceStrategy):
    """Horovod sums the gradients while backward runs.

    Horovod's optimizer never steps: it only synchronizes its sums, which are divided by the sum of the losses' weights,
    and the task's own optimizers step.

    Raises:
        ConfigError: there is only one process, Horovod is not installed, or it has another world size.
    """

    def __init__(self, module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> None:
        world = mesh.world
        if world.world_size == 1:
            raise ConfigError("--strategy horovod needs at least two processes. Leave it out for one.")
        self._hvd = _init_horovod(world)
        plan = ReductionPlan(sum(options.work_split), world.world_size, "allreduce", options.work_split)
        super().__init__(module, mesh, plan, options)
        self._activity = world.progress_tracker
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self._optimizer = self._hvd.DistributedOptimizer(
            torch.optim.SGD(self._parameters, lr=0.0), named_parameters=named, op=self._hvd.Sum
        )

    def begin_step(self, present: Sequence[int]) -> None:
        super().begin_step(present)
        # A rank without a micro-batch runs one backward with weight 0.
        self._optimizer.set_backward_passes_per_step(self._micro_steps_left)

    def backward(self, loss: torch.Tensor) -> None:
        with _translate_peer_errors():
            super().backward(loss)

    def reduce(self, row: Sequence[float]) -> StepSums:
        self._activity.begin_collective("all-reduce")
        with _translate_peer_errors():
            self._optimizer.synchronize()
        self._activity.end_collective()
        return super().reduce(row)

    def close(self) -> None:
        super().close()
        self._hvd.shutdown()


def _init_horovod(world: World) -> Any:
    """Import and initialise Horovod for PyTorch, and check its world."""
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise ConfigError(
            f"--strategy horovod needs Horovod for this PyTorch ({error}). Build it with scripts/build-horovod; "
            "see docs/launchers/horovod.md."
        ) from error
    hvd.init()
    horovod_world = (hvd.rank(), hvd.size())
    if horovod_world != (world.rank, world.world_size):
        hvd.shutdown()
        raise ConfigError(
            f"--strategy horovod: Horovod has {horovod_world[1]} processes, but there are "
            f"{world.world_size}. Start them with horovodrun: --on horovod."
        )
    return hvd


@contextmanager
def _translate_peer_errors() -> Iterator[None]:
    """Turn Horovod's error for a lost peer into a :class:`PeerLostError`."""
    from horovod.common.exceptions import HorovodInternalError

    try:
        yield
    except HorovodInternalError as error:
        raise PeerLostError(f"another rank is gone: {str(error).splitlines()[0]}") from error
