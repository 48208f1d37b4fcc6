"""The coordinator of a preflight check, on node 0, and the agents that carry out its requests."""

from __future__ import annotations

import json
import secrets
import select
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from paceline.core.access import is_loopback
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.signals import join_all
from paceline.core.sockets import LOOPBACK, address_towards, interface_address, interface_of, is_ours
from paceline.elastic.consensus.transport import AuthenticatedConnection, PeerConnectionError, connect
from paceline.launch.preflight import probes
from paceline.launch.preflight.facts import collect, interfaces, run_python
from paceline.launch.preflight.probes import ProbeServer, check_connection, measure_flow
from paceline.launch.preflight.spec import (
    NodePlace,
    Pair,
    PreflightResults,
    PreflightSpec,
    common_interfaces,
    is_slow,
    known_rates,
)

# --- Messages over the agents' authenticated connections, received one at a time


DEAD_AFTER_S = 20.0
"""How long a node may be silent: the checks load the network on purpose."""


class PreflightChannel:
    """A connection from which messages are taken one by one."""

    def __init__(self, link: AuthenticatedConnection) -> None:
        self._link = link
        self._received: deque[dict[str, Any]] = deque()

    def shake_hands(self) -> None:
        """Wait until both sides have proved that they hold the token.

        Raises:
            PeerConnectionError: the peer is not one of ours, or does not answer; says why.
        """
        while not self._link.is_open:
            self._wait(max(0.0, self._link.deadline - time.monotonic()))
            # The last message of the handshake may be followed by another one.
            self._received += self._link.receive()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; the rest that the kernel does not take immediately is sent while waiting for the answer."""
        self._link.send(message)

    def next(self, within_s: float) -> dict[str, Any]:
        """Return the next message.

        Raises:
            PeerConnectionError: the connection has ended, or no message came in time.
        """
        deadline = time.monotonic() + within_s
        while not self._received:
            self._received += self._link.receive()
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise PeerConnectionError(f"{self._link.peer} did not answer within {within_s:g} s.")
            if not self._received:
                self._wait(remaining_s)
        return self._received.popleft()

    def close(self) -> None:
        """Close the connection; the kernel still delivers the data that it has taken."""
        self._link.close()

    def _wait(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._link, select.POLLIN | (select.POLLOUT if self._link.wants_write else 0))
        poller.poll(seconds * 1e3)


def open_channel(host: str, port: int, token: bytes, hello: Mapping[str, Any], within_s: float) -> PreflightChannel:
    """Connect to node 0.

    Raises:
        PeerConnectionError: nothing answers there, or it is not one of ours; says why.
    """
    channel = PreflightChannel(connect(host, port, token, hello, within_s=within_s, dead_after_s=DEAD_AFTER_S))
    try:
        channel.shake_hands()
    except BaseException:
        channel.close()
        raise
    return channel


# --- Parallel calls, which an interrupt does not wait for ---


Key = TypeVar("Key")
Value = TypeVar("Value")


def run_parallel(calls: Mapping[Key, Callable[[], Value]]) -> dict[Key, Value | Exception]:
    """Run all calls in parallel threads; return each result or exception."""
    results: dict[Key, Value | Exception] = {}

    def run_call(key: Key, call: Callable[[], Value]) -> None:
        try:
            results[key] = call()
        except Exception as error:
            results[key] = error

    # Daemon threads, since the interpreter waits for others, and these may wait for a lost node.
    threads = [threading.Thread(target=run_call, args=item, daemon=True) for item in calls.items()]
    for thread in threads:
        thread.start()
    join_all(threads)
    return {key: results[key] for key in calls}


# --- A node's part ---


_ALL_REDUCE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class NodeAddress:
    """The address of a node, and a problem with the requested interface.

    Attributes:
        host: IPv4 address on the route to the other nodes.
        interface: the network interface with this address.
        problem: why it is not the requested address, or the one that the other nodes would choose.
    """

    host: str
    interface: str
    problem: str | None = None


def choose_address(interface: str | None, place: NodePlace) -> NodeAddress:
    """Choose the address that a job's processes on this node would use."""
    problem = None
    if interface is not None:
        try:
            return NodeAddress(interface_address(interface), interface)
        except ConfigError as error:
            problem = str(error)
    if place.nodes == 1:
        return NodeAddress(LOOPBACK, "lo", problem)
    try:
        if place.node_rank == 0 and is_ours(place.master_addr):
            host = socket.gethostbyname(place.master_addr)
        else:
            host = address_towards(place.master_addr, place.master_port)
        if not is_loopback(host) or is_loopback(place.master_addr):
            return NodeAddress(host, interface_of(host), problem)
        problem = problem or f"{place.master_addr}, the name of node 0, is a loopback address on this node: {host}"
    except ConfigError as error:
        problem = problem or str(error)
    # Any other address will do for the remaining checks.
    for interface_facts in interfaces():
        return NodeAddress(interface_facts["address"], interface_facts["name"], problem)
    return NodeAddress(LOOPBACK, "lo", problem)


@dataclass
class PreflightAgent:
    """One node's agent, which performs the coordinator's operations.

    Attributes:
        spec: requirements of the job.
        place: of this node.
        address: of this node.
        token: secret of the preflight check.
    """

    spec: PreflightSpec
    place: NodePlace
    address: NodeAddress
    token: bytes
    _servers: list[ProbeServer] = field(default_factory=list)
    _marks: list[str] = field(default_factory=list)
    _locks: ExitStack = field(default_factory=ExitStack)

    def perform(self, operation: str, arguments: Mapping[str, Any]) -> Any:
        """Perform an operation of the coordinator; arguments and result are JSON."""
        operations: dict[str, Callable[..., Any]] = {
            "facts": self._facts,
            "open": self._open,
            "ways": self._ways,
            "flow": self._flow,
            "mark": self._mark,
            "look": self._look,
            "all-reduce": self._all_reduce,
        }
        return operations[operation](**arguments)

    def close(self) -> None:
        """Close the probe servers and remove the marks."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        self._locks.close()
        for name in self._marks:
            probes.remove_mark(self._run, name)
        self._marks.clear()

    @property
    def _run(self) -> Path:
        return probes.nearest_existing(self.spec.run)

    def _facts(self) -> dict[str, Any]:
        found = collect(self.spec.task)
        return {
            **found,
            "address": self.address.host,
            "interface": self.address.interface,
            "address_problem": self.address.problem,
        }

    def _open(self) -> dict[str, Any]:
        """Listen for probes: on the rendezvous port, on an ephemeral port, and on other interfaces."""
        rendezvous = None
        try:
            self._serve(self.address.host, self.place.master_port)
        except OSError as error:
            rendezvous = error.strerror or str(error)
        others = {}
        for interface in interfaces():
            if interface["address"] != self.address.host:
                with suppress(OSError):
                    others[interface["name"]] = [interface["address"], self._serve(interface["address"], 0)]
        return {
            "rendezvous_error": rendezvous,
            "data": self._serve(self.address.host, 0),
            "others": others,
        }

    def _serve(self, host: str, port: int) -> int:
        self._servers.append(ProbeServer(host, port, self.token))
        return self._servers[-1].port

    def _ways(self, targets: list[tuple[str, int]]) -> list[Any]:
        return [check_connection(host, port, self.token) for host, port in targets]

    def _flow(self, host: str, port: int) -> Any:
        return measure_flow(host, port, self.token)

    def _mark(self, key: str) -> str | None:
        name = probes.mark_name(key, self.place.node_rank)
        self._marks.append(name)
        return probes.leave_mark(self._run, name, self._locks)

    def _look(self, key: str, error: str | None, others: list[int]) -> Any:
        names = {other: probes.mark_name(key, other) for other in others}
        return probes.inspect_storage(self._run, self.spec.run, names, error)

    def _all_reduce(self, first_rank: int, local_ranks: int, world_size: int, host: str, port: int) -> dict[str, Any]:
        """Run this node's ranks; return an error, if any, or the first rank's result."""
        is_single = self.place.nodes == 1 and self.address.host == LOOPBACK
        shared = {
            "world_size": world_size,
            "local_world_size": local_ranks,
            "node_rank": self.place.node_rank,
            "nodes": self.place.nodes,
            "master_addr": host,
            "master_port": port,
            "interface": None if is_single else self.address.interface,
            "timeout_s": _ALL_REDUCE_TIMEOUT_S,
        }
        ranks = {
            number: partial(_run_rank, {**shared, "rank": first_rank + number, "local_rank": number})
            for number in range(local_ranks)
        }
        results = []
        for result in run_parallel(ranks).values():
            if isinstance(result, Exception):
                raise result
            results.append(result)
        return next((result for result in results if "error" in result), results[0])


def _run_rank(place: dict[str, Any]) -> dict[str, Any]:
    """Run one rank of the all-reduce, and return its result."""
    try:
        done = run_python(
            "paceline.launch.preflight.canary", [json.dumps(place)], time_limit_s=2 * _ALL_REDUCE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it did not finish within {2 * _ALL_REDUCE_TIMEOUT_S:g} s"}
    try:
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result
    except (IndexError, ValueError):
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}


# --- Node 0: gather the facts of all nodes, and have them test their connections ---


_ANSWER_S = 120.0
_FACTS_S = 400.0  # importing torch from a cold network disk takes minutes
_CLOCK_ROUNDS = 5
_MAX_NODES_FOR_ALL_PAIRS = 9  # nodes
_MAX_REPEATED = 16


class PreflightTarget(Protocol):
    """A node that performs operations."""

    def ask(self, operation: str, arguments: Mapping[str, Any], within_s: float = _ANSWER_S) -> Any:
        """Return the result of an operation.

        Raises:
            PeerConnectionError: the node is gone, or does not answer.
            PacelineError: the operation failed.
        """


class LocalTarget:
    """Node 0 itself."""

    def __init__(self, agent: PreflightAgent) -> None:
        self._agent = agent

    def ask(self, operation: str, arguments: Mapping[str, Any], within_s: float = _ANSWER_S) -> Any:
        return time.time() if operation == "time" else self._agent.perform(operation, arguments)


class RemoteTarget:
    """Another node."""

    def __init__(self, channel: PreflightChannel) -> None:
        self._channel = channel

    def ask(self, operation: str, arguments: Mapping[str, Any], within_s: float = _ANSWER_S) -> Any:
        self._channel.send({"ask": operation, "arguments": dict(arguments)})
        answer = self._channel.next(within_s)
        if "error" in answer:
            raise PacelineError(str(answer["error"]))
        return answer.get("result")


class PreflightCoordinator:
    """The coordinator of a preflight check, which collects everything in ``results``."""

    def __init__(self, targets: dict[int, PreflightTarget], results: PreflightResults) -> None:
        self._targets = targets
        self._key = secrets.token_hex(4)
        self.results = results

    def collect(self) -> None:
        """Collect all facts, one kind after another."""
        self.results.facts = self._ask_all("facts", within_s=_FACTS_S)
        self._compare_clocks()
        self._check_storage()
        if len(self._targets) > 1:
            self._check_connections()
        self._all_reduce()

    def _ask_all(
        self, operation: str, arguments: Mapping[int, Mapping[str, Any]] | None = None, **common: Any
    ) -> dict[int, Any]:
        """Ask nodes in parallel: those in ``arguments``, by default all; nodes that fail are not asked again."""
        arguments_of_nodes = {node: {} for node in self._targets} if arguments is None else dict(arguments)
        arguments_of_nodes = {
            node: call_arguments for node, call_arguments in arguments_of_nodes.items() if node in self._targets
        }
        outcomes = run_parallel(
            {
                node: partial(self._targets[node].ask, operation, call_arguments, **common)
                for node, call_arguments in arguments_of_nodes.items()
            }
        )
        answers = {}
        for node, result in outcomes.items():
            if not isinstance(result, Exception):
                answers[node] = result
            elif node == 0 or not isinstance(result, (PacelineError, OSError)):
                raise result
            else:
                failure = "was lost in the middle" if isinstance(result, PeerConnectionError) else "could not continue"
                self.results.absent[node] = f"it {failure} ({operation}): {result}"
                del self._targets[node]
        return answers

    def _compare_clocks(self) -> None:
        """Estimate clock offsets by the fastest round trip, as NTP does."""
        for node in [node for node in self._targets if node != 0]:
            best: tuple[float, float] | None = None
            for _ in range(_CLOCK_ROUNDS):
                before, start = time.time(), time.perf_counter()
                answer = self._ask_all("time", {node: {}}).get(node)
                trip_s = time.perf_counter() - start
                if answer is not None and (best is None or trip_s / 2 < best[1]):
                    best = answer - (before + trip_s / 2), trip_s / 2
            if best is not None:
                self.results.clock_s[node] = best

    def _check_storage(self) -> None:
        errors = self._ask_all("mark", {node: {"key": self._key} for node in self._targets})
        looks = {
            node: {
                "key": self._key,
                "error": errors[node],
                "others": [other for other in errors if other != node and errors[other] is None],
            }
            for node in errors
        }
        self.results.storage = self._ask_all("look", looks)

    def _check_connections(self) -> None:
        opened = self._ask_all("open")
        addresses = {node: str(self.results.facts[node]["address"]) for node in opened}
        listening = [node for node in opened if opened[node]["rendezvous_error"] is None]
        if 0 not in listening:
            self.results.port_problem = self.results.port_problem or opened[0]["rendezvous_error"]
        # Each node connects to all others: n (n - 1) connections, but only n - 1 in sequence.
        pairs: dict[int, list[tuple[int, str, int]]] = {
            node: [
                *((to, "rendezvous", self.results.port) for to in listening if to != node),
                *((to, "data", opened[to]["data"]) for to in opened if to != node),
            ]
            for node in opened
        }
        targets = {
            node: {"targets": [(addresses[to], port) for to, _, port in targets_of_node]}
            for node, targets_of_node in pairs.items()
        }
        for node, connections in self._ask_all("ways", targets).items():
            for (to, kind, _), connection in zip(pairs[node], connections, strict=True):
                target_results = self.results.rendezvous if kind == "rendezvous" else self.results.data
                target_results[node, to] = connection
        self._measure_flows(addresses, {node: opened[node]["data"] for node in opened})
        for name in common_interfaces(self.results.facts):
            others = {node: opened[node]["others"].get(name) for node in opened}
            if all(others.values()):
                self.results.other_flows[name] = self._flows(
                    1,
                    {node: address for node, (address, _) in others.items()},
                    {node: port for node, (_, port) in others.items()},
                )

    def _measure_flows(self, addresses: dict[int, str], ports: dict[int, int]) -> None:
        """Have each node send to the node ``shift`` places further: all pairs, or a part of them on many nodes."""
        count = len(addresses)
        shifts = [1 << power for power in range((count - 1).bit_length())]
        unreachable = {pair for pair, connection in self.results.data.items() if connection["error"] is not None}
        for shift in range(1, count) if count <= _MAX_NODES_FOR_ALL_PAIRS else shifts:
            self.results.flows |= self._flows(shift, addresses, ports, without=unreachable)
        rates = known_rates(self.results.flows)
        slow = [pair for pair, rate in rates.items() if is_slow(rate, max(rates.values()))]
        # Measure slow links once more, one after another, in case of other traffic.
        for source, to in sorted(slow, key=lambda pair: rates[pair])[:_MAX_REPEATED]:
            target = {"host": addresses[to], "port": ports[to]}
            for repeated in self._ask_all("flow", {source: target}).values():
                if (repeated["bytes_per_s"] or 0.0) > rates[source, to]:
                    self.results.flows[source, to] = repeated

    def _flows(
        self,
        shift: int,
        addresses: dict[int, str],
        ports: dict[int, int],
        without: Collection[Pair] = (),
    ) -> dict[Pair, Any]:
        nodes = list(addresses)
        to = {node: nodes[(place + shift) % len(nodes)] for place, node in enumerate(nodes)}
        targets = {
            node: {"host": addresses[to[node]], "port": ports[to[node]]}
            for node in nodes
            if (node, to[node]) not in without
        }
        return {(node, to[node]): flow for node, flow in self._ask_all("flow", targets).items()}

    def _all_reduce(self) -> None:
        results = self.results
        results.no_all_reduce = self._obstacle()
        if results.no_all_reduce:
            return
        ranks = {}
        for node in self._targets:
            gpus = int(results.facts[node]["torch"].get("gpus", 0))
            ranks[node] = min(results.processes_on(node), gpus or 2)
        if sum(ranks.values()) < 2:
            results.no_all_reduce = "there is only one process"
            return
        first, arguments = 0, {}
        host = results.facts[0]["address"]
        with socket.socket() as probe_socket:
            probe_socket.bind((host, 0))
            port = probe_socket.getsockname()[1]
        for node, count in ranks.items():
            arguments[node] = {
                "first_rank": first,
                "local_ranks": count,
                "world_size": sum(ranks.values()),
                "host": host,
                "port": port,
            }
            first += count
        answers = self._ask_all("all-reduce", arguments, within_s=3 * _ANSWER_S)
        errors = {node: result["error"] for node, result in answers.items() if "error" in result}
        if errors:
            message = "; ".join(f"{results.name(node)}: {error}" for node, error in errors.items())
            results.all_reduce = {"error": message}
        else:
            results.all_reduce = answers[0]

    def _obstacle(self) -> str:
        """Return why an all-reduce cannot work; "" if no obstacle is known."""
        results = self.results
        if results.absent:
            return "some nodes are missing"
        versions = {str(results.facts[node]["torch"].get("version")) for node in self._targets}
        if versions == {"None"} or any("error" in results.facts[n]["torch"] for n in self._targets):
            return "torch cannot be imported"
        if len(versions) > 1:
            return f"torch differs: {', '.join(sorted(versions))}"
        if any(connection["error"] is not None for connection in results.data.values()):
            return "the nodes do not reach each other"
        return ""
