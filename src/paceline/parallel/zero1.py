"""Data parallelism with sharded optimizer state (ZeRO-1).

Every rank holds the model and the full gradient, as in ddp, but the optimizer state of some parameters only. Each rank
steps its parameters, then broadcasts them: P_os of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.parallel.peer_errors import translate_peer_errors
from paceline.parallel.point_to_point import describe_tensor, empty_tensor, receive_tensor, send_tensor
from paceline.parallel.sharded_state import require_own_memory
from paceline.parallel.strategy import ParameterLayout, ReducerStrategy, Replicated
from paceline.parallel.world import ParallelDims, World
from paceline.torch_internals import broadcast_coalesced

_BUCKET_BYTES = 32 * 2**20


class ShardedOptimizers(Replicated):
    """The layout in which every rank holds the full model and a part of the optimizers' state.

    Raises:
        ConfigError: there is only one process.
    """

    def __init__(self, mesh: ParallelDims) -> None:
        if mesh.world.world_size == 1:
            raise ConfigError(
                "--strategy zero1 shards the optimizer's state over processes, but there is only one. "
                "Use --strategy single."
            )
        self._world = mesh.world
        self._parts: dict[str, _OptimizerPart] = {}

    def place(self, build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
        module = build()
        require_own_memory("zero1", module)
        module.to(device)
        # The task may build the model with randomness that Paceline does not seed.
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
    """This rank's part of an optimizer, by hooks, so that the task's optimizer and its schedulers stay unchanged.

    Raises:
        ConfigError: on a step, if the optimizer keeps a state that cannot be gathered.
    """

    def __init__(self, optimizer: Optimizer, world: World) -> None:
        self._world = world
        self._optimizer = optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._trained = [parameter.requires_grad for parameter in self._parameters]  # a task may toggle it later
        self._owners = owners([parameter.numel() for parameter in self._parameters], world.world_size)
        self._scratch: list[torch.Tensor | None] = []
        self._checked = False
        self._depth = 0
        for parameter in self._not_owned:
            optimizer.state.pop(parameter, None)  # some optimizers have an initial state
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_load_state_dict_pre_hook(self._before_load)

    @property
    def _not_owned(self) -> list[torch.Tensor]:
        rank = self._world.rank
        return [p for p, owner in zip(self._parameters, self._owners, strict=True) if owner != rank]

    def _before_step(self, *unused: object) -> None:
        """Hide gradients of other ranks' parameters, because optimizers skip parameters without one."""
        self._depth += 1
        if self._depth > 1:
            return  # a step() that calls super().step()
        self._scratch = [parameter.grad for parameter in self._not_owned]
        for parameter in self._not_owned:
            parameter.grad = None

    def _after_step(self, *unused: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        for parameter, gradient in zip(self._not_owned, self._scratch, strict=True):
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
                    for parameter, parameter_owner, trained in zip(
                        self._parameters, self._owners, self._trained, strict=True
                    )
                    if parameter_owner == owner and trained
                ]
                if values:
                    broadcast_coalesced(world.group, values, _BUCKET_BYTES, owner)
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
        mine = {number: values for number, values in state["state"].items() if self._owners[number] == self._world.rank}
        return {**state, "state": mine}

    def gather_state(self, mine: Mapping[str, Mapping[str, Any]], *, keep: bool) -> dict[str, dict[str, Any]]:
        """Gather every rank's part to rank 0, on the CPU; a collective."""
        world = self._world
        descriptions = world.all_gather_object(
            {
                parameter: {name: _describe(value) for name, value in values.items()}
                for parameter, values in mine.items()
            }
        )
        full_state = {parameter: dict(values) for parameter, values in mine.items()} if keep else {}
        world.progress_tracker.begin_collective("gather")
        for source in range(1, world.world_size):
            for parameter, values in descriptions[source].items():
                gathered = {
                    name: self._send_to_rank_0(mine, parameter, name, description, source)
                    for name, description in values.items()
                }
                if keep:
                    full_state[parameter] = gathered
        world.progress_tracker.end_collective()
        return full_state

    def _send_to_rank_0(
        self, mine: Mapping[str, Mapping[str, Any]], parameter: str, name: str, description: Any, source: int
    ) -> Any:
        """Return a value of rank ``source``, on rank 0."""
        if not isinstance(description, list):
            return description
        if self._world.rank == source:
            send_tensor(self._world, mine[parameter][name], [0])
        if self._world.rank != 0:
            return None
        received = empty_tensor(description, self._world.device)
        receive_tensor(self._world, received, source)
        return received.cpu()


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Assign each parameter to a rank: the largest first, each to the rank with the least load."""
    loads = [0] * ranks
    assigned = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        assigned[number] = loads.index(min(loads))
        loads[assigned[number]] += sizes[number]
    return assigned


def _describe(value: Any) -> Any:
    """Return the description of a tensor; other values unchanged."""
    return describe_tensor(value) if isinstance(value, torch.Tensor) else value
