"""One process computes all shards."""

from __future__ import annotations

from torch import nn

from paceline.distributed.mesh import Mesh
from paceline.errors import ConfigError
from paceline.strategies.base import StrategyOptions
from paceline.strategies.shard_by_shard import ReducerStrategy


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
