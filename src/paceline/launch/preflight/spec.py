"""Requirements, results and report of a preflight check."""

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

from rich.markup import escape
from rich.table import Table

from paceline.core.options import parse_nproc
from paceline.core.owned_names import own_prefix
from paceline.core.parent_death import kill_with_parent_command
from paceline.core.rich_console import Console
from paceline.core.signals import ECHO_S, STOP_SIGNALS, StopRequests, handle_signals
from paceline.launch.preflight.probes import Connection, Flow, Storage

# --- The report: one :class:`Check` per condition, and a :class:`PreflightReport` of all


Status = Literal["pass", "warn", "fail"]

CHECKS = {
    "machines": "all nodes of the job are present",
    "python": "the same Python on all nodes",
    "libraries": "the same libraries on all nodes",
    "torch": "torch can be imported",
    "task": "the task can be imported",
    "gpus": "as many GPUs as requested, usable by torch",
    "gpu-health": "no memory errors, Xid errors or throttling",
    "gpu-links": "connections between the GPUs of a node",
    "ports": "every node can connect to every other node",
    "interface": "the network interface is the fast one",
    "bandwidth": "no link is much slower than the others",
    "rendezvous": "node 0 is close to the others",
    "host-name": "a node's name is not its loopback address",
    "clock": "the clocks agree",
    "run-directory": "the run's directory is shared and writable",
    "disk-space": "there is space for the checkpoints",
    "shared-memory": "/dev/shm is large enough",
    "open-files": "enough files and sockets can be open",
    "locked-memory": "RDMA can lock memory",
    "cpus": "as many cores as threads",
    "all-reduce": "an all-reduce over all nodes is correct, and its speed",
}
"""All checks in the order of the report, with the condition that they check."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check.

    Attributes:
        id: one of :data:`CHECKS`.
        where: a node, a pair of nodes as ``a -> b``, or "all".
        status: "warn": the job will run with a limitation; "fail": it will not run, or not as requested.
        found: the observed facts.
        advice: how to correct it; "" if the check passed.
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
    """All checks of a job's nodes.

    Attributes:
        machines: names of the nodes, by number; nodes that never connected are named by number.
        checks: in the order of :data:`CHECKS`.
        interface: the interface that the following job should use; None keeps its own choice.
    """

    machines: tuple[str, ...]
    checks: tuple[Check, ...]
    interface: str | None = None

    @property
    def status(self) -> Status:
        """Return the worst status."""
        statuses = {check.status for check in self.checks}
        return "fail" if "fail" in statuses else "warn" if "warn" in statuses else "pass"

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON types, with its status."""
        return {"status": self.status, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PreflightReport:
        """Return the report of :meth:`to_json`'s result."""
        return cls(
            machines=tuple(values["machines"]),
            checks=tuple(Check(**check) for check in values["checks"]),
            interface=values.get("interface"),
        )


def make_report(machines: tuple[str, ...], checks: list[Check], interface: str | None = None) -> PreflightReport:
    """Sort the checks in the order of the report, the most severe first."""
    order = {name: number for number, name in enumerate(CHECKS)}
    severity = {"fail": 0, "warn": 1, "pass": 2}
    ranked = sorted(checks, key=lambda check: (order[check.id], severity[check.status]))
    return PreflightReport(machines=machines, checks=tuple(ranked), interface=interface)


# --- The requirements, the same on all nodes of a job, and the program's command line ---


MODULE = "paceline.launch.preflight.node"


@dataclass(frozen=True, kw_only=True)
class PreflightSpec:
    """The requirements of a job on its nodes.

    Attributes:
        directory: shared by all nodes, for their rendezvous and the report.
        run: the run's directory; if it does not exist, its nearest existing parent is checked.
        task: the task to import; "" for none.
        nproc: processes per node: one number for all nodes, or one for each.
        threads: CPU threads per process.
        gpus_per_node: required usable GPUs per node; None accepts any number.
        interface: network interface to the other nodes; None: the one on the route to node 0.
        keep: number of checkpoints that must fit on the disk.
        checkpoint_bytes: size of one; None: as in the run, else estimated from the task's parameters.
        timeout_s: how long to wait for all nodes.
        agents: Paceline's agents start the ranks, and give each its network interface.
        preflight: a job follows if nothing fails, so print the problems.
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
        """Return the number of processes of a node."""
        return self.nproc[node_rank] if len(self.nproc) > 1 else self.nproc[0]

    def command(self, python: str) -> tuple[str, ...]:
        """Return the command for each node; the launcher replaces its placeholders."""
        words = [python, "-P", "-m", MODULE, "--directory", str(self.directory), "--run-dir", str(self.run)]
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
    """The place of a node in the job.

    Attributes:
        node_rank: 0 to ``nodes`` - 1.
        nodes: number of nodes.
        master_addr: node 0, as the others name it.
        master_port: of the job's rank 0.
    """

    node_rank: int
    nodes: int
    master_addr: str
    master_port: int


def parse_command(argv: list[str]) -> tuple[PreflightSpec, NodePlace]:
    """Parse the command of :meth:`PreflightSpec.command` after its placeholders have been replaced."""
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
    place_of_node = NodePlace(**{name: values.pop(name) for name in place})
    return PreflightSpec(**values), place_of_node


# --- The collected facts of every node and every pair of nodes ---


_MIN_RATE = 100e6 / 8  # 100 Mbit/s

Pair = tuple[int, int]
"""Two nodes, by number: the first one connects, or sends."""


@dataclass(kw_only=True)
class PreflightResults:
    """The collected facts, by node number.

    Attributes:
        spec: requirements of the job.
        nodes: number of nodes of the job, including those that never connected.
        port: the rendezvous port.
        facts: of each node; :class:`~paceline.launch.preflight.facts.NodeFacts` with ``address``, ``interface``
            and ``address_problem``.
        absent: why a node is missing, or was lost.
        hosts: names of nodes without facts.
        port_problem: why node 0 cannot listen on the rendezvous port.
        clock_s: a node's clock offset from node 0, and its uncertainty.
        rendezvous: connections to the rendezvous port.
        data: connections to an ephemeral port.
        flows: streams over the interface that will be used.
        other_flows: streams over other interfaces, by name.
        storage: of the run's directory.
        all_reduce: result of the all-reduce; None if it was not run, for the reason in ``no_all_reduce``.
    """

    spec: PreflightSpec
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
        """Return a node's name, with its number if two nodes have the same name."""
        if node not in self.facts:
            return self.hosts.get(node, f"node {node}")
        host = str(self.facts[node]["host"])
        same = [other for other, facts in self.facts.items() if facts["host"] == host]
        return host if len(same) == 1 else f"{host} (node {node})"

    def pair(self, pair: Pair) -> str:
        """Return two nodes as ``a -> b``."""
        return f"{self.name(pair[0])} -> {self.name(pair[1])}"

    def processes_on(self, node: int) -> int:
        """Return the number of processes of a node."""
        return self.spec.processes_on(node)


def common_interfaces(facts: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return the interfaces that all nodes have with different addresses, which excludes container bridges."""
    addresses = [{each["name"]: each["address"] for each in own["interfaces"]} for own in facts.values()]
    return sorted(
        name
        for name in addresses[0]
        if all(name in own for own in addresses) and len({own[name] for own in addresses}) == len(addresses)
    )


def known_rates(flows: Mapping[Pair, Flow]) -> dict[Pair, float]:
    """Return the measured bandwidths, in bytes/s."""
    return {pair: flow["bytes_per_s"] for pair, flow in flows.items() if flow["bytes_per_s"] is not None}


def is_slow(rate: float, best: float) -> bool:
    """Return whether a link is slow, absolutely or relative to the fastest; in bytes/s."""
    return rate < _MIN_RATE or rate < 0.25 * best


def is_very_slow(rate: float, best: float) -> bool:
    """Return whether a link is too slow for training."""
    return rate < _MIN_RATE or rate < 0.1 * best


# --- The report as a table ---


_STYLES: dict[Status, str] = {"pass": "green", "warn": "yellow", "fail": "bold red"}


def print_report(report: PreflightReport, console: Console) -> None:
    """Print a row per check, with advice if it did not pass."""
    table = Table("check", "", "where", "found", "advice")
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
    machines = f"{len(report.machines)} node{'s' if len(report.machines) > 1 else ''}"
    parts = [f"{counts['pass']} passed"]
    parts += [f"{counts[status]} {word}" for status, word in (("warn", "warned"), ("fail", "failed")) if counts[status]]
    console.print(f"{machines}: {', '.join(parts)}.", style=_STYLES[report.status])


# --- A command that runs before the ranks: it can prevent their start, and choose their network interface ---


_FILE = "PACELINE_PREFLIGHT_FILE"


def run_before(command: Sequence[str]) -> tuple[int, str | None]:
    """Run the command; return its exit code, and the network interface that it has chosen, if any.

    Any of :data:`~paceline.core.signals.STOP_SIGNALS` asks the command to end and clean up; the exit code is then
    128 + the signal's number.
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
        tempfile.TemporaryDirectory(prefix=own_prefix("preflight")) as directory,
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
    """Make the waiting ranks use this interface; return False if nothing waits for the choice."""
    if _FILE not in os.environ:
        return False
    Path(os.environ[_FILE]).write_text(name)
    return True
