"""DeepSpeed's ZeRO as a strategy."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import _lru_cache_wrapper
from importlib import import_module
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import distributed as dist
from torch import nn, optim
from torch.optim import Optimizer

from paceline.core.config import RunConfig
from paceline.core.environment import patch_environ
from paceline.core.errors import ConfigError
from paceline.core.plugins import install_command
from paceline.parallel.peer_errors import translate_peer_errors
from paceline.parallel.reducer import StepSums
from paceline.parallel.reduction_tree import ReductionPlan
from paceline.parallel.sharded_state import ShardedOptimizer, gather_full
from paceline.parallel.strategy import AMP_DTYPES, ExternalReduceStrategy, ParameterLayout, Replicated, StrategyOptions
from paceline.parallel.world import ParallelDims, World
from paceline.torch_internals import foreach_mul_, foreach_norm
from paceline_frameworks.strategy_options import DeepSpeedOptions

# --- DeepSpeed itself: imported on use, silenced, and reset after a world ---


_BUCKET_ELEMENTS = 50 * 2**20
_MPI_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
_world_cleanup = ExitStack()


def import_deepspeed(device: torch.device) -> Any:
    """Import ``deepspeed`` for this kind of device."""
    try:
        # With this variable it neither probes for GPUs nor warns that there are none.
        with patch_environ({"DS_ACCELERATOR": device.type}):
            deepspeed = import_module("deepspeed")
    except (ImportError, RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--strategy deepspeed needs DeepSpeed ({str(error).splitlines()[0]}). "
            f"Install it: {install_command('deepspeed')}"
        ) from error
    # It logs to standard output, which is for results.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # On the CPU it would compile a shared-memory reduction; gloo is good enough.
    import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    # Defaults of its methods are the group at import time; None means the current one.
    for method in vars(import_module("deepspeed.comm.torch").TorchBackend).values():
        if isinstance(method, FunctionType) and method.__defaults__:
            method.__defaults__ = tuple(
                None if isinstance(value, dist.ProcessGroup) else value for value in method.__defaults__
            )
    return deepspeed


def engine_of(
    module: nn.Module, optimizer: Optimizer, world: World, *, stage: int, autocast: torch.dtype | None
) -> Any:
    """Build DeepSpeed's engine around a model and its optimizer; a collective.

    Args:
        stage: of ZeRO, 1 to 3.
        autocast: the type in which the task's loss is computed; None: that of the parameters.
    """
    deepspeed = import_deepspeed(world.device)
    reset_deepspeed_comm()  # a rejected run may have left one
    config = {
        # Required, but without effect, because the strategy tells the engine when a step ends.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Its default clips to 1; only --clip-norm should clip.
        "gradient_clipping": 0.0,
        # Its default takes 2 GB even for small models.
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": min(sum(p.numel() for p in module.parameters()), _BUCKET_ELEMENTS),
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    # It takes the GPU of this number, which is 0 for a rank that sees only its own, and compares it with Open MPI's.
    number = str(world.device.index if world.device.type == "cuda" else world.local_rank)
    # Its stage 3 reads the variable whenever the order of modules changes.
    _world_cleanup.enter_context(patch_environ({"LOCAL_RANK": number}))
    variables = {"RANK": str(world.rank), "WORLD_SIZE": str(world.world_size)}
    if _MPI_LOCAL_RANK in os.environ:
        variables[_MPI_LOCAL_RANK] = number
    with patch_environ(variables):
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    if autocast is not None:
        # It disables an autocast that is not configured, and scales the loss itself if it is.
        engine.torch_autocast_enabled = lambda: True
        engine.torch_autocast_dtype = lambda: autocast
    return engine


def reset_deepspeed_comm() -> None:
    """Make DeepSpeed drop the process group, so that it joins the next one."""
    _world_cleanup.close()
    comm: Any = import_module("deepspeed.comm.comm")
    comm.cdb = None
    groups = import_module("deepspeed.utils.groups")
    for name in ("_WORLD_GROUP", "_DATA_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "mesh_device"):
        setattr(groups, name, None)
    # A stack and method caches would keep the modules, whose parameters refer to groups.
    import_module("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK.clear()
    for cache in gc.get_objects():
        if type(cache) is _lru_cache_wrapper and cache.__module__.startswith("deepspeed.runtime.zero"):
            cache.cache_clear()


# --- The task's optimizer, stepped by DeepSpeed on this rank's flat part of the parameters ---


ELEMENT_BY_ELEMENT = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
    *(optim.RMSprop, optim.Rprop, optim.Adadelta, optim.ASGD),
)
"""Elementwise optimizers, which work on flat parts of parameters.

Not Adagrad, which DeepSpeed rebuilds, so that schedulers lose it.
"""


def require_element_by_element(optimizers: Mapping[str, Optimizer]) -> Optimizer:
    """Return the only optimizer, if DeepSpeed can shard it."""
    if len(optimizers) > 1:
        raise ConfigError(
            f"--strategy deepspeed works with one optimizer, but the task builds {len(optimizers)}: "
            f"{', '.join(optimizers)}. Use --strategy zero1 or fsdp."
        )
    (optimizer,) = optimizers.values()
    if not isinstance(optimizer, ELEMENT_BY_ELEMENT):
        known = ", ".join(kind.__name__ for kind in ELEMENT_BY_ELEMENT)
        raise ConfigError(
            "--strategy deepspeed gives an optimizer flat parts of the parameters, but "
            f"{type(optimizer).__name__} is not known to be elementwise. Use one of {known}, or "
            "--strategy zero1."
        )
    if not all(any(p.requires_grad for p in group["params"]) for group in optimizer.param_groups):
        raise ConfigError(
            "--strategy deepspeed cannot shard a parameter group without trainable parameters. "
            "Leave frozen parameters out of the optimizer, or use --strategy zero1."
        )
    return optimizer


class ZeroOptimizer(ShardedOptimizer):
    """Represents the task's optimizer in the run's state.

    Its groups are those of the task's optimizer, so that schedulers reach them. Its state is that of one process.

    Args:
        module: the model, whose attribute ``zero_optimizer`` this becomes.
        parameters: of its groups, before DeepSpeed replaced them by its flat parts.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        base: Optimizer,
        parameters: list[list[torch.nn.Parameter]],
        engine: Any,
        stage: int,
        world: World,
    ) -> None:
        super().__init__([parameter for group in parameters for parameter in group], {})
        self.param_groups = base.param_groups
        self.state = base.state
        self.defaults = base.defaults
        self.engine = engine
        self.stage = stage
        self._zero = engine.optimizer
        self._parameters = parameters
        self._world = world
        object.__setattr__(module, "zero_optimizer", self)
        self._api = import_module("deepspeed.utils")

    def gradients(self) -> list[torch.Tensor]:
        """Return this rank's parts of the sums over all ranks, after a step's last backward."""
        groups = self._zero.averaged_gradients.values()
        return [part for group in groups if group is not None for part in group if part is not None]

    def discard(self) -> None:
        """Drop the gradients of the last step."""
        if self.stage == 3:
            # Its buffers stay, and a parameter unused in the next step would keep its old gradient.
            for part in self.gradients():
                part.zero_()
            self._zero.averaged_gradients = {}
        else:
            for kept in (self._zero.averaged_gradients, self._zero.all_grad_tensors):
                for number in kept:
                    kept[number] = None
        self._zero.zero_grad(set_to_none=True)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step this rank's part, and gather the other ranks'."""
        assert closure is None
        self._world.progress_tracker.begin_collective("all-gather")
        with translate_peer_errors():
            self._zero.step()
        self._world.progress_tracker.end_collective()

    def state_dict(self) -> dict[str, Any]:
        """Return the groups, parameters as in one process, without the state; see :meth:`full_state_dict`."""
        numbers = iter(range(sum(len(group) for group in self._parameters)))
        groups = []
        for group, parameters in zip(self.param_groups, self._parameters, strict=True):
            own = {name: value for name, value in group.items() if name != "params"}
            groups.append({**own, "params": [next(numbers) for _ in parameters]})
        return {"state": {}, "param_groups": groups}

    def full_state_dict(self, *, keep: bool) -> dict[int, dict[str, Any]]:
        """Return each parameter's state by its number, on the CPU; a collective.

        Args:
            keep: whether this rank needs it; others hold one tensor at a time.
        """
        full_state: dict[int, dict[str, Any]] = {}
        self._link_states()
        self._world.progress_tracker.begin_collective("gather")
        with translate_peer_errors():
            for flat, parameters in self._flat_parts():
                for number, parameter in parameters:
                    values = {}
                    for name, value in self.state[flat].items():
                        if isinstance(value, torch.Tensor) and value.shape == flat.shape:
                            value = self._api.safe_get_full_optimizer_state(parameter, name)
                        if isinstance(value, torch.Tensor):
                            value = value.detach().cpu().clone() if keep else None
                        values[name] = value
                    if keep and values:
                        full_state[number] = values
        self._world.progress_tracker.end_collective()
        return dict(sorted(full_state.items()))

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a one-process state, after the model's parameters.

        Raises:
            ValueError: it has other parameter groups.
        """
        self._zero.refresh_fp32_params()
        saved_groups = state_dict["param_groups"]
        if [len(group["params"]) for group in saved_groups] != [len(group) for group in self._parameters]:
            raise ValueError("the saved optimizer's parameter groups differ from the task's")
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update({k: v for k, v in saved.items() if k not in ("params", "param_names")})
        of_numbers = {int(number): values for number, values in state_dict["state"].items()}
        for flat, parameters in self._flat_parts():
            self.state.pop(flat, None)
            with_state = [(p, of_numbers[number]) for number, p in parameters if of_numbers.get(number)]
            if with_state:
                self.state[flat] = self._flat_state(flat, *with_state[0])
        self._link_states()
        for flat, parameters in self._flat_parts():
            for number, parameter in parameters:
                for name, value in of_numbers.get(number, {}).items():
                    if name in self.state[flat] and self.state[flat][name] is not value:
                        self._set_part(parameter, flat, name, value)

    def _link_states(self) -> None:
        """Make DeepSpeed find each parameter's state.

        It does so itself after the first group's first step, when the other groups have none yet.
        """
        if self.stage < 3:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    @staticmethod
    def _flat_state(flat: torch.Tensor, parameter: torch.Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a flat part's state, with zeros for the parameters' elementwise values."""
        shape = getattr(parameter, "ds_shape", parameter.shape)
        return {
            name: torch.zeros_like(flat) if _is_elementwise(value, shape) else value for name, value in values.items()
        }

    def _set_part(self, parameter: Any, flat: torch.Tensor, name: str, value: Any) -> None:
        if not _is_elementwise(value, getattr(parameter, "ds_shape", parameter.shape)):
            return  # a number shared by all parameters of a group
        value = value.to(flat.device, flat.dtype)
        if self.stage < 3:
            self._api.safe_set_full_optimizer_state(parameter, value, name)
            return
        # The function for full tensors does not support sizes that the ranks do not divide.
        size = parameter.ds_tensor.numel()
        part = torch.zeros(size, dtype=flat.dtype, device=flat.device)
        own_slice = value.flatten()[size * self._world.rank : size * (self._world.rank + 1)]
        part[: own_slice.numel()] = own_slice
        self._api.safe_set_local_optimizer_state(parameter, part, name)

    def _flat_parts(self) -> Iterator[tuple[torch.Tensor, list[tuple[int, torch.nn.Parameter]]]]:
        """Yield this rank's flat parts, each with its parameters and their numbers."""
        zero = self._zero
        flats, groups = (
            (zero.fp32_partitioned_groups_flat, zero.fp16_groups)
            if self.stage == 3
            else (zero.single_partition_of_fp32_groups, zero.bit16_groups)
        )
        listed = [parameter for group in self._parameters for parameter in group]
        numbers = {id(parameter): number for number, parameter in enumerate(listed)}
        for flat, group in zip(flats, groups, strict=True):
            yield flat, [(numbers[id(parameter)], parameter) for parameter in group]


def _is_elementwise(value: Any, shape: torch.Size) -> bool:
    """Return whether this is an elementwise state of a parameter, not a number such as a step count."""
    return isinstance(value, torch.Tensor) and value.shape == shape and value.dim() > 0


# --- The layout under DeepSpeed: replicated in stages 1 and 2, sharded in stage 3 ---


class DeepSpeedLayout(Replicated):
    """DeepSpeed's engine around the model, built together with the optimizer.

    Raises:
        ConfigError: there is only one process, or DeepSpeed is not installed.
    """

    def __init__(self, mesh: ParallelDims, config: RunConfig) -> None:
        if mesh.world.world_size == 1:
            raise ConfigError(
                "--strategy deepspeed shards states over processes, but there is only one. Use --strategy single."
            )
        import_deepspeed(mesh.world.device)
        self._world = mesh.world
        self._stage = config[DeepSpeedOptions].zero_stage
        self._autocast = AMP_DTYPES.get(config.training.precision)
        self._optimizer: ZeroOptimizer | None = None
        self._module: nn.Module | None = None
        self.is_collective = self._stage == 3

    def place(self, build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
        module = build()
        for name, parameter in module.named_parameters():
            if parameter.dim() == 0:
                raise ConfigError(
                    f"--strategy deepspeed cannot hold {name!r}, which has no dimensions. Give it the shape "
                    "(1,), or use --strategy zero1."
                )
        module.to(device)
        # The task may build the model with randomness that Paceline does not seed.
        self._world.broadcast_module(module)
        self._module = module
        return module

    def wrap_optimizers(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, Optimizer]:
        base = require_element_by_element(optimizers)
        parameters = [list(group["params"]) for group in base.param_groups]
        assert self._module is not None
        with translate_peer_errors():
            engine = engine_of(self._module, base, self._world, stage=self._stage, autocast=self._autocast)
        if self._stage == 3:
            _hook_full_state(self._module)
        self._optimizer = ZeroOptimizer(self._module, base, parameters, engine, self._stage, self._world)
        return dict.fromkeys(optimizers, self._optimizer)

    def full(self, state: Any, *, keep: bool) -> Any:
        if isinstance(state, Mapping) and "optimizers" in state:
            assert self._optimizer is not None
            of_numbers = self._optimizer.full_state_dict(keep=keep)
            ((name, part),) = state["optimizers"].items()
            parameters = [parameter for group in part["param_groups"] for parameter in group["params"]]
            of_names = {parameters[number]: values for number, values in of_numbers.items()}
            optimizers = {name: {**part, "state": of_names}}
            state = {**state, "optimizers": optimizers}
        return gather_full(state, keep=keep) if self._stage == 3 else state

    def clip_gradients(self, module: nn.Module, max_norm: float) -> torch.Tensor:
        assert self._optimizer is not None
        parts = self._optimizer.gradients()
        norms = torch.stack([norm.float() for norm in foreach_norm(parts)])
        square = norms.square().sum()
        with translate_peer_errors():
            dist.all_reduce(square, group=self._world.group)
        norm = square.sqrt()
        foreach_mul_(parts, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm


def _hook_full_state(module: nn.Module) -> None:
    """Make a sharded model save and load full states, as collectives."""
    zero = import_module("deepspeed").zero
    loading = ExitStack()

    def full_tensor(parameter: nn.Parameter) -> torch.Tensor:
        with translate_peer_errors(), zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def hold_parameters(_: nn.Module, state: dict[str, Any], prefix: str, __: object) -> None:
        # Parameters that can be gathered, in place of their empty tensors.
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if prefix + name in state:
                state[prefix + name] = parameter

    def gather(*_: object) -> None:
        # As in DeepSpeed's own loading, rank 0's values are scattered at the end.
        loading.enter_context(zero.GatheredParameters(list(module.parameters()), modifier_rank=0))

    for parameter in module.parameters():
        parameter.full_tensor = MethodType(full_tensor, parameter)  # type: ignore[attr-defined]
    module.register_state_dict_post_hook(hold_parameters)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(gather)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(lambda *_: loading.close())  # type: ignore[no-untyped-call]


# --- Data parallelism by DeepSpeed (ZeRO 1 to 3): its engine sums, shards and steps ---
#
# Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.


class DeepSpeed(ExternalReduceStrategy):
    """DeepSpeed's engine runs forward and backward, and each rank sums its part of the gradients.

    Args:
        module: as :class:`DeepSpeedLayout` placed it.
    """

    moves_parameters = True

    @classmethod
    def build_layout(cls, mesh: ParallelDims, config: RunConfig) -> ParameterLayout:
        return DeepSpeedLayout(mesh, config)

    def __init__(self, module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> None:
        plan = ReductionPlan(sum(options.work_split), mesh.world.world_size, "allreduce", options.work_split)
        super().__init__(module, mesh, plan, options)
        self._world = mesh.world
        self._optimizer: ZeroOptimizer = module.zero_optimizer  # type: ignore[assignment]
        self.model = self._optimizer.engine

    def begin_step(self, present: Sequence[int]) -> None:
        self._optimizer.discard()
        super().begin_step(present)

    def _count_micro_steps(self, present: Sequence[int]) -> int:
        # Every backward, and in stage 3 every forward, is a collective.
        micro_steps = super()._count_micro_steps(present)
        return int(max(of_rank[0] for of_rank in self._mesh.gather_rows([micro_steps])))

    def _begin_microbatch(self) -> None:
        super()._begin_microbatch()
        self.model.set_gradient_accumulation_boundary(self._micro_steps_left == 0)  # type: ignore[operator]

    def backward(self, loss: torch.Tensor) -> None:
        self._world.progress_tracker.begin_collective("reduce-scatter")
        with translate_peer_errors():
            self.model.backward(loss, scale_wrt_gas=False)  # type: ignore[operator]
        self._world.progress_tracker.end_collective()

    def reduce(self, row: Sequence[float]) -> StepSums:
        sums = self.reducer.finish(row)
        gradients = self._optimizer.gradients()
        if sums.weight > 0:
            # DeepSpeed divides by the number of ranks instead of the sum of the weights.
            foreach_mul_(gradients, self._world.world_size / sums.weight)
            finite = sums.finite and all(bool(torch.isfinite(part.sum())) for part in gradients)
            sums = replace(sums, finite=finite)
        finite = all(is_finite for (is_finite,) in self._mesh.gather_rows([float(sums.finite)]))
        return replace(sums, finite=finite)

    def close(self) -> None:
        super().close()
        self.model.destroy()  # type: ignore[operator]
        reset_deepspeed_comm()
        gc.collect()  # the engine is in a reference cycle, and keeps the process group
