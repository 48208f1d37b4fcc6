"""What a preflight check is asked to do, what it finds, and how that is printed."""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.core.options import parse_nproc
from paceline.core.parent_death import kill_with_parent_command
from paceline.core.signals import ECHO_S, STOP_SIGNALS, StopRequests, handle_signals
from paceline.launch.preflight.probes import Connection, Flow, Storage

# --- What the doctor finds: one :class:`Check` for each thing that it looks at, and a :class:`Report` of
#     all


Status = Literal["pass", "warn", "fail"]

CHECKS = {
    "machines": "all machines of the job are there",
    "python": "the same Python everywhere",
    "libraries": "the same libraries everywhere",
    "torch": "torch can be imported",
    "task": "the task can be imported",
    "gpus": "as many GPUs as asked for, and torch can use them",
    "gpu-health": "no memory errors, Xid errors or throttling",
    "gpu-links": "how the GPUs of a machine reach each other",
    "ports": "every machine reaches every other one",
    "interface": "the network interface is the fast one",
    "bandwidth": "no link is much slower than the others",
    "rendezvous": "machine 0 is near to the others",
    "host-name": "a machine's name is not its loopback address",
    "clock": "the clocks agree",
    "run-directory": "the run's directory is shared and can be written",
    "disk-space": "there is room for the checkpoints",
    "shared-memory": "/dev/shm is large enough",
    "open-files": "enough files and sockets can be open",
    "locked-memory": "RDMA may lock memory",
    "cpus": "as many cores as threads",
    "all-reduce": "an all-reduce over all machines is right, and how fast",
}
"""Every check, in the order of the report, with what it makes sure of."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at.

    Attributes:
        id: one of :data:`CHECKS`.
        where: a machine, a pair of them as ``a -> b``, or "all".
        status: "warn": the job will run, but not as it could; "fail": it will not, or not as was asked.
        found: what there is.
        advice: what to do about it; empty where nothing is.
    """

    id: str
    where: str
    status: Status
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        assert self.id in CHECKS, self.id


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """All that was found.

    Attributes:
        machines: their names, by number; one that never came is named by its number.
        checks: in the order of :data:`CHECKS`.
        interface: before a job that names none, the one that it is to use; None: what it would use anyway.
    """

    machines: tuple[str, ...]
    checks: tuple[Check, ...]
    interface: str | None = None

    @property
    def status(self) -> Status:
        """The worst there is."""
        there = {check.status for check in self.checks}
        return "fail" if "fail" in there else "warn" if "warn" in there else "pass"

    def to_json(self) -> dict[str, Any]:
        """As plain values, with the status."""
        return {"status": self.status, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PreflightReport:
        """The inverse of :meth:`to_json`."""
        return cls(
            machines=tuple(values["machines"]),
            checks=tuple(Check(**check) for check in values["checks"]),
            interface=values.get("interface"),
        )


def make_report(machines: tuple[str, ...], checks: list[Check], interface: str | None = None) -> PreflightReport:
    """Sort the checks, those of one kind by how bad they are."""
    order = {name: number for number, name in enumerate(CHECKS)}
    severity = {"fail": 0, "warn": 1, "pass": 2}
    ranked = sorted(checks, key=lambda check: (order[check.id], severity[check.status]))
    return PreflightReport(machines=machines, checks=tuple(ranked), interface=interface)


# --- What to examine: the same on all machines of a job, and how its program is told ---


MODULE = "paceline.launch.preflight.node"


@dataclass(frozen=True, kw_only=True)
class PreflightSpec:
    """What a job needs of its machines.

    Attributes:
        directory: where the machines meet, and where the report is left; all of them see it.
        run: the run's directory; of one that is not there yet, the nearest one above it is looked at.
        task: whose import is tried; "" for none.
        nproc: processes a machine: one number for all, or one for each.
        threads: CPU threads a process.
        gpus_per_node: as many GPUs must be usable on each machine; None: those there are.
        interface: the network interface to the other machines; None: the one on the way to machine 0.
        keep: checkpoints that must find room.
        checkpoint_bytes: of one; None: as those of the run, else estimated from the task's parameters.
        timeout_s: how long to wait for all machines to appear.
        agents: Paceline's agents start the ranks, and tell each its network interface.
        preflight: the job goes on only where the examination ends well, so print what is wrong.
    """

    directory: Path
    run: Path
    task: str = ""
    nproc: tuple[int, ...] = (1,)
    threads: int | None = None
    gpus_per_node: int | None = None
    interface: str | None = None
    keep: int = 3
    checkpoint_bytes: int | None = None
    timeout_s: float = 60.0
    agents: bool = False
    preflight: bool = False

    def processes_on(self, node_rank: int) -> int:
        """How many processes a machine runs."""
        return self.nproc[node_rank] if len(self.nproc) > 1 else self.nproc[0]

    def command(self, python: str) -> tuple[str, ...]:
        """The command for each machine; the launcher replaces its placeholders."""
        words = [python, "-m", MODULE, "--directory", str(self.directory), "--run-dir", str(self.run)]
        words += ["--nproc", ",".join(map(str, self.nproc)), "--keep-checkpoints", str(self.keep)]
        words += ["--timeout", f"{self.timeout_s:g}"]
        for name in ("threads", "gpus_per_node", "interface", "checkpoint_bytes"):
            value = getattr(self, name)
            if value is not None:
                words += [f"--{name.replace('_', '-')}", str(value)]
        if self.task:
            words += ["--task", self.task]
        words += [f"--{name}" for name in ("agents", "preflight") if getattr(self, name)]
        words += ["--nodes", "{nnodes}", "--node-rank", "{node_rank}"]
        return (*words, "--master-addr", "{master_addr}", "--master-port", "{master_port}")


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """Which machine this is.

    Attributes:
        node_rank: 0 to ``nodes`` - 1.
        nodes: machines of the job.
        master_addr: machine 0, as the others name it.
        master_port: where the job's rank 0 is going to listen.
    """

    node_rank: int
    nodes: int
    master_addr: str
    master_port: int


def parse_command(argv: list[str]) -> tuple[PreflightSpec, NodePlace]:
    """What :meth:`Examination.command` says, once the placeholders are replaced."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--run-dir", dest="run", type=Path, required=True)
    parser.add_argument("--task", default="")
    parser.add_argument("--nproc", type=parse_nproc, default=(1,))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--gpus-per-node", type=int)
    parser.add_argument("--interface")
    parser.add_argument("--keep-checkpoints", dest="keep", type=int, default=3)
    parser.add_argument("--checkpoint-bytes", type=int)
    parser.add_argument("--timeout", dest="timeout_s", type=float, default=60.0)
    parser.add_argument("--agents", action="store_true")
    parser.add_argument("--preflight", action="store_true")
    place = {"nodes": int, "node_rank": int, "master_addr": str, "master_port": int}
    for name, kind in place.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, required=True)
    values = vars(parser.parse_args(argv))
    here = NodePlace(**{name: values.pop(name) for name in place})
    return PreflightSpec(**values), here


# --- All that an examination has gathered, from every machine and every pair of them, before it is judged ---


_SLOWEST = 100e6 / 8  # 100 Mbit/s

Pair = tuple[int, int]
"""Two machines, by number: the first one connects, or sends."""


@dataclass(kw_only=True)
class PreflightResults:
    """What was gathered; machines are named by number.

    Attributes:
        examination: what the job needs.
        nodes: machines of the job, also those that never came.
        port: the rendezvous port.
        facts: of each machine; see :class:`~paceline.launch.preflight.facts.Facts`, and ``address``,
            ``interface`` and ``address_problem`` besides.
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

    examination: PreflightSpec
    nodes: int
    port: int
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    absent: dict[int, str] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    port_problem: str | None = None
    clock_s: dict[int, tuple[float, float]] = field(default_factory=dict)
    rendezvous: dict[Pair, Connection] = field(default_factory=dict)
    data: dict[Pair, Connection] = field(default_factory=dict)
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


# --- A report for people ---


_STYLES: dict[Status, str] = {"pass": "green", "warn": "yellow", "fail": "bold red"}


def print_report(report: PreflightReport, console: Console) -> None:
    """A row for each check; where it did not pass, with what to do."""
    table = Table("check", "", "where", "found", "what to do")
    for check in report.checks:
        table.add_row(
            check.id,
            f"[{_STYLES[check.status]}]{check.status}[/]",
            escape(check.where),
            escape(check.found),
            escape(f"{check.advice}." if check.advice else ""),
        )
    console.print(table)
    counts: Counter[str] = Counter(check.status for check in report.checks)
    machines = f"{len(report.machines)} machine{'s' if len(report.machines) > 1 else ''}"
    parts = [f"{counts['pass']} passed"]
    parts += [
        f"{counts[status]} {word}" for status, word in (("warn", "to look at"), ("fail", "failed")) if counts[status]
    ]
    console.print(f"{machines}: {', '.join(parts)}.", style=_STYLES[report.status])


# --- What runs on a machine before its ranks: it can keep them from starting, and choose their network ---


_FILE = "PACELINE_PREFLIGHT_FILE"


def run_before(command: Sequence[str]) -> tuple[int, str | None]:
    """Run it to its end; return its exit code, and the network interface that it has chosen, if any.

    It is asked to end by any of :data:`~paceline.core.signals.STOP_SIGNALS`, and cleans up first: the
    exit code is then 128 + the signal's number.
    """
    requests = StopRequests(ECHO_S)
    process: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        match requests.hear(number):
            case "first" if process is not None:
                process.terminate()
            case "end" if process is not None:
                process.kill()

    with (
        handle_signals(STOP_SIGNALS, stop),
        tempfile.TemporaryDirectory(prefix="paceline-preflight-") as directory,
    ):
        file = Path(directory) / "interface"
        process = subprocess.Popen(kill_with_parent_command(command), env={**os.environ, _FILE: str(file)})
        if requests.first is not None:
            process.terminate()
        code = process.wait()
        if requests.first is not None:
            code = 128 + requests.first
        return code, file.read_text() if file.exists() else None


def choose_interface(name: str) -> bool:
    """In such a program: have the ranks use this interface; False where nothing waits for the choice."""
    if _FILE not in os.environ:
        return False
    Path(os.environ[_FILE]).write_text(name)
    return True
