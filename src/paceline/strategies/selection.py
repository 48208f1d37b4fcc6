"""The strategies by name."""

from __future__ import annotations

from torch import nn

from paceline.config import RunConfig
from paceline.distributed.world import World
from paceline.strategies.base import Strategy, StrategyOptions
from paceline.strategies.ddp import DDP
from paceline.strategies.single import Single
from paceline.strategies.torch_ddp import TorchDDP


def strategy_name(config: RunConfig, world_size: int) -> str:
    """What ``--strategy auto`` means for so many processes."""
    if config.strategy != "auto":
        return config.strategy
    return "single" if world_size == 1 else "ddp"


def build_strategy(module: nn.Module, world: World, config: RunConfig, options: StrategyOptions) -> Strategy:
    """The strategy that ``config`` asks for, with the model in it.

    Raises:
        ConfigError: it cannot work with so many processes.
    """
    if config.reduction == "torch":
        return TorchDDP(module, world, options)
    if strategy_name(config, world.world_size) == "single":
        return Single(module, world, options)
    return DDP(module, world, options)
