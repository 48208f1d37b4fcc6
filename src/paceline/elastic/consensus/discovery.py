"""Discovery of a job's agents, and the directory of peers."""

from __future__ import annotations

import errno
import json
import math
import secrets
import socket
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any, TypeVar

from paceline import __version__
from paceline.core.access import TOKEN_BYTES, create_token, read_token
from paceline.core.environment import parse_endpoint
from paceline.core.errors import ConfigError, RunDirectoryError
from paceline.core.files import SEEN_S, parse_json, read_document, wait_to_see, write_atomically
from paceline.core.job import LaunchSpec
from paceline.core.sockets import (
    address_beside,
    has_interface,
    interface_address,
    interface_of,
    is_ours,
    meeting_address,
)
from paceline.core.standard_streams import print_status
from paceline.elastic.consensus.messages import AddressBook, Message, NodeSet, write
from paceline.elastic.consensus.transport import Address, Listener, PeerNetwork, agent_name, is_agent
from paceline.elastic.consensus.witness import FileWitness
from paceline.elastic.node import FileWork
from paceline.runs.directory import RunDirectory

# --- Discovery by an address, a shared directory and a secret in it. No torch
#
# All nodes share the run directory. The first agent writes ``agents.json`` there, with its address, and
# ``agents.token``, the secret for connections.


_LOOK_EVERY_S = 0.2
_NO_NETWORK = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL, socket.EAI_AGAIN)
_ANSWERS_S = 2.0  # a lost node does not refuse connections, it does not answer
_DISTRIBUTIONS = ("torch", "numpy")

Agent = tuple[str, tuple[str, int]]
"""An agent's name, and its address."""


@dataclass(frozen=True)
class DiscoveryInfo:
    """The result of the discovery.

    Attributes:
        name: this agent's unique name.
        address: of this node, for the others.
        interface: the network interface with that address.
        endpoints: the first addresses to connect to.
        token: the job's secret.
        hello: the fields that this agent sends in the handshake.
        witness: breaks ties among the agents; None unless this one starts the job: others receive it in the hello.
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
    """Listen, and determine the addresses to connect to.

    Raises:
        ConfigError: an address or the token file is invalid, or the job to join is not found.
        RunDirectoryError: the directory cannot be written.
    """
    if spec.placement.rdzv_endpoint is not None:
        endpoints = [parse_endpoint(spec.placement.rdzv_endpoint, "--rdzv-endpoint")]
    else:
        endpoints = [address for _, address in read_agents(directory)[0]]
    host, port = endpoints[0]
    address = _own_address(spec, host, port)
    if spec.interface is None and is_ours(host):
        endpoints[0] = address, port
    name = f"{socket.gethostname()}-{secrets.token_hex(3)}"
    coordinator = (
        "embedded" if spec.recovery.coordinator is None else "etcds" if spec.recovery.coordinator.tls else "etcd"
    )
    versions = {**_versions(), "task": spec.recovery.task_digest, "coordinator": coordinator}
    hello: dict[str, Any] = {"name": name, "versions": versions}
    may_be_first = not spec.placement.joins and (
        spec.placement.node_rank == 0 or (spec.placement.node_rank is None and is_ours(host))
    )
    token = _token(spec, directory, creates=may_be_first)
    listener = None
    if may_be_first:
        try:
            listener = Listener(_listen_address(host, address, spec.interface), port, token, hello)
        except ConfigError as error:
            is_in_use = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
            if spec.placement.node_rank == 0 or not is_in_use:
                raise
    is_first = listener is not None
    if listener is None:
        listener = Listener(address, 0, token, hello)
    hello |= {"host": listener.host, "port": listener.port}
    witness = None
    if is_first:
        witness = FileWitness.create(directory.path / "agents")
        hello["lease"] = witness.key
    return DiscoveryInfo(
        name=name,
        is_first=is_first,
        address=address,
        interface=interface_of(address),
        endpoints=tuple(endpoints),
        token=token,
        listener=listener,
        hello=hello,
        witness=witness,
    )


def _own_address(spec: LaunchSpec, host: str, port: int) -> str:
    """Return this node's address for the others; wait for its network, which may come up later than this command.

    Raises:
        ConfigError: there is no route within ``--init-timeout``, no such host or no such interface.
    """
    deadline, has_told = time.monotonic() + spec.recovery.init_timeout_s, False
    while True:
        try:
            if spec.interface is not None:
                return interface_address(spec.interface)
            return address_beside(host, port)
        except ConfigError as error:
            comes_later = isinstance(error.__cause__, OSError) and error.__cause__.errno in _NO_NETWORK
            if spec.interface is not None:
                comes_later = has_interface(spec.interface)
            if not comes_later or time.monotonic() > deadline:
                raise
            if not has_told:
                has_told = True
                print_status(f"this node waits for its network: {error}")
        time.sleep(_LOOK_EVERY_S)


def _listen_address(host: str, address: str, interface: str | None) -> str:
    """Return the address for the other agents; it differs from the workers' if the networks do."""
    return address if interface is None else socket.gethostbyname(meeting_address(host, interface))


def record_agents(directory: RunDirectory, agents: Sequence[Agent], job_file: Path) -> None:
    """Write the agents' addresses, and the job's file, for nodes that join by the directory alone."""
    content = {"job": job_file.name, "agents": [[name, *address] for name, address in agents]}
    write_atomically(directory.agents, (json.dumps(content) + "\n").encode())


def read_agents(directory: RunDirectory) -> tuple[list[Agent], Path]:
    """Return the agents' addresses, and the job's file.

    Raises:
        ConfigError: the directory does not contain them.
    """
    try:
        content = parse_json(read_document(directory.agents))
        agents = [(str(name), (str(host), int(port))) for name, host, port in content["agents"]]
        if agents:
            return agents, directory.path / content["job"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ConfigError(
        f"{directory.path} contains no addresses of agents: either the run was started on one node "
        "only, or this is not the directory that its nodes share. "
        "Start a run that others can join with --nodes MIN:MAX and --rdzv-endpoint HOST:PORT."
    )


def active_agents(directory: RunDirectory, own: Address | None = None, token_file: Path | None = None) -> bool:
    """Return whether an agent of the run answers at a recorded address, so that a new node has to join it.

    Args:
        own: an address at which this process listens; an earlier agent may have recorded the same.
        token_file: ``--token-file``, if the run's secret is not in its directory.
    """
    try:
        agents, _ = read_agents(directory)
    except ConfigError:
        return False
    others = [agent for agent in agents if agent[1] != own]
    # All at once: each lost node takes the whole time.
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        return any(pool.map(partial(_is_active, token_file or _token_of(directory)), others))


def _is_active(token_file: Path, agent: Agent) -> bool:
    """Return whether this agent answers: another run's may have its port by now."""
    name, address = agent
    try:
        token = read_token(token_file)
    except ConfigError:
        return is_agent(address, _ANSWERS_S)  # only its own nodes have the secret
    return agent_name(address, token, _ANSWERS_S) == name


def _token_of(directory: RunDirectory) -> Path:
    return directory.path / "agents.token"


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Describe the differences between another agent's software and this one's."""
    own, other = ours["versions"], theirs.get("versions")
    if not isinstance(other, dict):
        other = {}
    return [
        f"{name} is {other.get(name, 'missing')} there and {own.get(name, 'missing')} here"
        for name in sorted({*own, *other})
        if own.get(name) != other.get(name)
    ]


def _token(spec: LaunchSpec, directory: RunDirectory, creates: bool) -> bytes:
    path = spec.recovery.token_file or _token_of(directory)
    if creates and spec.recovery.token_file is None and not path.exists():
        with suppress(ConfigError):  # another agent on this node was faster
            create_token(path)
    deadline = time.monotonic() + spec.recovery.init_timeout_s
    if spec.recovery.token_file is None:
        wait_to_see(path, print_status, spec.recovery.init_timeout_s)
    while True:
        # Checked before the read, because the first agent may be writing it right now.
        was_whole = _is_whole(path)
        try:
            return read_token(path)
        except ConfigError:
            # The first agent may not have written all of it yet.
            if spec.recovery.token_file is not None or time.monotonic() > deadline or was_whole:
                raise
            time.sleep(_LOOK_EVERY_S)


def _is_whole(path: Path) -> bool:
    """Return whether a token file is complete, so that waiting cannot help."""
    try:
        return path.stat().st_size > 2 * TOKEN_BYTES
    except OSError:
        return False


def _versions() -> dict[str, str]:
    versions = {"paceline": __version__, "python": ".".join(python_version().split(".")[:2])}
    for distribution in _DISTRIBUTIONS:
        try:
            versions[distribution] = version(distribution)
        except PackageNotFoundError:
            versions[distribution] = "missing"
    return versions


# --- The peers: connections, addresses and admission. No torch ---


_LOOK_AGAIN_S = 5.0
T = TypeVar("T")


class PeerDirectory:
    """An agent's directory of the other agents of its job.

    Args:
        spec: the job's, as given on this node.
        directory: the run's, shared by all nodes.
        discovery: the result of the search for the others.
        network: the links to them.

    Attributes:
        name: this agent's.
        address: of this node, for the others.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        directory: RunDirectory,
        discovery: DiscoveryInfo,
        network: PeerNetwork,
        files: FileWork,
    ) -> None:
        self._spec, self._directory, self._discovery, self._network = spec, directory, discovery, network
        self._files = files
        self._asked: dict[object, Future[Any]] = {}  # of the disk, and not answered in time yet
        self.name = discovery.name
        self.address = discovery.address
        self.is_first = discovery.is_first
        self._witness = discovery.witness
        self._book: list[tuple[str, Address]] = []  # the agents' addresses, in the order of their arrival
        self._give_up_at = math.inf  # deadline of the search for the leader
        self._look_at = math.inf  # when a node that joins reads the agents' addresses again
        self._endpoints: Sequence[Address] = discovery.endpoints  # of the search
        self._waits_for = ""  # what a node that joins waits for, as the user last read it
        self._unseen_until = math.inf  # deadline for seeing the first agent's directory
        self._unseen_by = ""
        self._strangers: set[str] = set()  # agents of other starts of this run
        self._no_witness = ""  # why the witness could not be taken

    def begin(self) -> None:
        """Connect to the others; the first agent tells them where it is."""
        if self.is_first:
            # Not before it holds the run's lock: another agent's file must stay as it is.
            self.add_self()
            self._record_agents()
        else:
            self._network.call(self._endpoints)
            self.look()

    def look(self) -> None:
        """Search for the leader, within the time limit."""
        if self._give_up_at == math.inf:
            self._give_up_at = time.monotonic() + self._spec.recovery.init_timeout_s
            self._look_at = time.monotonic() + _LOOK_AGAIN_S if self._spec.placement.joins else math.inf

    def stop_looking(self) -> None:
        """End the search, because the leader is found."""
        self._give_up_at = self._look_at = math.inf
        self._waits_for = ""

    # Timeouts.

    @property
    def deadline(self) -> float:
        """When :meth:`expire` is due, by the monotonic clock."""
        return min(self._network.deadline, self._give_up_at, self._look_at, self._unseen_until)

    def expire(self, now: float) -> str:
        """Run what is due; return why to give up, or ""."""
        if now >= self._network.deadline:
            self._network.expire(now)
        if now >= self._unseen_until:
            self._unseen_until = math.inf
            return (
                f"{self._directory.path} is not the directory that {self._unseen_by} uses. A run that "
                "survives the loss of nodes needs a directory that all of them share. Give its path with "
                "--run-dir DIR, or use --recover none."
            )
        if now >= self._look_at:
            self._look_at = now + _LOOK_AGAIN_S
            if self._directory.has_result():
                return "the other nodes have finished the run."
            self._look_again()
        if now >= self._give_up_at:
            self._give_up_at = math.inf
            return (
                f"no agent of this run answers at {self._where} ({self._network.last_error or 'no answer'}). "
                "Start the first node, and check the address and the firewall. --init-timeout sets how long "
                "to wait."
            )
        return ""

    def _look_again(self) -> None:
        """Read the agents' addresses again; wait without a limit while one answers that has no leader for this node."""
        connected = self._network.connected
        waits_for = f"no agent of this run answers at {self._where} yet"
        if connected:
            self._give_up_at = time.monotonic() + self._spec.recovery.init_timeout_s
            waits_for = f"{', '.join(sorted(connected))} of this run can be reached, but not a node that leads it"
        if waits_for != self._waits_for:
            self._waits_for = waits_for
            print_status(f"this node waits: {waits_for}.")
        with suppress(ConfigError):
            agents, _ = read_agents(self._directory)
            self._endpoints = self._earlier(agents)
            self._network.call(self._endpoints)

    @property
    def _where(self) -> str:
        return ", ".join(f"{host}:{port}" for host, port in self._endpoints)

    def _earlier(self, agents: Iterable[Agent]) -> list[Address]:
        """Return the addresses of the agents that came before this one, which connects to them."""
        names = [name for name, _ in agents]
        return [a for _, a in agents][: names.index(self.name) if self.name in names else None]

    # Connections.

    def send(self, peer: str | None, message: Message) -> None:
        """Send a message, if there is a connection."""
        if peer is not None:
            self._network.send(peer, write(message))

    def drop(self, peer: str) -> None:
        """Close the connection with a peer; the side that opened it reconnects."""
        self._network.drop(peer)

    def sees_directory_of(self, peer: str, hello: Mapping[str, Any]) -> bool:
        """Return whether this node's run directory is the one that a newly connected peer uses.

        A file system may show it late: then drop the connection and check again with the next one, until the limit in
        :meth:`expire`. An agent of another start of the run has another witness.
        """
        if "lease" not in hello:
            return True
        if self._witness is not None:
            if self._witness.key != hello["lease"] and peer not in self._strangers:
                self._strangers.add(peer)
                print_status(f"{peer} belongs to another start of this run, which this node does not take part in.")
            return self._witness.key == str(hello["lease"])
        witness = FileWitness(self._directory.path / "agents", str(hello["lease"]))
        if not self.soon(witness, witness.is_shared):
            if self._unseen_until == math.inf:
                self._unseen_until = time.monotonic() + SEEN_S
                print_status(f"waiting for the run directory of {peer} to appear on this node, as {witness.path}")
            self._unseen_by = peer
            return False
        self._unseen_until = math.inf
        self._witness = witness
        self._discovery.hello["lease"] = witness.key
        return True

    @property
    def job_key(self) -> str:
        """A name of this start of the run that the first agent chose; "" before this one has met another."""
        return "" if self._witness is None else self._witness.key

    def acquire_witness(self, node_set: NodeSet, winners: frozenset[str]) -> frozenset[str] | None:
        """Break a tie; return the winning nodes, or None if the witness is not accessible."""
        if self._witness is None:
            return None
        try:
            held_by = self.soon((node_set, winners), partial(self._witness.acquire, node_set, winners))
        except RunDirectoryError as error:
            if str(error) != self._no_witness:  # retried every second, e.g. while a disk is full
                self._no_witness = str(error)
                print_status(self._no_witness)
            return None
        self._no_witness = ""
        return held_by

    def soon(self, question: Hashable, work: Callable[[], T], within_s: float = math.inf) -> T | None:
        """Return what ``work`` returns, or None if that takes long, or fails; the same question later waits for it."""
        if question not in self._asked:
            self._asked[question] = self._files.do(work)
        answer: Future[T] = self._asked[question]
        wait([answer], min(within_s, self._spec.recovery.heartbeat_s / 2))  # this node must not be silent for longer
        if not answer.done():
            return None
        del self._asked[question]
        with suppress(OSError):
            return answer.result()
        return None

    # The leader's part: admission, and the address book.

    def rejection_reason(self, peer: str, others: int) -> str:
        """Return why a peer cannot take part, or "".

        Args:
            others: number of other nodes that have joined; 0 if the peer is in the node set already.
        """
        mismatches = differences(self._discovery.hello, self._network.hello_of(peer))
        if mismatches:
            return f"this node's software or task differs from the run's: {'; '.join(mismatches)}. Make them equal."
        most = self._spec.nodes[1]
        if others >= most:
            return f"the run already has its {most} nodes (--nodes)."
        return ""

    def add_self(self) -> None:
        """Record this agent's address."""
        if self.name not in dict(self._book):
            listener = self._network.listener
            self._book.append((self.name, (listener.host, listener.port)))

    def add(self, peer: str, nodes: Iterable[str]) -> None:
        """Record a peer's address, and send the address book to all ``nodes``; a known peer may have an older one."""
        address = self._network.address_of(peer)
        if address is not None and peer not in dict(self._book):
            self._book.append((peer, address))
            self._share_book(nodes)
        else:
            self.send(peer, AddressBook(tuple(self._book)))

    def remove(self, peer: str, nodes: Iterable[str]) -> None:
        """Remove a lost peer, and send the address book to all ``nodes``."""
        if peer in dict(self._book):
            self._book = [(name, address) for name, address in self._book if name != peer]
            self._share_book(nodes)

    def _record_agents(self) -> None:
        assert self._spec.job_file is not None
        self._files.do(partial(self._try_to_record, list(self._book), self._spec.job_file))

    def _try_to_record(self, agents: Sequence[Agent], job_file: Path) -> None:
        with suppress(OSError):
            record_agents(self._directory, agents, job_file)

    def _share_book(self, nodes: Iterable[str]) -> None:
        self._record_agents()
        for peer in nodes:
            self.send(peer, AddressBook(tuple(self._book)))

    # The follower's part.

    def update(self, book: AddressBook) -> None:
        """Connect to all agents that came earlier; later ones connect to this one."""
        self._book = list(book.agents)
        self._network.call(self._earlier(self._book))
