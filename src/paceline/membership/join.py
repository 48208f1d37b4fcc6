"""From a view to a world: the process group of one generation."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from paceline.distributed.connections import Connections
from paceline.distributed.sockets import loopback_interface
from paceline.distributed.world import World, collect_at_exit
from paceline.errors import PeerLostError
from paceline.membership.channel import Place
from paceline.membership.member import Member

_CONNECT_S = 2.0  # the store listens before anybody is told of it
_HANDSHAKE_S = 10.0
_COLLECTIVE_S = 1800.0


@contextmanager
def open_view(place: Place, member: Member, *, device: torch.device) -> Iterator[World]:
    """Form a view with its other members, and leave it at exit.

    Leave it without an exception under way: its frames would keep the group and its connections open,
    and the others notice by the closed ones that this rank has left.

    Args:
        place: this worker's.
        member: hears, at any time, that the view is broken.
        device: where its tensors are.

    Raises:
        PeerLostError: another member did not come, or was lost.
    """
    on_gpu = device.type == "cuda"
    world = World(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        device=device,
        backend="nccl" if on_gpu else "gloo",
        generation=place.generation,
        one_host=place.local_world_size == place.world_size,
        abandoned=partial(member.broken, place.generation),
        computing=place.computing,
        activity=member.activity,
    )
    _tell_user_code(place)
    if place.world_size == 1:
        yield world
        return
    collect_at_exit()
    connections = Connections()
    try:
        try:
            member.when_broken(place.generation, connections.cut)
            _form(place, "cpu:gloo,cuda:nccl" if on_gpu else "gloo")
            connections.opened()
        except RuntimeError as error:
            # Whatever goes wrong between processes that an agent has brought together, one of them has gone.
            raise PeerLostError(f"a view could not be formed: {str(error).splitlines()[0]}") from error
        yield world
    finally:
        world.ending.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        connections.closed()


def _tell_user_code(place: Place) -> None:
    """Set the variables that other launchers set, for a task that logs its rank."""
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_world_size),
    )


def _form(place: Place, backend: str) -> None:
    handshake = timedelta(seconds=_HANDSHAKE_S)
    # The plain probe finds at once that a store is closed, because its view is void already.
    try:
        socket.create_connection((place.address, place.port), timeout=_CONNECT_S).close()
    except OSError as error:
        raise PeerLostError(f"the view's store is closed: {error.strerror or error}") from error
    store = TCPStore(
        place.address, place.port, place.world_size, is_master=False, timeout=timedelta(seconds=_CONNECT_S)
    )
    store.set_timeout(handshake)
    os.environ["GLOO_SOCKET_IFNAME"] = place.interface or loopback_interface()
    # The group's name is in its keys. It is counted, also when a group could not be made, and so
    # members that failed at different places would never meet again.
    _world.group_count = 0
    dist.init_process_group(
        backend,
        store=PrefixStore(f"gen{place.generation}", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=handshake,
    )
    # Members may train or evaluate at different speeds for longer than they may take to meet.
    _set_pg_timeout(timedelta(seconds=_COLLECTIVE_S), dist.group.WORLD)
