"""How a worker enters a group, and gets the training state from another."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from paceline.core.errors import PeerLostError
from paceline.core.sockets import loopback_interface
from paceline.elastic.worker_channel import AgentClient, Assignment
from paceline.parallel.world import World, collect_at_exit, translate_peer_errors
from paceline.runs.checkpoint_state import flatten, unflatten

# --- A process group's own connections, and how to cut them ---
#
# A collective that waits for a peer whose machine is unreachable, or whose process is stopped, waits until
# its time-out: no abort ends it, as there is nothing to be read. But it ends at once when its sockets are
# shut down on this side: to gloo, that is a peer that closed the connection. And after it nothing that the
# peer still sends can reach a buffer.


class GroupSockets:
    """The sockets that were opened to peers between construction and :meth:`opened`."""

    def __init__(self) -> None:
        self._before = set(_sockets().items())
        self._mine: dict[int, str] = {}
        self._cut = False
        self._lock = threading.Lock()

    def opened(self) -> None:
        """All of the group's connections are there now."""
        with self._lock:
            mine = {fd: inode for fd, inode in _sockets().items() if (fd, inode) not in self._before}
            self._mine = {fd: inode for fd, inode in mine.items() if _is_connected(fd)}
            if self._cut:
                self._shut_down()

    def shutdown(self) -> None:
        """End them, from any thread; whoever waits for a peer is freed with a lost connection."""
        with self._lock:
            self._cut = True
            self._shut_down()

    def closed(self) -> None:
        """The group has closed them itself; from now on :meth:`cut` does nothing."""
        with self._lock:
            self._mine.clear()

    def _shut_down(self) -> None:
        now = _sockets()
        for fd, inode in self._mine.items():
            # The number may be another socket's by now.
            if now.get(fd) == inode:
                with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
        self._mine.clear()


def _sockets() -> dict[int, str]:
    """What each descriptor that is a socket refers to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[int(name)] = target
    return found


def _is_connected(fd: int) -> bool:
    """Whether it is a TCP connection."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            connection.getpeername()
    except OSError:
        return False
    return True


# --- Which state a new view continues from, and how those get it who do not hold it ---
#
# A state is identified by its version, for a run is a pure function of its options. So the members only
# compare numbers: the highest version that some member holds whole wins, and is copied from the lowest
# rank that holds it. Only tensors and JSON are sent.


class StateSource(NamedTuple):
    """What the members of a view found out about their states.

    Attributes:
        source: the lowest rank that holds the highest version; None where nobody holds a state.
        version: that version; -1 where there is none.
        behind: the ranks that lack it.
    """

    source: int | None
    version: int
    behind: tuple[int, ...]


def elect_source(world: World, *, valid: bool, version: int) -> StateSource:
    """Compare the states of all ranks.

    Args:
        world: the ranks; all of them call this together.
        valid: this rank's state is whole.
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
    """A contiguous tensor's bytes: not every dtype can be sent, but bytes can."""
    return tensor.reshape(-1).view(torch.uint8)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- From a view to a world: the process group of one generation ---


_CONNECT_S = 2.0  # the store listens before anybody is told of it
_HANDSHAKE_S = 10.0
_COLLECTIVE_S = 1800.0


@contextmanager
def open_process_group(place: Assignment, member: AgentClient, *, device: torch.device) -> Iterator[World]:
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
        is_broken=partial(member.broken, place.generation),
        active=place.active,
        progress_tracker=member.progress_tracker,
    )
    _tell_user_code(place)
    if place.world_size == 1:
        yield world
        return
    collect_at_exit()
    connections = GroupSockets()
    try:
        try:
            member.when_broken(place.generation, connections.shutdown)
            _form(place, "cpu:gloo,cuda:nccl" if on_gpu else "gloo")
            connections.opened()
        except RuntimeError as error:
            # Whatever goes wrong between processes that an agent has brought together, one of them has gone.
            raise PeerLostError(f"a view could not be formed: {str(error).splitlines()[0]}") from error
        yield world
    finally:
        world.cleanup.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        connections.closed()


def _tell_user_code(place: Assignment) -> None:
    """Set the variables that other launchers set, for a task that logs its rank."""
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_world_size),
    )


def _form(place: Assignment, backend: str) -> None:
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
