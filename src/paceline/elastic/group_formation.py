"""The workers' side of a new group: its store, its process group, and the transfer of the state."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from paceline.core.errors import PeerLostError
from paceline.elastic.worker_channel import AgentClient, Assignment
from paceline.parallel.peer_errors import translate_peer_errors
from paceline.parallel.point_to_point import describe_tensor, empty_tensor, receive_tensor, send_tensor
from paceline.parallel.world import LocalDevice, World, form_group
from paceline.runs.checkpoint_state import flatten, unflatten
from paceline.torch_internals import PrefixStore, Store, TCPStore, restart_group_names

# --- Shutting down a process group's sockets ---
#
# A collective that waits for a peer on an unreachable node, or for a stopped process, waits until its timeout, and no
# abort ends it. Shutting down its sockets on this side ends it at once, because gloo sees a closed connection. After
# that, late messages of the peer cannot reach a buffer.


class GroupSockets:
    """The sockets that were opened to peers between construction and :meth:`opened`."""

    def __init__(self) -> None:
        self._before = set(_sockets().items())
        self._own_sockets: dict[int, str] = {}
        self._is_shut_down = False
        self._lock = threading.Lock()

    def opened(self) -> None:
        """Record the group's connections; call it when all exist."""
        with self._lock:
            new_sockets = {fd: inode for fd, inode in _sockets().items() if (fd, inode) not in self._before}
            self._own_sockets = {fd: inode for fd, inode in new_sockets.items() if _is_connected(fd)}
            if self._is_shut_down:
                self._shut_down()

    def shutdown(self) -> None:
        """Shut the sockets down, from any thread; waiting collectives fail with a lost connection."""
        with self._lock:
            self._is_shut_down = True
            self._shut_down()

    def closed(self) -> None:
        """Forget the sockets, because the group has closed them."""
        with self._lock:
            self._own_sockets.clear()

    def _shut_down(self) -> None:
        current = _sockets()
        for fd, inode in self._own_sockets.items():
            # The descriptor may belong to another socket by now.
            if current.get(fd) == inode:
                with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
        self._own_sockets.clear()


def _sockets() -> dict[int, str]:
    """Return the socket behind each descriptor of one."""
    sockets = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                sockets[int(name)] = target
    return sockets


def _is_connected(fd: int) -> bool:
    """Return whether a descriptor is a TCP connection."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            connection.getpeername()
    except OSError:
        return False
    return True


# --- The process group of one generation ---


_CONNECT_S = 2.0  # the store listens before its address is sent
_HANDSHAKE_S = {"gloo": 10.0, "nccl": 120.0}  # NCCL's rank 0 loads plug-ins and looks for networks first


@contextmanager
def open_process_group(
    assignment: Assignment, agent: AgentClient, *, local: LocalDevice, comm_debug: bool = False
) -> Iterator[World]:
    """Form the process group of a worker group, and leave it on exit.

    Leave it without an active exception, whose frames would keep the group and its connections open; the other members
    detect the exit by the closed connections.

    Args:
        agent: reports at any time that the group is broken.
        local: the device of its tensors.
        comm_debug: verbose logs of NCCL and torch.distributed.

    Raises:
        ConfigError: the members cannot work together.
        PeerLostError: another member did not come, or was lost.
    """
    world = World(
        rank=assignment.rank,
        world_size=assignment.world_size,
        local_rank=assignment.local_rank,
        local_world_size=assignment.local_world_size,
        device=local.device,
        backend=local.backend,
        generation=assignment.generation,
        one_host=assignment.local_world_size == assignment.world_size,
        is_broken=partial(agent.broken, assignment.generation),
        active=assignment.active,
        progress_tracker=agent.progress_tracker,
    )
    _set_rank_variables(assignment)
    if assignment.world_size == 1:
        yield world
        return
    connections = GroupSockets()
    try:
        with ExitStack() as stack:
            try:
                agent.when_broken(assignment.generation, connections.shutdown)
                restart_group_names()
                stack.enter_context(
                    form_group(
                        world,
                        _connect_to_store(assignment, _HANDSHAKE_S[local.backend]),
                        interface=assignment.interface,
                        init_timeout_s=_HANDSHAKE_S[local.backend],
                        comm_debug=comm_debug,
                        formed=connections.opened,
                    )
                )
            except (dist.DistBackendError, torch.OutOfMemoryError, torch.AcceleratorError):
                with translate_peer_errors():
                    raise
            except RuntimeError as error:
                # Any other failure between processes that an agent has grouped means that one of them is gone.
                raise PeerLostError(f"the group could not be formed: {str(error).splitlines()[0]}") from error
            yield world
    finally:
        connections.closed()


def _set_rank_variables(assignment: Assignment) -> None:
    """Set the variables of other launchers, for a task that logs its rank."""
    os.environ.update(
        RANK=str(assignment.rank),
        WORLD_SIZE=str(assignment.world_size),
        LOCAL_RANK=str(assignment.local_rank),
        LOCAL_WORLD_SIZE=str(assignment.local_world_size),
    )


def _connect_to_store(assignment: Assignment, timeout_s: float) -> Store:
    # The plain probe detects at once a store that is closed because its group is obsolete.
    try:
        socket.create_connection((assignment.address, assignment.port), timeout=_CONNECT_S).close()
    except OSError as error:
        raise PeerLostError(f"the group's store is closed: {error.strerror or error}") from error
    store = TCPStore(
        assignment.address,
        assignment.port,
        assignment.world_size,
        is_master=False,
        timeout=timedelta(seconds=_CONNECT_S),
    )
    store.set_timeout(timedelta(seconds=timeout_s))
    return PrefixStore(f"gen{assignment.generation}", store)


# --- The state of a new group, and its transfer ---
#
# A version identifies a state, because a run is a pure function of its options. The members therefore compare versions
# only: the highest valid one wins, and is copied from the lowest rank that has it. Only tensors and JSON are sent.


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


# --- The host of the rendezvous stores, one per generation: a process that worker faults do not affect ---
#
# Commands come over a socket pair, one JSON object per packet: ``{"open": generation}`` with a bound and listening
# socket, and ``{"close": generation}``. The agent creates the socket, so it knows the port at once, and early clients
# wait in the backlog. Closing a store resets its clients, which frees members that wait in it for a lost one.
# ``{"done": command}`` answers each command; without an answer the agent considers this process hung, and ends it.


_LONGEST_COMMAND = 4096


def serve_stores(descriptor: int) -> int:
    """Serve until the agent has ended."""
    commands = socket.socket(fileno=descriptor)
    stores: dict[int, TCPStore] = {}
    while True:
        content, descriptors = b"", list[int]()
        with suppress(ConnectionError):  # the agent was killed
            content, descriptors, _, _ = socket.recv_fds(commands, _LONGEST_COMMAND, 1)
        if not content:
            # Exit without waiting for any store's threads.
            os._exit(0)
        command = json.loads(content)
        if "open" in command:
            stores[command["open"]] = _store(descriptors[0])
        else:
            stores.pop(command["close"], None)
        with suppress(ConnectionError):
            commands.send(json.dumps({"done": command}).encode())


def _store(listener: int) -> TCPStore:
    """Create a store on a listening socket, which it then owns."""
    with socket.socket(fileno=os.dup(listener)) as known:
        address, port = known.getsockname()
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener,
    )
