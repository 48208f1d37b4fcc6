"""The state of a new group, and its transfer.

A version identifies a state, because a run is a pure function of its options. The members therefore compare versions
only: the highest valid one wins, and is copied from the lowest rank that has it. Only tensors and JSON are sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from paceline.parallel.peer_errors import translate_peer_errors
from paceline.parallel.world import World
from paceline.runs.checkpoint_state import flatten, unflatten


class StateSource(NamedTuple):
    """The source of a group's state.

    Attributes:
        source: the lowest rank with the highest version; None if no rank has a state.
        version: that version; -1 without one.
        behind: the ranks without it.
    """

    source: int | None
    version: int
    behind: tuple[int, ...]


def elect_source(world: World, *, valid: bool, version: int) -> StateSource:
    """Compare the states of all ranks; a collective.

    Args:
        world: the ranks.
        valid: whether this rank's state is complete.
        version: its version.

    Raises:
        PeerLostError: a rank is gone.
    """
    versions: list[int] = world.all_gather_object(version if valid else -1)
    highest = max(versions)
    if highest < 0:
        return StateSource(None, -1, ())
    behind = tuple(rank for rank, held in enumerate(versions) if held != highest)
    return StateSource(versions.index(highest), highest, behind)


def transfer_state(world: World, agreement: StateSource, state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Copy the source's state to the ranks that lack it; a collective.

    Args:
        world: the ranks.
        agreement: source and receivers.
        state: the source's, as for ``flatten``; ignored elsewhere.

    Returns:
        The state, with tensors of its own, on ranks that lacked it; None on the others.

    Raises:
        PeerLostError: a rank is gone; a partial state is dropped.
    """
    source, behind = agreement.source, agreement.behind
    if source is None or not behind:
        return None
    tensors: dict[str, torch.Tensor] = {}
    content: dict[str, Any] = {}
    if world.rank == source:
        assert state is not None
        tensors, skeleton = flatten(state)
        shapes = {name: [_name(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
        content = {"skeleton": skeleton, "tensors": shapes}
    content = world.broadcast_object(content, source)
    world.progress_tracker.begin_collective("hand-over")
    if world.rank == source:
        with translate_peer_errors():
            _send(world, list(tensors.values()), behind)
    if world.rank not in behind:
        world.progress_tracker.end_collective()
        return None
    received = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device=world.device)
        for name, (dtype, shape) in content["tensors"].items()
    }
    with translate_peer_errors():
        for tensor in received.values():
            if tensor.numel():
                dist.recv(_bytes(tensor), src=source, group=world.group)
    world.progress_tracker.end_collective()
    return dict(unflatten(received, content["skeleton"]))


def _send(world: World, tensors: Sequence[torch.Tensor], behind: Sequence[int]) -> None:
    for tensor in tensors:
        if tensor.numel():
            content = _bytes(tensor.detach().contiguous())
            works = [dist.isend(content, dst=rank, group=world.group) for rank in behind]
            for work in works:
                assert work is not None
                work.wait()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes, because not every dtype can be sent."""
    return tensor.reshape(-1).view(torch.uint8)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
