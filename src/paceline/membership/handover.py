"""Which state a new view continues from, and how those get it who do not hold it.

A state is identified by its version, for a run is a pure function of its options. So the members only
compare numbers: the highest version that some member holds whole wins, and is copied from the lowest
rank that holds it. Only tensors and JSON are sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from paceline.checkpoint.state import flatten, unflatten
from paceline.distributed.world import World, lost_peers_reported


class Agreement(NamedTuple):
    """What the members of a view found out about their states.

    Attributes:
        source: the lowest rank that holds the highest version; None where nobody holds a state.
        version: that version; -1 where there is none.
        behind: the ranks that lack it.
    """

    source: int | None
    version: int
    behind: tuple[int, ...]


def agree(world: World, *, valid: bool, version: int) -> Agreement:
    """Compare the states of all ranks.

    Args:
        world: the ranks; all of them call this together.
        valid: this rank's state is whole.
        version: its version.

    Raises:
        PeerLostError: a rank is gone.
    """
    versions: list[int] = world.all_gather_json(version if valid else -1)
    highest = max(versions)
    if highest < 0:
        return Agreement(None, -1, ())
    behind = tuple(rank for rank, held in enumerate(versions) if held != highest)
    return Agreement(versions.index(highest), highest, behind)


def hand_over(world: World, agreement: Agreement, state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Copy the source's state to the ranks that lack it.

    Args:
        world: the ranks; all of them call this together.
        agreement: who gives, and who takes.
        state: the source's, as ``flatten`` takes it; ignored elsewhere.

    Returns:
        The state, of tensors of its own, on ranks that lacked it; None on the others.

    Raises:
        PeerLostError: a rank is gone; what was received so far is dropped.
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
    content = world.broadcast_json(content, source)
    world.activity.enter("hand-over")
    if world.rank == source:
        with lost_peers_reported():
            _send(world, list(tensors.values()), behind)
    if world.rank not in behind:
        world.activity.leave()
        return None
    received = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device=world.device)
        for name, (dtype, shape) in content["tensors"].items()
    }
    with lost_peers_reported():
        for tensor in received.values():
            if tensor.numel():
                dist.recv(_bytes(tensor), src=source, group=world.group)
    world.activity.leave()
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
    """A contiguous tensor's bytes: not every dtype can be sent, but bytes can."""
    return tensor.reshape(-1).view(torch.uint8)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
