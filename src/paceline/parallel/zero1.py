"""Data parallelism with the optimizer's state sharded over the processes (ZeRO-1).

Every rank holds the model and the whole gradient, as under ddp, but keeps the optimizer's state of some
parameters only. It steps these, and then each parameter goes from its owner to the others: P_os of
Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.optim import Optimizer

from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.parallel.microbatches import ReducerStrategy
from paceline.parallel.strategy import ParameterLayout, Replicated
from paceline.parallel.world import ParallelDims, World, translate_peer_errors

_BUCKET_BYTES = 32 * 2**20


class ShardedOptimizers(Replicated):
    """Every rank holds the whole model, and a part of the optimizers' state.

    Args:
        mesh: the ranks.

    Raises:
        ConfigError: there is only one process.
    """

    def __init__(self, mesh: ParallelDims) -> None:
        if mesh.world.world_size == 1:
            raise ConfigError(
                "--strategy zero1 shards the optimizer's state over processes, but there is one. Use --strategy single."
            )
        self._world = mesh.world
        self._parts: dict[str, _OptimizerPart] = {}

    def place(self, module: nn.Module, device: torch.device) -> nn.Module:
        module.to(device)
        # A model may be built with randomness that no seed of torch's reaches.
        self._world.broadcast_module(module)
        return module

    def wrap_optimizers(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, Optimizer]:
        self._parts = {name: _OptimizerPart(optimizer, self._world) for name, optimizer in optimizers.items()}
        return optimizers

    def full(self, state: Any, *, keep: bool) -> Any:
        if not (isinstance(state, Mapping) and "optimizers" in state):
            return state
        optimizers = {
            name: {**part, "state": self._parts[name].gather_state(part["state"], keep=keep)}
            for name, part in state["optimizers"].items()
        }
        return {**state, "optimizers": optimizers}


class ZeRO1(ReducerStrategy):
    """A step is that of ddp; the layout shards what updates the parameters."""

    @classmethod
    def build_layout(cls, mesh: ParallelDims, config: RunConfig) -> ParameterLayout:
        return ShardedOptimizers(mesh)


class _OptimizerPart:
    """This rank's part of an optimizer, by hooks: the task's optimizer and its schedulers stay what they are.

    Raises:
        ConfigError: on a step, where the optimizer keeps a state that cannot be gathered.
    """

    def __init__(self, optimizer: Optimizer, world: World) -> None:
        self._world = world
        self._optimizer = optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._owners = owners([parameter.numel() for parameter in self._parameters], world.world_size)
        self._scratch: list[torch.Tensor | None] = []
        self._checked = False
        self._depth = 0
        for parameter in self._others:
            optimizer.state.pop(parameter, None)  # some optimizers begin with a state
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_load_state_dict_pre_hook(self._before_load)

    @property
    def _others(self) -> list[torch.Tensor]:
        rank = self._world.rank
        return [p for p, owner in zip(self._parameters, self._owners, strict=True) if owner != rank]

    def _before_step(self, *unused: object) -> None:
        """Optimizers pass over parameters without a gradient."""
        self._depth += 1
        if self._depth > 1:
            return  # a step that calls its base class's
        self._scratch = [parameter.grad for parameter in self._others]
        for parameter in self._others:
            parameter.grad = None

    def _after_step(self, *unused: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        for parameter, gradient in zip(self._others, self._scratch, strict=True):
            parameter.grad = gradient
        self._scratch = []
        if not self._checked:
            self._check()
        world = self._world
        assert world.group is not None
        world.progress_tracker.begin_collective("broadcast")
        with translate_peer_errors():
            for owner in range(world.world_size):
                values = [
                    parameter.data
                    for parameter, by in zip(self._parameters, self._owners, strict=True)
                    if by == owner and parameter.requires_grad
                ]
                if values:
                    _broadcast_coalesced(world.group, values, _BUCKET_BYTES, owner)
        world.progress_tracker.end_collective()

    def _check(self) -> None:
        self._checked = True
        for values in self._optimizer.state.values():
            for name, value in values.items():
                if not isinstance(value, torch.Tensor | int | float | str | bool | None):
                    raise ConfigError(
                        f"--strategy zero1 gathers tensors and numbers, but {type(self._optimizer).__name__} "
                        f"keeps a {type(value).__name__} as {name!r} of a parameter. Use --strategy ddp."
                    )

    def _before_load(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        mine = {
            number: values for number, values in state["state"].items() if self._owners[int(number)] == self._world.rank
        }
        return {**state, "state": mine}

    def gather_state(self, mine: Mapping[int, Mapping[str, Any]], *, keep: bool) -> dict[int, dict[str, Any]]:
        """Every rank's part, on rank 0 and on the CPU; all ranks call this together."""
        world = self._world
        told = world.all_gather_object(
            {number: {name: _described(value) for name, value in of.items()} for number, of in mine.items()}
        )
        whole = {int(number): dict(values) for number, values in mine.items()} if keep else {}
        world.progress_tracker.begin_collective("gather")
        with translate_peer_errors():
            for source in range(1, world.world_size):
                for number, values in told[source].items():
                    for name, described in values.items():
                        value = self._moved(mine, int(number), name, described, source)
                        if keep:
                            whole.setdefault(int(number), {})[name] = value
        world.progress_tracker.end_collective()
        return dict(sorted(whole.items()))

    def _moved(self, mine: Mapping[int, Mapping[str, Any]], number: int, name: str, described: Any, source: int) -> Any:
        """A value of rank ``source``, on rank 0."""
        if not isinstance(described, list):
            return described
        shape, dtype = described
        if self._world.rank == source and math.prod(shape):
            value = mine[number][name].detach().cpu().contiguous()
            dist.send(value, group_dst=0, group=self._world.group)
        if self._world.rank != 0:
            return None
        received = torch.empty(shape, dtype=getattr(torch, dtype))
        if received.numel():
            dist.recv(received, group_src=source, group=self._world.group)
        return received


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Which rank steps each parameter: the largest first, each to whoever has least."""
    loads = [0] * ranks
    chosen = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        chosen[number] = loads.index(min(loads))
        loads[chosen[number]] += sizes[number]
    return chosen


def _described(value: Any) -> Any:
    """A tensor as its shape and type; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return [list(value.shape), str(value.dtype).removeprefix("torch.")]
    return value
