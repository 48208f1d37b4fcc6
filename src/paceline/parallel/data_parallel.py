"""Single-process training, and DDP with Paceline's reducer."""

from __future__ import annotations

from torch import nn

from paceline.core.errors import ConfigError
from paceline.parallel.microbatches import ReducerStrategy
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
