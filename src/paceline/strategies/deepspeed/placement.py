"""How a model lies on the ranks under DeepSpeed: whole in stages 1 and 2, in parts in stage 3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.config import RunConfig
from paceline.distributed.mesh import Mesh
from paceline.distributed.sharded_state import gathered
from paceline.distributed.world import lost_peers_reported
from paceline.errors import ConfigError
from paceline.strategies.base import AMP_DTYPES
from paceline.strategies.deepspeed.library import engine_of, imported
from paceline.strategies.deepspeed.optimizer import ZeroOptimizer, require_element_by_element
from paceline.strategies.placement import Whole


class Partitioned(Whole):
    """DeepSpeed's engine around the model, made as soon as its optimizer is there.

    Args:
        mesh: the ranks.
        config: the stage, and the precision.

    Raises:
        ConfigError: there is only one process, or DeepSpeed is not installed.
    """

    def __init__(self, mesh: Mesh, config: RunConfig) -> None:
        if mesh.world.world_size == 1:
            raise ConfigError(
                "--strategy deepspeed shards states over processes, but there is one. Use --strategy single."
            )
        imported(mesh.world.device)
        self._world = mesh.world
        self._stage = config.zero_stage
        self._autocast = AMP_DTYPES.get(config.precision)
        self._optimizer: ZeroOptimizer | None = None
        self._module: nn.Module | None = None
        self.in_step = self._stage == 3

    def place(self, module: nn.Module, device: torch.device) -> nn.Module:
        for name, parameter in module.named_parameters():
            if parameter.dim() == 0:
                raise ConfigError(
                    f"--strategy deepspeed cannot hold {name!r}, which has no dimensions. Give it the shape "
                    "(1,), or use --strategy zero1."
                )
        module.to(device)
        # A model may be built with randomness that no seed of torch's reaches.
        self._world.broadcast_module(module)
        self._module = module
        return module

    def twin(self, build: Callable[[], nn.Module], like: nn.Module, device: torch.device) -> nn.Module:
        assert self._stage < 3
        return super().twin(build, like, device)

    def take_optimizers(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, Optimizer]:
        base = require_element_by_element(optimizers)
        parameters = [list(group["params"]) for group in base.param_groups]
        assert self._module is not None
        with lost_peers_reported():
            engine = engine_of(self._module, base, self._world, stage=self._stage, autocast=self._autocast)
        if self._stage == 3:
            _give_whole_parameters(self._module)
        self._optimizer = ZeroOptimizer(self._module, base, parameters, engine, self._stage, self._world)
        return dict.fromkeys(optimizers, self._optimizer)

    def whole(self, state: Any, *, keep: bool) -> Any:
        if isinstance(state, Mapping) and "optimizers" in state:
            assert self._optimizer is not None
            of_parameters = self._optimizer.whole_state(keep=keep)
            optimizers = {
                name: {**part, "state": of_parameters} for name, part in state["optimizers"].items()
            }
            state = {**state, "optimizers": optimizers}
        return gathered(state, keep=keep) if self._stage == 3 else state

    def clip_gradients(self, module: nn.Module, max_norm: float) -> None:
        assert self._optimizer is not None
        parts = self._optimizer.gradients()
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(parts)])
        square = norms.square().sum()
        with lost_peers_reported():
            dist.all_reduce(square, group=self._world.group)
        factor = torch.clamp(max_norm / (square.sqrt() + 1e-6), max=1.0)
        torch._foreach_mul_(parts, factor)


def _give_whole_parameters(module: nn.Module) -> None:
    """Have a model in parts give, and take, a state as if it were whole; all ranks do so together."""
    zero = import_module("deepspeed").zero
    loading = ExitStack()

    def whole(parameter: nn.Parameter) -> torch.Tensor:
        with lost_peers_reported(), zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def hold_parameters(_: nn.Module, state: dict[str, Any], prefix: str, __: object) -> None:
        # In place of empty tensors: what is behind them can be gathered.
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if prefix + name in state:
                state[prefix + name] = parameter

    def gather(*_: object) -> None:
        # As DeepSpeed's own loading does: rank 0's values are scattered at the end.
        loading.enter_context(zero.GatheredParameters(list(module.parameters()), modifier_rank=0))

    for parameter in module.parameters():
        parameter.full_tensor = MethodType(whole, parameter)  # type: ignore[attr-defined]
    module.register_state_dict_post_hook(hold_parameters)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(gather)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(lambda *_: loading.close())  # type: ignore[no-untyped-call]
