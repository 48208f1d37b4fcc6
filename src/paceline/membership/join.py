"""From a view to a world: the process group of one generation, on one machine."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from paceline.distributed.sockets import LOOPBACK
from paceline.distributed.world import World
from paceline.errors import PeerLostError
from paceline.membership.channel import Place

_CONNECT_S = 2.0  # the store listens before anybody is told of it
_HANDSHAKE_S = 10.0
_COLLECTIVE_S = 1800.0


@contextmanager
def open_view(place: Place, *, device: torch.device, abandoned: Callable[[], bool]) -> Iterator[World]:
    """Form a view with its other members, and leave it at exit.

    Leave it without an exception under way: its frames would keep the group and its connections open,
    and the others notice by the closed ones that this rank has left.

    Args:
        place: this worker's.
        device: where its tensors are.
        abandoned: says, at any time and from any thread, that the view is broken.

    Raises:
        PeerLostError: another member did not come, or was lost.
    """
    world = World(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.rank,
        local_world_size=place.world_size,
        device=device,
        backend="gloo",
        generation=place.generation,
        one_host=True,
        abandoned=abandoned,
    )
    if place.world_size == 1:
        yield world
        return
    try:
        try:
            _form(place)
        except RuntimeError as error:
            # Whatever goes wrong between processes of one machine, one of them has gone.
            raise PeerLostError(f"a view could not be formed: {str(error).splitlines()[0]}") from error
        yield world
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _form(place: Place) -> None:
    handshake = timedelta(seconds=_HANDSHAKE_S)
    # The plain probe finds at once that a store is closed, because its view is void already.
    try:
        socket.create_connection((LOOPBACK, place.port), timeout=_CONNECT_S).close()
    except OSError as error:
        raise PeerLostError(f"the view's store is closed: {error.strerror}") from error
    store = TCPStore(
        LOOPBACK, place.port, place.world_size, is_master=False, timeout=timedelta(seconds=_CONNECT_S)
    )
    store.set_timeout(handshake)
    # The group's name is in its keys. It is counted, also when a group could not be made, and so
    # members that failed at different places would never meet again.
    _world.group_count = 0
    dist.init_process_group(
        "gloo",
        store=PrefixStore(f"gen{place.generation}", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=handshake,
    )
    # Members may train or evaluate at different speeds for longer than they may take to meet.
    _set_pg_timeout(timedelta(seconds=_COLLECTIVE_S), dist.group.WORLD)
