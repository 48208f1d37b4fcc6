"""DeepSpeed itself: imported when it is used, kept quiet, and rid of what it remembers of a world."""

from __future__ import annotations

import gc
import logging
import warnings
from contextlib import ExitStack
from functools import _lru_cache_wrapper
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.distributed.variables import variables_set
from paceline.distributed.world import World
from paceline.errors import ConfigError

_BUCKET_ELEMENTS = 50 * 2**20
_for_the_world = ExitStack()


def imported(device: torch.device) -> Any:
    """The package ``deepspeed``, for this kind of device.

    Raises:
        ConfigError: it is not installed, or does not work here.
    """
    try:
        # Told, it does not look for GPUs, nor warn that there is none.
        with variables_set({"DS_ACCELERATOR": device.type}):
            deepspeed = import_module("deepspeed")
    except (ImportError, RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--strategy deepspeed needs DeepSpeed ({str(error).splitlines()[0]}). "
            "Install it: pip install 'paceline[deepspeed]'"
        ) from error
    # Its notes go to standard output, where results are.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # On the CPU it would build a reduction through shared memory, with a compiler; gloo does as well.
    import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    # Defaults of its methods are the group that there was when it was imported; None is that of the call.
    for method in vars(import_module("deepspeed.comm.torch").TorchBackend).values():
        if isinstance(method, FunctionType) and method.__defaults__:
            method.__defaults__ = tuple(
                None if isinstance(value, dist.ProcessGroup) else value for value in method.__defaults__
            )
    return deepspeed


def engine_of(
    module: nn.Module, optimizer: Optimizer, world: World, *, stage: int, autocast: torch.dtype | None
) -> Any:
    """DeepSpeed's engine around a model and its optimizer; all ranks build it together.

    Args:
        module: the model, whole, on its device.
        optimizer: the task's, of the model's parameters.
        world: the ranks.
        stage: of ZeRO, 1 to 3.
        autocast: the type in which the task's loss is computed; None: that of the parameters.
    """
    deepspeed = imported(world.device)
    forget_world()  # a run that was refused may have left one
    config = {
        # Required, and of no effect: whoever calls the engine says when a step ends.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Its own default clips to 1; here only --clip-norm does.
        "gradient_clipping": 0.0,
        # Its own default takes 2 GB, however small the model.
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": min(sum(p.numel() for p in module.parameters()), _BUCKET_ELEMENTS),
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    # Its stage 3 looks there again whenever the order of modules changes.
    _for_the_world.enter_context(variables_set({"LOCAL_RANK": str(world.local_rank)}))
    with variables_set({"RANK": str(world.rank), "WORLD_SIZE": str(world.world_size)}):
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=config, dist_init_required=False
        )
    if autocast is not None:
        # It turns off an autocast that it was not told of, and would scale the loss itself if told.
        engine.torch_autocast_enabled = lambda: True
        engine.torch_autocast_dtype = lambda: autocast
    return engine


def forget_world() -> None:
    """Have DeepSpeed let go of the process group, and join the next one when it is asked to."""
    _for_the_world.close()
    comm: Any = import_module("deepspeed.comm.comm")
    comm.cdb = None
    groups = import_module("deepspeed.utils.groups")
    for name in ("_WORLD_GROUP", "_DATA_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "mesh_device"):
        setattr(groups, name, None)
    # The modules, with the groups that their parameters know, would stay in a stack and in caches of methods.
    import_module("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK.clear()
    for cache in gc.get_objects():
        if type(cache) is _lru_cache_wrapper and cache.__module__.startswith("deepspeed.runtime.zero"):
            cache.cache_clear()
