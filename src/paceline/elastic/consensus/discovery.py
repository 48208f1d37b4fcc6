"""How the agents of a job find each other, and who takes part."""

from __future__ import annotations

import errno
import json
import math
import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any

from paceline import __version__
from paceline.core.access import TOKEN_BYTES, create_token, read_token
from paceline.core.environment import parse_endpoint
from paceline.core.errors import ConfigError, RunDirectoryError
from paceline.core.files import write_atomically
from paceline.core.launch_spec import LaunchSpec
from paceline.core.sockets import (
    address_towards,
    interface_address,
    interface_of,
    is_ours,
    meeting_address,
)
from paceline.elastic.consensus.messages import AddressBook, Message, NodeSet, write
from paceline.elastic.consensus.transport import Address, Listener, PeerNetwork
from paceline.elastic.consensus.witness import FileWitness
from paceline.elastic.controller import print_status
from paceline.runs.directory import RunDirectory

# --- How the agents of a job find each other: by an address, a shared directory and a secret in it. No
#     torch
#
# The run's directory is the same one on all machines. The first agent writes ``agents.json`` there, which
# tells where it listens and which leases are this job's, and ``agents.token``, the secret that links need.


_LOOK_EVERY_S = 0.2
_ANSWERS_S = 2.0  # a machine that is gone does not refuse: it says nothing
_DISTRIBUTIONS = ("torch", "numpy")

Agent = tuple[str, tuple[str, int]]
"""An agent's name, and where it listens."""


@dataclass(frozen=True)
class DiscoveryInfo:
    """What an agent needs to meet the others.

    Attributes:
        name: this agent's; no other one, before or after it, has the same.
        founds: whether it is the first.
        address: of this machine, on the way to the others.
        interface: the network interface with that address.
        endpoints: where to call first.
        token: the job's secret.
        hello: what others learn of this agent with the handshake.
        witness: breaks ties among the agents, where this one founds the job; others learn of it by a hello.
    """

    name: str
    is_first: bool
    address: str
    interface: str
    endpoints: tuple[tuple[str, int], ...]
    token: bytes
    listener: Listener
    hello: dict[str, Any]
    witness: FileWitness | None


def discover(spec: LaunchSpec, directory: RunDirectory) -> DiscoveryInfo:
    """Listen, and find out whom to call.

    Args:
        spec: the job's.
        directory: the run's.

    Raises:
        ConfigError: an address or the token file cannot work, or the job to join cannot be found.
        RunDirectoryError: the directory cannot be written.
    """
    if spec.rdzv_endpoint is not None:
        endpoints = [parse_endpoint(spec.rdzv_endpoint, "--rdzv-endpoint")]
    else:
        endpoints = [address for _, address in read_agents(directory)[0]]
    host, port = endpoints[0]
    if spec.interface is not None:
        address = interface_address(spec.interface)
    elif is_ours(host):
        address = socket.gethostbyname(host)
    else:
        address = address_towards(host, port)
    name = f"{socket.gethostname()}-{secrets.token_hex(3)}"
    versions = {**_versions(), "task": spec.task_code}
    hello: dict[str, Any] = {"name": name, "versions": versions}
    may_found = not spec.joins and (spec.node_rank == 0 or (spec.node_rank is None and is_ours(host)))
    token = _token(spec, directory, creates=may_found)
    listener = None
    if may_found:
        try:
            listener = Listener(_where_looked_for(host, address, spec.interface), port, token, hello)
        except ConfigError as error:
            taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
            if spec.node_rank == 0 or not taken:
                raise
    founds = listener is not None
    if listener is None:
        listener = Listener(address, 0, token, hello)
    hello |= {"host": listener.host, "port": listener.port}
    witness = None
    if founds:
        witness = FileWitness.create(directory.path / "agents")
        hello["lease"] = witness.key
        record_agents(directory, [(name, (listener.host, listener.port))], spec.command[-1])
    return DiscoveryInfo(
        name=name,
        is_first=founds,
        address=address,
        interface=interface_of(address),
        endpoints=tuple(endpoints),
        token=token,
        listener=listener,
        hello=hello,
        witness=witness,
    )


def _where_looked_for(host: str, address: str, interface: str | None) -> str:
    """The address for the other agents, which is another one than the workers' where the networks differ."""
    return address if interface is None else socket.gethostbyname(meeting_address(host, interface))


def record_agents(directory: RunDirectory, agents: Sequence[Agent], job: str) -> None:
    """Write where the agents listen, and the job that they do, for those that join by the directory alone."""
    content = {"job": Path(job).name, "agents": [[name, *address] for name, address in agents]}
    write_atomically(directory.agents, (json.dumps(content) + "\n").encode())


def read_agents(directory: RunDirectory) -> tuple[list[Agent], Path]:
    """Where the agents listen, and the file of the job that they do.

    Raises:
        ConfigError: the directory does not say.
    """
    try:
        content = json.loads(directory.agents.read_bytes())
        agents = [(str(name), (str(host), int(port))) for name, host, port in content["agents"]]
        if agents:
            return agents, directory.path / content["job"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ConfigError(
        f"{directory.path} does not say where its agents are: either the run was started on one machine "
        "alone, or this is not the directory that its machines share. "
        "Start a run that others can join with --nodes MIN:MAX and --rdzv-endpoint HOST:PORT."
    )


def active_agents(directory: RunDirectory) -> bool:
    """Whether an agent answers where the directory says: a machine that comes now has to join it."""
    try:
        agents, _ = read_agents(directory)
    except ConfigError:
        return False
    for _, address in agents:
        with suppress(OSError), socket.create_connection(address, timeout=_ANSWERS_S):
            return True
    return False


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """In words, what another agent runs that this one does not."""
    mine, other = ours["versions"], theirs.get("versions")
    if not isinstance(other, dict):
        other = {}
    return [
        f"{name} is {other.get(name, 'missing')} there and {mine.get(name, 'missing')} here"
        for name in sorted({*mine, *other})
        if mine.get(name) != other.get(name)
    ]


def _token(spec: LaunchSpec, directory: RunDirectory, creates: bool) -> bytes:
    path = spec.token_file or directory.path / "agents.token"
    if creates and spec.token_file is None and not path.exists():
        with suppress(ConfigError):  # another agent on this machine was faster
            return create_token(path)
    deadline = time.monotonic() + spec.init_timeout_s
    while True:
        # Asked before the read: the first agent may be writing it right now.
        was_whole = _is_whole(path)
        try:
            return read_token(path)
        except ConfigError:
            # The first agent may not have written it yet, and a shared file system may be late.
            if spec.token_file is not None or time.monotonic() > deadline or was_whole:
                raise
            time.sleep(_LOOK_EVERY_S)


def _is_whole(path: Path) -> bool:
    """Whether all of a token file is there, so that waiting does not mend it."""
    try:
        return path.stat().st_size > 2 * TOKEN_BYTES
    except OSError:
        return False


def _versions() -> dict[str, str]:
    found = {"paceline": __version__, "python": ".".join(python_version().split(".")[:2])}
    for distribution in _DISTRIBUTIONS:
        try:
            found[distribution] = version(distribution)
        except PackageNotFoundError:
            found[distribution] = "missing"
    return found


# --- The other machines' agents: the links to them, where they listen, and who belongs here. No torch ---


_SHOWS_S = 10.0  # how late a shared file system may show what another machine has made there


class PeerDirectory:
    """What an agent knows of the others of its job.

    Args:
        spec: the job's, as this machine was given it.
        directory: the run's; the same one on all machines.
        meeting: how to meet the others.
        network: the links to them.

    Attributes:
        name: this agent's.
        address: of this machine, on the way to the others.
        founds: whether this agent is the first.
    """

    def __init__(self, spec: LaunchSpec, directory: RunDirectory, meeting: DiscoveryInfo, network: PeerNetwork) -> None:
        self._spec, self._directory, self._meeting, self._network = spec, directory, meeting, network
        self.name = meeting.name
        self.address = meeting.address
        self.is_first = meeting.is_first
        self._witness = meeting.witness
        self._book: list[tuple[str, Address]] = []  # where the agents listen, in the order in which they came
        self._give_up_at = math.inf  # looking for the others
        self._unseen_until = math.inf  # the first agent's directory, by this machine
        self._unseen_by = ""
        self._no_witness = ""  # why the last one could not be taken

    def begin(self) -> None:
        """Look for the others, unless this agent is the first."""
        if not self.is_first:
            self._give_up_at = time.monotonic() + self._spec.init_timeout_s
            self._network.call(self._meeting.endpoints)

    def stop_looking(self) -> None:
        """The others are found."""
        self._give_up_at = math.inf

    # Time.

    @property
    def deadline(self) -> float:
        """When :meth:`expire` is due, by the monotonic clock."""
        return min(self._network.deadline, self._give_up_at, self._unseen_until)

    def expire(self, now: float) -> str:
        """Do what is due; return why to give up, or "" to go on."""
        if now >= self._network.deadline:
            self._network.expire(now)
        if now >= self._unseen_until:
            self._unseen_until = math.inf
            return (
                f"{self._directory.path} is not the directory that {self._unseen_by} uses: a run that "
                "survives the loss of machines needs one that all of them share. Give its path with "
                "--run-dir DIR, or use --recover none."
            )
        if now >= self._give_up_at:
            self._give_up_at = math.inf
            where = ", ".join(f"{host}:{port}" for host, port in self._meeting.endpoints)
            return (
                f"no agent of this run answers at {where} ({self._network.last_error or 'no answer'}). "
                "Start the first machine, check the address and the firewall; --init-timeout says how long "
                "to wait."
            )
        return ""

    # Links.

    def send(self, peer: str | None, message: Message) -> None:
        """Send; nothing happens where there is no link."""
        if peer is not None:
            self._network.send(peer, write(message))

    def drop(self, peer: str) -> None:
        """End the link with a peer; where this agent had called it, it calls again."""
        self._network.drop(peer)

    def sees_directory_of(self, peer: str, hello: Mapping[str, Any]) -> bool:
        """Whether the run's directory here is the one that a newly linked peer uses.

        A file system may show it late: then the link is to be dropped, and this is asked again with the
        next one. It has its limit, which :meth:`expire` notices.
        """
        if self._witness is not None or "lease" not in hello:
            return True
        lease = FileWitness(self._directory.path / "agents", str(hello["lease"]))
        if not lease.is_shared():
            self._unseen_by = peer
            self._unseen_until = min(self._unseen_until, time.monotonic() + _SHOWS_S)
            return False
        self._unseen_until = math.inf
        self._witness = lease
        self._meeting.hello["lease"] = lease.key
        return True

    def acquire_witness(self, roster: NodeSet, winners: frozenset[str]) -> frozenset[str] | None:
        """Break a tie: who has won it; None where that cannot be found out."""
        if self._witness is None:
            return None
        try:
            held_by = self._witness.acquire(roster, winners)
        except RunDirectoryError as error:
            if str(error) != self._no_witness:  # it is asked for every second, for as long as a disk is full
                self._no_witness = str(error)
                print_status(self._no_witness)
            return None
        self._no_witness = ""
        return held_by

    # The leader's part: who may come, and where all of them listen.

    def rejection_reason(self, peer: str, others: int) -> str:
        """Why a peer cannot take part; "" where it can.

        Args:
            peer: its name.
            others: how many others compete with it for a place; 0 where it has one.
        """
        foreign = differences(self._meeting.hello, self._network.hello_of(peer))
        if foreign:
            return f"this machine's software or task is not the run's: {'; '.join(foreign)}. Make them equal."
        most = self._spec.nodes[1]
        if others >= most:
            return f"the run has its {most} machines already (--nodes)."
        return ""

    def add_self(self) -> None:
        """Note where this agent listens."""
        if self.name not in dict(self._book):
            listener = self._network.listener
            self._book.append((self.name, (listener.host, listener.port)))

    def add(self, peer: str, nodes: Iterable[str]) -> None:
        """Note where a peer listens, and tell all ``nodes``."""
        address = self._network.address_of(peer)
        if address is not None and peer not in dict(self._book):
            self._book.append((peer, address))
            self._share_book(nodes)

    def remove(self, peer: str, nodes: Iterable[str]) -> None:
        """A peer is gone: tell all ``nodes``."""
        if peer in dict(self._book):
            self._book = [(name, address) for name, address in self._book if name != peer]
            self._share_book(nodes)

    def _share_book(self, nodes: Iterable[str]) -> None:
        with suppress(OSError):
            record_agents(self._directory, self._book, self._spec.command[-1])
        for peer in nodes:
            self.send(peer, AddressBook(tuple(self._book)))

    # The follower's.

    def update(self, book: AddressBook) -> None:
        """Link to all that came before this one: later ones link to it."""
        self._book = list(book.agents)
        earlier = []
        for name, address in self._book:
            if name == self.name:
                break
            earlier.append(address)
        self._network.call(earlier)
