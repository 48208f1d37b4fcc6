"""One process computes all shards."""

from __future__ import annotations

from torch import nn

from paceline.distributed.world import World
from paceline.errors import ConfigError
from paceline.strategies.base import ReducerStrategy, StrategyOptions


class Single(ReducerStrategy):
    """The strategy of a world of one.

    Raises:
        ConfigError: there are several processes.
    """

    def __init__(self, module: nn.Module, world: World, options: StrategyOptions) -> None:
        if world.world_size != 1:
            raise ConfigError(
                f"--strategy single is for one process, but there are {world.world_size}. Use ddp."
            )
        super().__init__(module, world, options)
