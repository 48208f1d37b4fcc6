"""The strategies by name."""

from __future__ import annotations

from torch import nn

from paceline.core.config import RunConfig
from paceline.core.task import Task
from paceline.parallel.data_parallel import DDP, Apart, Single
from paceline.parallel.strategy import InTurn, Placement, Rehearsal, Strategy, StrategyOptions, Whole
from paceline.parallel.world import Mesh
from paceline.parallel.zero1 import ShardedOptimizers


def strategy_name(config: RunConfig, world_size: int) -> str:
    """What the options mean for so many processes, in a word."""
    if config.mesh is not None:
        return config.mesh
    if config.strategy != "auto":
        return config.strategy
    return "single" if world_size == 1 else "ddp"


def build_placement(config: RunConfig, mesh: Mesh, task: Task, rehearsal: Rehearsal) -> Placement:
    """How the strategies that ``config`` asks for lay out the model of ``task``.

    Args:
        config: the options.
        mesh: the ranks.
        task: whose model it is.
        rehearsal: what may be tried of the task for it.

    Raises:
        ConfigError: they cannot work with so many processes.
    """
    layouts: list[Placement] = []
    tensor_parallel = None
    if "tp" in config.methods:
        from paceline.parallel.tensor_parallel import TensorParallel

        tensor_parallel = TensorParallel(mesh, task, along_sequence=config.sequence_parallel)
    staged_by = next((name for name in config.methods if name in ("pp", "mp")), None)
    if staged_by is not None:
        from paceline.parallel.pipeline.pipeline import Staged

        assert isinstance(config.shards, int)
        micro_batches = config.shards // mesh.data.world_size
        layouts.append(
            Staged(
                *(mesh, staged_by, config.schedule, config.pp_split, micro_batches, rehearsal),
                splitting=tensor_parallel,
            )
        )
    elif tensor_parallel is not None:
        layouts.append(tensor_parallel)
    if "fsdp" in config.methods:
        from paceline.parallel.fsdp import FullyShard

        layouts.append(FullyShard(mesh, config))
    if config.strategy == "deepspeed":
        from paceline.parallel.deepspeed import Partitioned

        layouts.append(Partitioned(mesh, config))
    if config.strategy == "zero1":
        layouts.append(ShardedOptimizers(mesh))
    if len(layouts) > 1:
        return InTurn(layouts)
    return layouts[0] if layouts else Whole()


def build_strategy(module: nn.Module, mesh: Mesh, config: RunConfig, options: StrategyOptions) -> Strategy:
    """The strategy that ``config`` asks for, with the model in it.

    Raises:
        ConfigError: it cannot work with so many processes.
    """
    if "pp" in config.methods or "mp" in config.methods:
        if config.schedule == "pipedream":
            from paceline.parallel.pipeline.pipedream import PipeDream

            return PipeDream(module, mesh, options)
        from paceline.parallel.pipeline.pipeline import Pipeline

        return Pipeline(module, mesh, config.schedule, options)
    if "fsdp" in config.methods:
        from paceline.parallel.fsdp import FSDP

        return FSDP(module, mesh, options, keeps=config.fsdp_reshard == "never")
    if "tp" in config.methods:
        from paceline.parallel.tensor_parallel import TP

        return TP(module, mesh, options)
    if config.strategy == "deepspeed":
        from paceline.parallel.deepspeed import DeepSpeed

        return DeepSpeed(module, mesh, options)
    if config.strategy == "horovod":
        from paceline.parallel.horovod import Horovod

        return Horovod(module, mesh, options)
    if "ps" in config.methods and not config.asynchronous:
        from paceline.parallel.parameter_server import ParameterServer

        return ParameterServer(module, mesh, config.num_servers(mesh.world.world_size), options)
    if config.strategy == "dp":
        from paceline.parallel.dp_threads import DataParallel

        return DataParallel(module, mesh, options, config.dp_devices)
    if config.sync_every:
        return Apart(module, mesh, options)
    if config.summed_by == "torch":
        from paceline.parallel.torch_ddp import TorchDDP

        return TorchDDP(module, mesh, options, config.comm_hook, config.powersgd_rank)
    if strategy_name(config, mesh.world.world_size) == "single":
        return Single(module, mesh, options)
    return DDP(module, mesh, options)
