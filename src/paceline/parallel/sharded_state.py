"""Sharded state: gathering to full tensors, loading, and the norm of sharded gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.core.errors import ConfigError, TaskError
from paceline.parallel.peer_errors import translate_peer_errors
from paceline.runs.checkpoint_shards import StoredTensor
from paceline.runs.checkpoint_state import TensorShard
from paceline.torch_internals import foreach_mul_, foreach_norm, has_gradient_hook, tree_map, tree_map_only

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


def require_no_hook(strategy: str, name: str, parameter: nn.Parameter) -> None:
    """Reject a hook on the gradient of a parameter that another one replaces: it would never run.

    Raises:
        ConfigError: names the parameter.
    """
    if has_gradient_hook(parameter):
        raise ConfigError(
            f"--strategy {strategy} replaces the parameter {name!r} by its shard, so the hook on its gradient "
            "(register_hook) would never run. Change the gradient in the forward, by a torch.autograd.Function, or use "
            "--strategy zero1."
        )


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory as one dimension, with what lies between its elements.

    Collectives take every tensor for a contiguous one. A sparse or distributed tensor is returned as it is.
    """
    if not tensor.numel() or tensor.layout is not torch.strided or is_distributed(tensor):
        return tensor.detach()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((last + 1,), (1,))


def require_own_memory(strategy: str, module: nn.Module) -> None:
    """Reject a parameter that shares elements with another one, or with a buffer: no update would reach the other.

    On a device that is not the CPU, it must come before ``module.to``, which gives each of them its own memory.

    Raises:
        ConfigError: names both.
    """
    parameters = [(t, True, f"the parameter {name!r}") for name, t in module.named_parameters()]
    buffers = [(t, False, f"the buffer {name!r}") for name, t in module.named_buffers()]
    ranges = [
        (t.data_ptr(), t.data_ptr() + memory_of(t).nbytes, is_parameter, name)
        for t, is_parameter, name in parameters + buffers
        if t.layout is torch.strided and t.numel() and not (t.is_meta or is_distributed(t))
    ]
    reached = [(0, ""), (0, "")]  # the last byte so far of buffers, and of parameters
    for begin, end, is_parameter, name in sorted(ranges):
        stop, other = max(reached) if is_parameter else reached[True]
        if begin < stop:
            raise ConfigError(
                f"--strategy {strategy} divides the parameters, but {other} and {name} share memory. Use one "
                "parameter in both places, give each its own memory (clone()), or use --strategy ddp."
            )
        reached[is_parameter] = max(reached[is_parameter], (end, name))


def shards_of(state: Any) -> Any:
    """Return a state with this rank's shard of every distributed tensor, to save it."""

    def shard(value: Any) -> Any:
        if not is_distributed(value):
            return value
        return TensorShard(local_shard(value).detach(), value.shape, tuple(place.start for place in shard_of(value)))

    return tree_map(shard, state)


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
        optimizer.load_state_dict(tree_map_only(StoredTensor, StoredTensor.read, dict(state)))
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

    Of a tensor that is still on the disk, only what is needed is read. Other values are returned unchanged. Needs no
    communication.
    """
    if isinstance(value, StoredTensor):
        if isinstance(like, torch.Tensor) and like.is_meta:
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        if is_distributed(like) and value.shape == like.shape and _is_plainly_sharded(like):
            return distributed_part(value.read(shard_of(like)).to(like.device), like)
        value = value.read()
    if isinstance(value, torch.Tensor) and isinstance(like, torch.Tensor) and like.is_meta:
        return value.to("meta")
    if not (isinstance(value, torch.Tensor) and is_distributed(like) and value.shape == like.shape):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _is_plainly_sharded(tensor: Any) -> bool:
    from torch.distributed.tensor import Shard

    return len(tensor.placements) == 1 and type(tensor.placements[0]) is Shard


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


def shard_of(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Return the place of this rank's shard in the whole tensor."""
    if not is_distributed(tensor):
        return ()
    from torch.distributed.tensor import DTensor

    from paceline.torch_internals import local_shape_and_offset

    assert isinstance(tensor, DTensor)
    sizes, offsets = local_shape_and_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for size, start in zip(sizes, offsets, strict=True))


def is_distributed(value: Any) -> bool:
    """Return whether a value is a ``DTensor``."""
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


# --- The norm of possibly sharded gradients, and clipping by it ---


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale the gradients such that the 2-norm of all of them, over all ranks, is at most ``max_norm``.

    Returns the norm before, a scalar.

    Without sharded gradients this is ``torch.nn.utils.clip_grad_norm_``; with them it is a collective. torch's function
    does not support a mix of plain and distributed parameters.

    Raises:
        PeerLostError: a rank is gone.
    """
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    gradients: list[Any] = [parameter.grad for parameter in with_gradient]
    if not any(is_distributed(gradient) for gradient in gradients):
        return nn.utils.clip_grad_norm_(with_gradient, max_norm)
    # Sum shards along the mesh dimensions over which they are sharded; replicated gradients count once.
    spread: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        spread.setdefault(_dimensions(gradient), []).append(local_shard(gradient))
    squares = [_square(parts, dimensions) for dimensions, parts in spread.items()]
    norm = torch.stack(squares).sum().sqrt()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parts in spread.values():
        foreach_mul_(parts, factor.to(parts[0].dtype))
    return norm


@torch.no_grad()
def norms_of_parts(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the 2-norm of each full gradient, float32 scalars on its device; a collective of these ranks.

    Raises:
        PeerLostError: a rank is gone.
    """
    if not gradients:
        return []
    norms = [norm.float() for norm in foreach_norm([local_shard(gradient) for gradient in gradients])]
    spread: dict[Any, list[int]] = {}
    for number, gradient in enumerate(gradients):
        dimensions = _dimensions(gradient)
        if dimensions[1]:
            spread.setdefault(dimensions, []).append(number)
    for (mesh, along), numbers in spread.items():
        squares = torch.stack([norms[number] for number in numbers]).double().square()
        for dim in along:
            with translate_peer_errors():
                dist.all_reduce(squares, group=mesh.get_group(dim))
        for number, norm in zip(numbers, squares.sqrt().float(), strict=True):
            norms[number] = norm
    return norms


def _dimensions(gradient: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the mesh of a gradient, and its dimensions along which ranks hold different shards."""
    if not is_distributed(gradient):
        return None, ()
    placements = gradient.placements
    assert not any(placement.is_partial() for placement in placements), "a part is not yet a sum"
    sharded_dims = tuple(dim for dim, placement in enumerate(placements) if not placement.is_replicate())
    return (gradient.device_mesh, sharded_dims) if sharded_dims else (None, ())


def _square(parts: list[torch.Tensor], dimensions: tuple[Any, tuple[int, ...]]) -> torch.Tensor:
    """Return the squared norm over all shards, float32."""
    norms = torch.stack([norm.float() for norm in foreach_norm(parts)])
    square = norms.square().sum()
    mesh, along = dimensions
    for dim in along:
        with translate_peer_errors():
            dist.all_reduce(square, group=mesh.get_group(dim))
    return square
