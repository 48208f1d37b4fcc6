"""Sharded state: gathering to full tensors, and loading."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.core.errors import ConfigError, TaskError

# --- The error of a model that uses a split layer's weight directly ---


@contextmanager
def explain_dtensor_mixing() -> Iterator[None]:
    """Explain the error of a model that uses a split layer's weight without calling the layer.

    Raises:
        TaskError: the model does so.
    """
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise TaskError(
            "--strategy tp: the model uses the weight of a split layer without calling the layer "
            f"({str(error).splitlines()[0]}). Name the layers to split in the task's tensor_parallel_plan, "
            "and leave that one out."
        ) from error


@contextmanager
def explain_sharded_step(optimizer: Optimizer) -> Iterator[None]:
    """Explain the error of an optimizer that cannot step sharded parameters.

    Raises:
        TaskError: the optimizer cannot.
    """
    try:
        yield
    except RuntimeError as error:
        about_shards = any(word in str(error) for word in ("DTensor", "sharding", "Sharding", "sharded", "placement"))
        if not about_shards or not any(is_distributed(p) for group in optimizer.param_groups for p in group["params"]):
            raise
        raise TaskError(
            f"the optimizer {type(optimizer).__name__} does not work with sharded parameters "
            f"({str(error).splitlines()[0]}). Use --strategy zero1, or another optimizer, such as AdamW."
        ) from error


# --- States of sharded parameters: gathered to full tensors, and distributed again ---
#
# ``torch.distributed.tensor`` is imported on use, because it takes long.


class ShardedOptimizer(Optimizer, ABC):
    """An optimizer that keeps gradients and state separate from the parameters of its groups."""

    @abstractmethod
    def gradients(self) -> list[torch.Tensor]:
        """Return this rank's shards of a step's gradients, which may be changed in place."""

    @abstractmethod
    def load_state_dict(self, state_dict: Any) -> None:
        """Keep this rank's shard of a full state; a collective."""


def gather_full(state: Any, *, keep: bool = True) -> Any:
    """Return a state with every distributed tensor gathered, on the CPU; a collective.

    Args:
        state: mappings, lists and tuples of tensors and other values.
        keep: False on ranks that do not need the result; they take part, and hold one tensor at a time.
    """
    if is_distributed(state):
        whole = state.full_tensor()
        return whole.detach().cpu() if keep else None
    if isinstance(state, Mapping):
        return {name: gather_full(value, keep=keep) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(gather_full(value, keep=keep) for value in state)
    return state


def load_module(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a full state into a module whose parameters may be distributed.

    Raises:
        RuntimeError: names or shapes differ.
    """
    current = module.state_dict()
    module.load_state_dict(
        {name: distribute_like(value, current[name]) if name in current else value for name, value in state.items()}
    )


def has_common_state(state: Mapping[str, Any]) -> bool:
    """Return whether an optimizer's state has the form of torch's: by parameter, and by group."""
    return isinstance(state.get("state"), Mapping) and "param_groups" in state


def require_common_state(name: str, optimizer: Optimizer, strategy: str) -> None:
    """Reject an optimizer whose state has a form of its own, so that it cannot be sharded.

    Raises:
        ConfigError: it has.
    """
    if not has_common_state(optimizer.state_dict()):
        raise ConfigError(
            f"--strategy {strategy} shards the state of the optimizer {name!r}, but the state_dict of "
            f"{type(optimizer).__name__} has no state of each parameter. Use --strategy ddp."
        )


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a full state into an optimizer whose parameters may be distributed."""
    if isinstance(optimizer, ShardedOptimizer) or not has_common_state(state):
        optimizer.load_state_dict(dict(state))
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    distributed_state = dict(state["state"])
    for number in distributed_state.keys() & range(len(parameters)):
        values, parameter = distributed_state[number], parameters[number]
        distributed_state[number] = {name: distribute_like(value, parameter) for name, value in values.items()}
        if parameter.is_meta:  # another rank holds it
            del distributed_state[number]
    optimizer.load_state_dict({**state, "state": distributed_state})


def distribute_like(value: Any, like: Any) -> Any:
    """Distribute a full tensor as ``like`` is, or move it to ``meta`` if another rank holds it.

    Other values are returned unchanged. Needs no communication.
    """
    if isinstance(value, torch.Tensor) and isinstance(like, torch.Tensor) and like.is_meta:
        return value.to("meta")
    if not (isinstance(value, torch.Tensor) and is_distributed(like) and value.shape == like.shape):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor; a strategy's own optimizer may have it elsewhere."""
    if not hasattr(tensor, "to_local"):
        return tensor
    part = tensor.to_local()
    assert isinstance(part, torch.Tensor)
    return part


def distributed_part(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Wrap this rank's shard ``part`` as a tensor distributed as ``like`` is, without a copy."""
    if not is_distributed(like):
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def is_distributed(value: Any) -> bool:
    """Return whether a value is a ``DTensor``."""
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")
