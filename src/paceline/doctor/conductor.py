"""Machine 0: asks all machines for what they know, and has them test the way to each other."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Protocol

from paceline.agent.link import LinkError
from paceline.doctor.channel import Channel
from paceline.doctor.examiner import Examiner
from paceline.doctor.findings import Findings, Pair, common_interfaces, is_slow, known_rates
from paceline.doctor.together import together
from paceline.errors import PacelineError

_ANSWER_S = 120.0
_FACTS_S = 400.0  # importing torch from a cold network disk takes minutes
_CLOCK_ROUNDS = 5
_ALL_SHIFTS_UP_TO = 9  # machines
_REPEATED = 16


class Machine(Protocol):
    """A machine that does what it is asked for."""

    def ask(self, operation: str, arguments: Mapping[str, Any], within_s: float = _ANSWER_S) -> Any:
        """The result.

        Raises:
            LinkError: the machine is gone, or does not answer.
            PacelineError: it could not do it.
        """


class Here:
    """Machine 0 itself."""

    def __init__(self, examiner: Examiner) -> None:
        self._examiner = examiner

    def ask(self, operation: str, arguments: Mapping[str, Any], within_s: float = _ANSWER_S) -> Any:
        return time.time() if operation == "time" else self._examiner.perform(operation, arguments)


class There:
    """Another machine."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def ask(self, operation: str, arguments: Mapping[str, Any], within_s: float = _ANSWER_S) -> Any:
        self._channel.send({"ask": operation, "arguments": dict(arguments)})
        answer = self._channel.next(within_s)
        if "error" in answer:
            raise PacelineError(str(answer["error"]))
        return answer.get("result")


class Conductor:
    """Leads an examination; what it gathers is in ``findings``."""

    def __init__(self, machines: dict[int, Machine], findings: Findings) -> None:
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
        results = together(
            {
                node: partial(self._machines[node].ask, operation, each, **common)
                for node, each in asked.items()
            }
        )
        answers = {}
        for node, result in results.items():
            if not isinstance(result, Exception):
                answers[node] = result
            elif node == 0 or not isinstance(result, (PacelineError, OSError)):
                raise result
            else:
                gone = "was lost in the middle" if isinstance(result, LinkError) else "could not go on"
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
        targets = {
            node: {"targets": [(addresses[to], port) for to, _, port in there]}
            for node, there in pairs.items()
        }
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
