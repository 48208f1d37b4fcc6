"""The strategies by name."""

from __future__ import annotations

from torch import nn

from paceline.core.config import RunConfig
from paceline.core.task import Task
from paceline.parallel.data_parallel import DDP, LocalSGDStrategy, Single
from paceline.parallel.strategy import (
    ComposedLayout,
    ExampleBatchProvider,
    ParameterLayout,
    Replicated,
    Strategy,
    StrategyOptions,
)
from paceline.parallel.world import ParallelDims
from paceline.parallel.zero1 import ShardedOptimizers


def strategy_name(config: RunConfig, world_size: int) -> str:
    """What the options mean for so many processes, in a word."""
    if config.mesh is not None:
        return config.mesh
    if config.strategy != "auto":
        return config.strategy
    return "single" if world_size == 1 else "ddp"


def build_layout(config: RunConfig, mesh: ParallelDims, task: Task, rehearsal: ExampleBatchProvider) -> ParameterLayout:
    """How the strategies that ``config`` asks for lay out the model of ``task``.

    Args:
        config: the options.
        mesh: the ranks.
        task: whose model it is.
        rehearsal: what may be tried of the task for it.

    Raises:
        ConfigError: they cannot work with so many processes.
    """
    layouts: list[ParameterLayout] = []
    tensor_parallel = None
    if "tp" in config.strategies:
        from paceline.parallel.tensor_parallel import TensorParallel

        tensor_parallel = TensorParallel(mesh, task, along_sequence=config.sequence_parallel)
    if "pp" in config.strategies:
        from paceline.parallel.pipeline.pipeline import PipelineLayout

        assert isinstance(config.microbatches, int)
        micro_batches = config.microbatches // mesh.data.world_size
        layouts.append(
            PipelineLayout(
                *(mesh, config.pp_schedule, config.pp_split, micro_batches, rehearsal),
                splitting=tensor_parallel,
            )
        )
    elif tensor_parallel is not None:
        layouts.append(tensor_parallel)
    if "fsdp" in config.strategies:
        from paceline.parallel.fsdp import FullyShard

        layouts.append(FullyShard(mesh, config))
    if config.strategy == "deepspeed":
        from paceline.parallel.deepspeed import DeepSpeedLayout

        layouts.append(DeepSpeedLayout(mesh, config))
    if config.strategy == "zero1":
        layouts.append(ShardedOptimizers(mesh))
    if len(layouts) > 1:
        return ComposedLayout(layouts)
    return layouts[0] if layouts else Replicated()


def build_strategy(module: nn.Module, mesh: ParallelDims, config: RunConfig, options: StrategyOptions) -> Strategy:
    """The strategy that ``config`` asks for, with the model in it.

    Raises:
        ConfigError: it cannot work with so many processes.
    """
    if "pp" in config.strategies:
        if config.pp_schedule == "pipedream":
            from paceline.parallel.pipeline.pipedream import PipeDream

            return PipeDream(module, mesh, options)
        from paceline.parallel.pipeline.pipeline import Pipeline

        return Pipeline(module, mesh, config.pp_schedule, options)
    if "fsdp" in config.strategies:
        from paceline.parallel.fsdp import FSDP

        return FSDP(module, mesh, options, keeps=config.fsdp_reshard == "never")
    if "tp" in config.strategies:
        from paceline.parallel.tensor_parallel import TP

        return TP(module, mesh, options)
    if config.strategy == "deepspeed":
        from paceline.parallel.deepspeed import DeepSpeed

        return DeepSpeed(module, mesh, options)
    if config.strategy == "horovod":
        from paceline.parallel.horovod import Horovod

        return Horovod(module, mesh, options)
    if "ps" in config.strategies and not config.asynchronous:
        from paceline.parallel.parameter_server import ParameterServer

        return ParameterServer(module, mesh, config.num_servers(mesh.world.world_size), options)
    if config.strategy == "dp":
        from paceline.parallel.dp_threads import DataParallel

        return DataParallel(module, mesh, options, config.dp_devices)
    if config.local_sgd_steps:
        return LocalSGDStrategy(module, mesh, options)
    if config.reducer == "ddp":
        from paceline.parallel.torch_ddp import TorchDDP

        return TorchDDP(module, mesh, options, config.comm_hook, config.powersgd_rank)
    if strategy_name(config, mesh.world.world_size) == "single":
        return Single(module, mesh, options)
    return DDP(module, mesh, options)
