"""Distributed data parallel: every rank holds the model and computes its share of the shards."""

from __future__ import annotations

from torch import nn

from paceline.distributed.world import World
from paceline.strategies.base import ReducerStrategy, StrategyOptions


class DDP(ReducerStrategy):
    """Data parallelism with Paceline's reducer (``--reduction exact`` or ``fast``)."""

    def __init__(self, module: nn.Module, world: World, options: StrategyOptions) -> None:
        world.broadcast_module(module)
        super().__init__(module, world, options)
