"""The state of a new group, and its transfer.

A version identifies a state, because a run is a pure function of its options. The members therefore compare versions
only: the highest valid one wins, and is copied from the lowest rank that has it. Only tensors and JSON are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from paceline.parallel.point_to_point import describe_tensor, empty_tensor, receive_tensor, send_tensor
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
        descriptions = {name: describe_tensor(tensor) for name, tensor in tensors.items()}
        content = {"skeleton": skeleton, "tensors": descriptions}
    content = world.broadcast_object(content, source)
    world.progress_tracker.begin_collective("hand-over")
    received: dict[str, torch.Tensor] | None = None
    if world.rank == source:
        for tensor in tensors.values():
            send_tensor(world, tensor, behind)
    elif world.rank in behind:
        received = {}
        for name, description in content["tensors"].items():
            received[name] = empty_tensor(description, world.device)
            receive_tensor(world, received[name], source)
    world.progress_tracker.end_collective()
    return None if received is None else dict(unflatten(received, content["skeleton"]))
