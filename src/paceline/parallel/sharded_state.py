"""State whose tensors are split over ranks: gathered and described."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.core.errors import TaskError

# --- What to say where a model takes a split layer's weight past the layer ---


@contextmanager
def explain_dtensor_mixing() -> Iterator[None]:
    """Say what to do where a model uses a split layer's weight past the layer itself.

    Raises:
        TaskError: it does.
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


# --- States of sharded parameters: gathered whole, as one process would have them, and laid out again ---
#
# ``torch.distributed.tensor`` takes long to import; it is, where there are such parameters.


class ShardedOptimizer(Optimizer, ABC):
    """An optimizer that keeps gradients and state apart from the parameters of its groups."""

    @abstractmethod
    def gradients(self) -> list[torch.Tensor]:
        """This rank's parts of a step's gradients, which may be changed in place."""

    @abstractmethod
    def load_state_dict(self, state_dict: Any) -> None:
        """Keep this rank's part of a state as one process has it; all ranks call this together."""


def gather_full(state: Any, *, keep: bool = True) -> Any:
    """The same state with every distributed tensor whole, on the CPU; all ranks call this together.

    Args:
        state: mappings, lists and tuples of tensors and other values.
        keep: False on ranks that do not need the result: they take part, and hold one tensor at a time.
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
    """Load a whole state into a module whose parameters may be distributed.

    Raises:
        RuntimeError: names or shapes differ.
    """
    now = module.state_dict()
    module.load_state_dict(
        {name: distribute_like(value, now[name]) if name in now else value for name, value in state.items()}
    )


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a whole state into an optimizer of parameters that may be distributed."""
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.load_state_dict(state)
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    laid = {
        number: {name: distribute_like(value, parameters[int(number)]) for name, value in values.items()}
        for number, values in state["state"].items()
        if not parameters[int(number)].is_meta  # another rank holds it
    }
    optimizer.load_state_dict({**state, "state": laid})


def distribute_like(value: Any, like: Any) -> Any:
    """A whole tensor, distributed as ``like`` is, or on ``meta`` where another rank holds it.

    Anything else is returned as it is. No rank needs another for it.
    """
    if isinstance(value, torch.Tensor) and isinstance(like, torch.Tensor) and like.is_meta:
        return value.to("meta")
    if not (isinstance(value, torch.Tensor) and is_distributed(like) and value.shape == like.shape):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    if not is_distributed(tensor):
        return tensor
    part = tensor.to_local()  # type: ignore[attr-defined]
    assert isinstance(part, torch.Tensor)
    return part


def distributed_part(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor of which this rank holds ``part``, distributed as ``like`` is; no copy is made."""
    if not is_distributed(like):
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def is_distributed(value: Any) -> bool:
    """Whether this is a ``DTensor``."""
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")
