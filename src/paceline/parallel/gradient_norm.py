"""The norm of possibly sharded gradients, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from paceline.parallel.peer_errors import translate_peer_errors
from paceline.parallel.sharded_state import is_distributed, local_shard
from paceline.torch_internals import foreach_mul_, foreach_norm


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Scale the gradients such that the 2-norm of all of them, over all ranks, is at most ``max_norm``.

    Without sharded gradients this is ``torch.nn.utils.clip_grad_norm_``; with them it is a collective. torch's function
    does not support a mix of plain and distributed parameters.

    Raises:
        PeerLostError: a rank is gone.
    """
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    gradients: list[Any] = [parameter.grad for parameter in with_gradient]
    if not any(is_distributed(gradient) for gradient in gradients):
        nn.utils.clip_grad_norm_(with_gradient, max_norm)
        return
    # Sum shards along the mesh dimensions over which they are sharded; replicated gradients count once.
    spread: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        spread.setdefault(_dimensions(gradient), []).append(local_shard(gradient))
    squares = [_square(parts, dimensions) for dimensions, parts in spread.items()]
    norm = torch.stack(squares).sum().sqrt()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parts in spread.values():
        foreach_mul_(parts, factor.to(parts[0].dtype))


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
