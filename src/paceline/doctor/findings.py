"""All that an examination has gathered, from every machine and every pair of them, before it is judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.doctor.examination import Examination
from paceline.doctor.probes import Flow, Way
from paceline.doctor.storage import Storage

_SLOWEST = 100e6 / 8  # 100 Mbit/s

Pair = tuple[int, int]
"""Two machines, by number: the first one connects, or sends."""


@dataclass(kw_only=True)
class Findings:
    """What was gathered; machines are named by number.

    Attributes:
        examination: what the job needs.
        nodes: machines of the job, also those that never came.
        port: the rendezvous port.
        facts: of each machine; see :class:`~paceline.doctor.facts.Facts`, and ``address``, ``interface`` and
            ``address_problem`` besides.
        absent: why a machine is not there, or was lost.
        hosts: names of machines of which no facts are known.
        port_problem: why machine 0 cannot listen on the rendezvous port.
        clock_s: how far a machine's clock is ahead of machine 0's, and how exactly that is known.
        rendezvous: ways to the rendezvous port.
        data: ways to a port that the kernel chose.
        flows: streams over the interface that will be used.
        other_flows: over other interfaces, by name.
        storage: of the run's directory.
        all_reduce: what the canary found; None where it was not let out, and ``no_all_reduce`` says why.
    """

    examination: Examination
    nodes: int
    port: int
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    absent: dict[int, str] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    port_problem: str | None = None
    clock_s: dict[int, tuple[float, float]] = field(default_factory=dict)
    rendezvous: dict[Pair, Way] = field(default_factory=dict)
    data: dict[Pair, Way] = field(default_factory=dict)
    flows: dict[Pair, Flow] = field(default_factory=dict)
    other_flows: dict[str, dict[Pair, Flow]] = field(default_factory=dict)
    storage: dict[int, Storage] = field(default_factory=dict)
    all_reduce: dict[str, Any] | None = None
    no_all_reduce: str = ""

    def name(self, node: int) -> str:
        """A machine's name; of two with the same, with its number."""
        if node not in self.facts:
            return self.hosts.get(node, f"machine {node}")
        host = str(self.facts[node]["host"])
        same = [other for other, facts in self.facts.items() if facts["host"] == host]
        return host if len(same) == 1 else f"{host} (machine {node})"

    def pair(self, pair: Pair) -> str:
        """Two machines, as ``a -> b``."""
        return f"{self.name(pair[0])} -> {self.name(pair[1])}"

    def processes_on(self, node: int) -> int:
        """How many processes the job runs there."""
        return self.examination.processes_on(node)


def common_interfaces(facts: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Interfaces that all machines have, with addresses that differ: no bridge of containers."""
    addresses = [{each["name"]: each["address"] for each in own["interfaces"]} for own in facts.values()]
    return sorted(
        name
        for name in addresses[0]
        if all(name in own for own in addresses) and len({own[name] for own in addresses}) == len(addresses)
    )


def known_rates(flows: Mapping[Pair, Flow]) -> dict[Pair, float]:
    """The bandwidths that could be measured, in bytes/s."""
    return {pair: flow["bytes_per_s"] for pair, flow in flows.items() if flow["bytes_per_s"] is not None}


def is_slow(rate: float, best: float) -> bool:
    """Whether a link holds the others up: it is slow by itself, or beside the fastest; in bytes/s."""
    return rate < _SLOWEST or rate < 0.25 * best


def is_very_slow(rate: float, best: float) -> bool:
    """Whether training over such a link is hopeless."""
    return rate < _SLOWEST or rate < 0.1 * best
