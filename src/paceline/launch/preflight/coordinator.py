"""Machine 0 of a preflight check: it asks the others, and has pairs of them test their connection."""

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
from contextlib import suppress
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

# --- The doctor's messages, over the agents' authenticated links, for programs that wait for one at a time


DEAD_AFTER_S = 20.0
"""Patience with a machine that does not answer: the way to it is loaded on purpose."""


class PreflightChannel:
    """A link, of which messages are taken one by one."""

    def __init__(self, link: AuthenticatedConnection) -> None:
        self._link = link
        self._waiting: deque[dict[str, Any]] = deque()

    def shake_hands(self) -> None:
        """Wait until both sides have shown that they hold the token.

        Raises:
            PeerConnectionError: it is not one of ours, or does not answer; the message says why.
        """
        while not self._link.is_open:
            self._wait(max(0.0, self._link.deadline - time.monotonic()))
            # The other side may say something with its last word of the handshake.
            self._waiting += self._link.receive()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send; what the kernel does not take at once is sent while the answer is waited for."""
        self._link.send(message)

    def next(self, within_s: float) -> dict[str, Any]:
        """The next message.

        Raises:
            PeerConnectionError: the link has ended, or none came in time.
        """
        deadline = time.monotonic() + within_s
        while not self._waiting:
            self._waiting += self._link.receive()
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerConnectionError(f"{self._link.peer} did not answer within {within_s:g} s.")
            if not self._waiting:
                self._wait(left)
        return self._waiting.popleft()

    def close(self) -> None:
        """End it; what the kernel has taken is still delivered."""
        self._link.close()

    def _wait(self, seconds: float) -> None:
        waiting = select.poll()
        waiting.register(self._link, select.POLLIN | (select.POLLOUT if self._link.wants_write else 0))
        waiting.poll(seconds * 1e3)


def open_channel(host: str, port: int, token: bytes, hello: Mapping[str, Any], within_s: float) -> PreflightChannel:
    """Connect to machine 0.

    Raises:
        PeerConnectionError: nobody is there, or not one of ours; the message says why.
    """
    channel = PreflightChannel(connect(host, port, token, hello, within_s=within_s, dead_after_s=DEAD_AFTER_S))
    try:
        channel.shake_hands()
    except BaseException:
        channel.close()
        raise
    return channel


# --- Several calls at the same time, which an interrupt does not wait for ---


Key = TypeVar("Key")
Value = TypeVar("Value")


def run_parallel(calls: Mapping[Key, Callable[[], Value]]) -> dict[Key, Value | Exception]:
    """Make all calls at once, each in a thread; what each returned or raised."""
    results: dict[Key, Value | Exception] = {}

    def make(key: Key, call: Callable[[], Value]) -> None:
        try:
            results[key] = call()
        except Exception as error:
            results[key] = error

    # As daemons: an interpreter waits for its other threads, and these may wait for a machine that is gone.
    threads = [threading.Thread(target=make, args=item, daemon=True) for item in calls.items()]
    for thread in threads:
        thread.start()
    join_all(threads)
    return {key: results[key] for key in calls}


# --- What one machine does for an examination, when machine 0 asks for it ---


_CANARY_S = 60.0


@dataclass(frozen=True)
class NodeAddress:
    """Where a machine is reached, and what is wrong with what was asked for.

    Attributes:
        host: its IPv4 address on the way to the others.
        interface: the network interface that has it.
        problem: why it is not the one that was asked for, or that the others would choose.
    """

    host: str
    interface: str
    problem: str | None = None


def choose_address(interface: str | None, place: NodePlace) -> NodeAddress:
    """The address that a job's processes here would use."""
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
        problem = problem or f"{place.master_addr}, the name of machine 0, is a loopback address here: {host}"
    except ConfigError as error:
        problem = problem or str(error)
    # Any will do to examine the rest.
    for each in interfaces():
        return NodeAddress(each["address"], each["name"], problem)
    return NodeAddress(LOOPBACK, "lo", problem)


@dataclass
class PreflightAgent:
    """One machine, at work.

    Attributes:
        examination: what the job needs.
        place: which machine this is.
        address: where the others reach it.
        token: the examination's secret.
    """

    examination: PreflightSpec
    place: NodePlace
    address: NodeAddress
    token: bytes
    _servers: list[ProbeServer] = field(default_factory=list)
    _marks: list[str] = field(default_factory=list)

    def perform(self, operation: str, arguments: Mapping[str, Any]) -> Any:
        """Do what machine 0 asks for; arguments and result are JSON."""
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
        """Leave nothing behind."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        for name in self._marks:
            probes.remove_mark(self._run, name)
        self._marks.clear()

    @property
    def _run(self) -> Path:
        return probes.existing(self.examination.run)

    def _facts(self) -> dict[str, Any]:
        found = collect(self.examination.task)
        return {
            **found,
            "address": self.address.host,
            "interface": self.address.interface,
            "address_problem": self.address.problem,
        }

    def _open(self) -> dict[str, Any]:
        """Listen for probes: on the rendezvous port, on a port that the kernel chooses, and elsewhere."""
        rendezvous = None
        try:
            self._serve(self.address.host, self.place.master_port)
        except OSError as error:
            rendezvous = error.strerror or str(error)
        others = {}
        for each in interfaces():
            if each["address"] != self.address.host:
                with suppress(OSError):
                    others[each["name"]] = [each["address"], self._serve(each["address"], 0)]
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

    def _mark(self, examination: str) -> str | None:
        name = probes.mark_name(examination, self.place.node_rank)
        self._marks.append(name)
        return probes.leave_mark(self._run, name)

    def _look(self, examination: str, error: str | None, others: list[int]) -> Any:
        names = {other: probes.mark_name(examination, other) for other in others}
        own = probes.mark_name(examination, self.place.node_rank)
        return probes.look(self._run, self.examination.run, own, names, error)

    def _all_reduce(self, first_rank: int, local_ranks: int, world_size: int, host: str, port: int) -> dict[str, Any]:
        """Run this machine's ranks; what the first of them found."""
        by_itself = self.place.nodes == 1 and self.address.host == LOOPBACK
        shared = {
            "world_size": world_size,
            "local_world_size": local_ranks,
            "node_rank": self.place.node_rank,
            "nodes": self.place.nodes,
            "master_addr": host,
            "master_port": port,
            "interface": None if by_itself else self.address.interface,
            "timeout_s": _CANARY_S,
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
    """What :mod:`paceline.launch.preflight.canary` prints as one rank."""
    try:
        done = run_python("paceline.launch.preflight.canary", [json.dumps(place)], time_limit_s=2 * _CANARY_S)
    except subprocess.TimeoutExpired:
        return {"error": f"it did not end within {2 * _CANARY_S:g} s"}
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    except (IndexError, ValueError):
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}


# --- Machine 0: asks all machines for what they know, and has them test the way to each other ---


_ANSWER_S = 120.0
_FACTS_S = 400.0  # importing torch from a cold network disk takes minutes
_CLOCK_ROUNDS = 5
_ALL_SHIFTS_UP_TO = 9  # machines
_REPEATED = 16


class PreflightTarget(Protocol):
    """A machine that does what it is asked for."""

    def ask(self, operation: str, arguments: Mapping[str, Any], within_s: float = _ANSWER_S) -> Any:
        """The result.

        Raises:
            PeerConnectionError: the machine is gone, or does not answer.
            PacelineError: it could not do it.
        """


class LocalTarget:
    """Machine 0 itself."""

    def __init__(self, examiner: PreflightAgent) -> None:
        self._examiner = examiner

    def ask(self, operation: str, arguments: Mapping[str, Any], within_s: float = _ANSWER_S) -> Any:
        return time.time() if operation == "time" else self._examiner.perform(operation, arguments)


class RemoteTarget:
    """Another machine."""

    def __init__(self, channel: PreflightChannel) -> None:
        self._channel = channel

    def ask(self, operation: str, arguments: Mapping[str, Any], within_s: float = _ANSWER_S) -> Any:
        self._channel.send({"ask": operation, "arguments": dict(arguments)})
        answer = self._channel.next(within_s)
        if "error" in answer:
            raise PacelineError(str(answer["error"]))
        return answer.get("result")


class PreflightCoordinator:
    """Leads an examination; what it gathers is in ``findings``."""

    def __init__(self, machines: dict[int, PreflightTarget], findings: PreflightResults) -> None:
        self._machines = machines
        self._key = secrets.token_hex(4)
        self.findings = findings

    def examine(self) -> None:
        """Gather everything, one kind after another."""
        self.findings.facts = self._ask_all("facts", within_s=_FACTS_S)
        self._compare_clocks()
        self._look_at_storage()
        if len(self._machines) > 1:
            self._try_ways()
        self._all_reduce()

    def _ask_all(
        self, operation: str, arguments: Mapping[int, Mapping[str, Any]] | None = None, **common: Any
    ) -> dict[int, Any]:
        """Ask the machines at once: those in ``arguments``, by default all; who fails is asked no more."""
        asked = {node: {} for node in self._machines} if arguments is None else dict(arguments)
        asked = {node: each for node, each in asked.items() if node in self._machines}
        results = run_parallel(
            {node: partial(self._machines[node].ask, operation, each, **common) for node, each in asked.items()}
        )
        answers = {}
        for node, result in results.items():
            if not isinstance(result, Exception):
                answers[node] = result
            elif node == 0 or not isinstance(result, (PacelineError, OSError)):
                raise result
            else:
                gone = "was lost in the middle" if isinstance(result, PeerConnectionError) else "could not go on"
                self.findings.absent[node] = f"it {gone} ({operation}): {result}"
                del self._machines[node]
        return answers

    def _compare_clocks(self) -> None:
        """By the round trip that took the least time, as NTP does."""
        for node in [node for node in self._machines if node != 0]:
            best: tuple[float, float] | None = None
            for _ in range(_CLOCK_ROUNDS):
                before, start = time.time(), time.perf_counter()
                answer = self._ask_all("time", {node: {}}).get(node)
                trip_s = time.perf_counter() - start
                if answer is not None and (best is None or trip_s / 2 < best[1]):
                    best = answer - (before + trip_s / 2), trip_s / 2
            if best is not None:
                self.findings.clock_s[node] = best

    def _look_at_storage(self) -> None:
        errors = self._ask_all("mark", {node: {"examination": self._key} for node in self._machines})
        looks = {
            node: {
                "examination": self._key,
                "error": errors[node],
                "others": [other for other in errors if other != node and errors[other] is None],
            }
            for node in errors
        }
        self.findings.storage = self._ask_all("look", looks)

    def _try_ways(self) -> None:
        opened = self._ask_all("open")
        addresses = {node: str(self.findings.facts[node]["address"]) for node in opened}
        listening = [node for node in opened if opened[node]["rendezvous_error"] is None]
        if 0 not in listening:
            self.findings.port_problem = self.findings.port_problem or opened[0]["rendezvous_error"]
        # Each connects to all others, which is n (n - 1) ways, but n - 1 one after another.
        pairs: dict[int, list[tuple[int, str, int]]] = {
            node: [
                *((to, "rendezvous", self.findings.port) for to in listening if to != node),
                *((to, "data", opened[to]["data"]) for to in opened if to != node),
            ]
            for node in opened
        }
        targets = {node: {"targets": [(addresses[to], port) for to, _, port in there]} for node, there in pairs.items()}
        for node, ways in self._ask_all("ways", targets).items():
            for (to, kind, _), way in zip(pairs[node], ways, strict=True):
                kept = self.findings.rendezvous if kind == "rendezvous" else self.findings.data
                kept[node, to] = way
        self._measure_flows(addresses, {node: opened[node]["data"] for node in opened})
        for name in common_interfaces(self.findings.facts):
            there = {node: opened[node]["others"].get(name) for node in opened}
            if all(there.values()):
                self.findings.other_flows[name] = self._flows(
                    1,
                    {node: address for node, (address, _) in there.items()},
                    {node: port for node, (_, port) in there.items()},
                )

    def _measure_flows(self, addresses: dict[int, str], ports: dict[int, int]) -> None:
        """Each sends to the machine ``shift`` places further on: all pairs, or of many machines some."""
        count = len(addresses)
        some = [1 << power for power in range((count - 1).bit_length())]
        unreachable = {pair for pair, way in self.findings.data.items() if way["error"] is not None}
        for shift in range(1, count) if count <= _ALL_SHIFTS_UP_TO else some:
            self.findings.flows |= self._flows(shift, addresses, ports, without=unreachable)
        rates = known_rates(self.findings.flows)
        slow = [pair for pair, rate in rates.items() if is_slow(rate, max(rates.values()))]
        # Perhaps something else was going on: once more, one after another.
        for source, to in sorted(slow, key=lambda pair: rates[pair])[:_REPEATED]:
            target = {"host": addresses[to], "port": ports[to]}
            for again in self._ask_all("flow", {source: target}).values():
                if (again["bytes_per_s"] or 0.0) > rates[source, to]:
                    self.findings.flows[source, to] = again

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
        findings = self.findings
        findings.no_all_reduce = self._obstacle()
        if findings.no_all_reduce:
            return
        ranks = {}
        for node in self._machines:
            gpus = int(findings.facts[node]["torch"].get("gpus", 0))
            ranks[node] = min(findings.processes_on(node), gpus or 2)
        if sum(ranks.values()) < 2:
            findings.no_all_reduce = "there is one process, and nothing to reduce"
            return
        first, arguments = 0, {}
        host = findings.facts[0]["address"]
        with socket.socket() as bound:
            bound.bind((host, 0))
            port = bound.getsockname()[1]
        for node, count in ranks.items():
            arguments[node] = {
                "first_rank": first,
                "local_ranks": count,
                "world_size": sum(ranks.values()),
                "host": host,
                "port": port,
            }
            first += count
        results = self._ask_all("all-reduce", arguments, within_s=3 * _ANSWER_S)
        wrong = {node: result["error"] for node, result in results.items() if "error" in result}
        if wrong:
            said = "; ".join(f"{findings.name(node)}: {error}" for node, error in wrong.items())
            findings.all_reduce = {"error": said}
        else:
            findings.all_reduce = results[0]

    def _obstacle(self) -> str:
        """Why an all-reduce cannot work, in words; "" where nothing is known to be in the way."""
        findings = self.findings
        if findings.absent:
            return "not all machines are there"
        versions = {str(findings.facts[node]["torch"].get("version")) for node in self._machines}
        if versions == {"None"} or any("error" in findings.facts[n]["torch"] for n in self._machines):
            return "torch cannot be imported"
        if len(versions) > 1:
            return f"torch differs: {', '.join(sorted(versions))}"
        if any(way["error"] is not None for way in findings.data.values()):
            return "the machines do not reach each other"
        return ""
