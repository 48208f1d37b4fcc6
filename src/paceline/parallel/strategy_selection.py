"""Construction of the layout and the strategy from the options."""

from __future__ import annotations

from typing import Any

from torch import nn

from paceline.core.config import ResolvedConfig, RunConfig
from paceline.core.plugins import import_object, load
from paceline.core.task import Task
from paceline.parallel.options import PipelineOptions, TensorOptions
from paceline.parallel.strategy import (
    ComposedLayout,
    ExampleBatchProvider,
    ParameterLayout,
    Strategy,
    StrategyOptions,
)
from paceline.parallel.world import ParallelDims

_AXES_FIRST = ("pp", "fsdp", "tp")
"""Of the strategies of a mesh, the first of these runs the step; dp only copies what another one lays out."""

_TORCH_DDP = "paceline.parallel.torch_ddp:TorchDDP"


def strategy_name(config: RunConfig, world_size: int) -> str:
    """Return the mesh or the strategy that the options mean for ``world_size`` processes."""
    if config.parallel.mesh is not None:
        return str(config.values["mesh"])
    if config.parallel.strategy != "auto":
        return config.parallel.strategy
    return "single" if world_size == 1 else "ddp"


def build_layout(
    config: ResolvedConfig, mesh: ParallelDims, task: Task, example_batch: ExampleBatchProvider
) -> ParameterLayout:
    """Build the parameter layout for the options.

    Raises:
        ConfigError: the options do not fit the number of processes.
    """
    layouts: list[ParameterLayout] = []
    tensor_parallel = None
    if "tp" in config.strategies:
        from paceline.parallel.tensor_parallel import TensorParallel

        tensor_parallel = TensorParallel(mesh, task, along_sequence=config[TensorOptions].sequence_parallel)
    if "pp" in config.strategies:
        from paceline.parallel.pipeline.pipeline import PipelineLayout

        options = config[PipelineOptions]
        micro_batches = config.microbatches // mesh.data.world_size
        layouts.append(
            PipelineLayout(
                *(mesh, options.pp_schedule, options.pp_split, micro_batches, example_batch),
                splitting=tensor_parallel,
            )
        )
    elif tensor_parallel is not None:
        layouts.append(tensor_parallel)
    if "fsdp" in config.strategies:
        from paceline.parallel.fsdp import FullyShard

        layouts.append(FullyShard(mesh, config))
    if not layouts:
        layout: ParameterLayout = strategy_class(config, mesh.world.world_size).build_layout(mesh, config)
        return layout
    return layouts[0] if len(layouts) == 1 else ComposedLayout(layouts)


def build_strategy(module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> Strategy:
    """Build the strategy for the options, with the model.

    Raises:
        ConfigError: the options do not fit the number of processes.
    """
    strategy: Strategy = strategy_class(options.config, mesh.world.world_size)(module, mesh, options)
    return strategy


def strategy_class(config: RunConfig, world_size: int) -> Any:
    """Return the class of the strategy that runs the step."""
    name = next((each for each in _AXES_FIRST if each in config.strategies), config.strategies[0])
    if strategy_name(config, world_size) == "single":
        name = "single"
    if config.changes.strategy is not None:
        return import_object(config.changes.strategy)
    if name in ("single", "ddp") and config.reducer == "ddp":
        return import_object(_TORCH_DDP)
    requirement = "a strategy: a class with `build_layout`, such as a subclass of MicrobatchStrategy"
    return load("paceline.strategies", name, requirement, lambda found: callable(getattr(found, "build_layout", None)))
