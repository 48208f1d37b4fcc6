"""What one machine does for an examination, when machine 0 asks for it."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.distributed.environment import is_loopback
from paceline.distributed.sockets import LOOPBACK, address_towards, interface_address, interface_of, is_ours
from paceline.doctor import storage
from paceline.doctor.examination import Examination, Place
from paceline.doctor.facts import collect, interfaces, run_python
from paceline.doctor.probes import ProbeServer, measure_flow, try_way
from paceline.doctor.together import together
from paceline.errors import ConfigError

_CANARY_S = 60.0


@dataclass(frozen=True)
class Address:
    """Where a machine is reached, and what is wrong with what was asked for.

    Attributes:
        host: its IPv4 address on the way to the others.
        interface: the network interface that has it.
        problem: why it is not the one that was asked for, or that the others would choose.
    """

    host: str
    interface: str
    problem: str | None = None


def choose_address(interface: str | None, place: Place) -> Address:
    """The address that a job's processes here would use."""
    problem = None
    if interface is not None:
        try:
            return Address(interface_address(interface), interface)
        except ConfigError as error:
            problem = str(error)
    if place.nodes == 1:
        return Address(LOOPBACK, "lo", problem)
    try:
        if place.node_rank == 0 and is_ours(place.master_addr):
            host = socket.gethostbyname(place.master_addr)
        else:
            host = address_towards(place.master_addr, place.master_port)
        if not is_loopback(host) or is_loopback(place.master_addr):
            return Address(host, interface_of(host), problem)
        problem = problem or f"{place.master_addr}, the name of machine 0, is a loopback address here: {host}"
    except ConfigError as error:
        problem = problem or str(error)
    # Any will do to examine the rest.
    for each in interfaces():
        return Address(each["address"], each["name"], problem)
    return Address(LOOPBACK, "lo", problem)


@dataclass
class Examiner:
    """One machine, at work.

    Attributes:
        examination: what the job needs.
        place: which machine this is.
        address: where the others reach it.
        token: the examination's secret.
    """

    examination: Examination
    place: Place
    address: Address
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
            storage.remove_mark(self._run, name)
        self._marks.clear()

    @property
    def _run(self) -> Path:
        return storage.existing(self.examination.run)

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
        return [try_way(host, port, self.token) for host, port in targets]

    def _flow(self, host: str, port: int) -> Any:
        return measure_flow(host, port, self.token)

    def _mark(self, examination: str) -> str | None:
        name = storage.mark_name(examination, self.place.node_rank)
        self._marks.append(name)
        return storage.leave_mark(self._run, name)

    def _look(self, examination: str, error: str | None, others: list[int]) -> Any:
        names = {other: storage.mark_name(examination, other) for other in others}
        own = storage.mark_name(examination, self.place.node_rank)
        return storage.look(self._run, self.examination.run, own, names, error)

    def _all_reduce(
        self, first_rank: int, local_ranks: int, world_size: int, host: str, port: int
    ) -> dict[str, Any]:
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
        for result in together(ranks).values():
            if isinstance(result, Exception):
                raise result
            results.append(result)
        return next((result for result in results if "error" in result), results[0])


def _run_rank(place: dict[str, Any]) -> dict[str, Any]:
    """What :mod:`paceline.doctor.canary` prints as one rank."""
    try:
        done = run_python("paceline.doctor.canary", [json.dumps(place)], time_limit_s=2 * _CANARY_S)
    except subprocess.TimeoutExpired:
        return {"error": f"it did not end within {2 * _CANARY_S:g} s"}
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    except (IndexError, ValueError):
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
