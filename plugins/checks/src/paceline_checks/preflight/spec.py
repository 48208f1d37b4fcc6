"""A job's requirements on its nodes, and the report of a preflight check."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table

from paceline.core.output import Console

Status = Literal["pass", "warn", "fail"]

CHECKS = {
    "machines": "all ranks of the job are present",
    "python": "the same Python on all nodes",
    "libraries": "the same libraries on all nodes",
    "torch": "torch can be imported",
    "task": "the task can be imported",
    "gpus": "as many GPUs as requested, usable by torch",
    "gpu-health": "no memory errors, no throttling",
    "ports": "every node can connect to every other node",
    "interface": "the network interface is the fast one",
    "bandwidth": "no link is much slower than the others",
    "host-name": "a node's name is not its loopback address",
    "clock": "the clocks agree",
    "run-directory": "the run's directory is shared and writable",
    "disk-space": "there is space for the checkpoints",
    "shared-memory": "/dev/shm is large enough",
    "open-files": "enough files and sockets can be open",
    "cpus": "as many cores as threads",
    "all-reduce": "an all-reduce over all ranks is correct, and its speed",
}
"""All checks in the order of the report, with the condition that they check."""


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        id: one of :data:`CHECKS`.
        where: nodes, a pair of nodes as ``a -> b``, or "all".
        status: "warn": the job will run with a limitation; "fail": it will not run, or not as requested.
        found: the observed facts.
        advice: how to correct it; "" if the check passed.
    """

    id: str
    where: str
    status: Status
    found: str
    advice: str = ""


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
        checks = tuple(Check(**check) for check in values["checks"])
        return cls(machines=tuple(values["machines"]), checks=checks, interface=values["interface"])


@dataclass(frozen=True, kw_only=True)
class PreflightSpec:
    """The requirements of a job on its nodes.

    Attributes:
        run: the run's directory; if it does not exist, its nearest existing parent is checked. None: there is none.
        task: the task to import; "" for none.
        nproc: processes per node: one number for all nodes, or one for each.
        threads: CPU threads per process.
        gpus_per_node: required usable GPUs per node; None accepts any number.
        interface: network interface to the other nodes; None: the one on the route to node 0.
        keep: number of checkpoints that must fit on the disk.
        checkpoint_bytes: size of one; None: as in the run, else estimated from the task's parameters.
        timeout_s: how long to wait for all ranks.
        agents: Paceline's agents start the ranks, and give each its network interface.
        before_job: a job follows, on the interface that the report chooses.
    """

    run: str | None = None
    task: str = ""
    nproc: tuple[int, ...] = (1,)
    threads: int | None = None
    gpus_per_node: int | None = None
    interface: str | None = None
    keep: int = 3
    checkpoint_bytes: int | None = None
    timeout_s: float = 120.0
    agents: bool = False
    before_job: bool = False

    def processes_on(self, node_rank: int) -> int:
        """Return the number of processes of a node."""
        return self.nproc[node_rank] if len(self.nproc) > 1 else self.nproc[0]

    def command(self, python: str) -> tuple[str, ...]:
        """Return the command of each rank, to which the file of the report is added."""
        changed = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return (python, "-P", "-m", "paceline_checks.preflight.rank", json.dumps(changed))

    @classmethod
    def parse(cls, text: str) -> PreflightSpec:
        """Return the requirements in a command."""
        values = json.loads(text)
        return cls(**{**values, "nproc": tuple(values.get("nproc", (1,)))})


_STYLES: dict[Status, str] = {"pass": "green", "warn": "yellow", "fail": "bold red"}


def print_report(report: PreflightReport, console: Console) -> None:
    """Print a row per check, with advice if it did not pass."""
    table = Table("check", "", "where", "found", "advice")
    for check in report.checks:
        status = f"[{_STYLES[check.status]}]{check.status}[/]"
        advice = f"{check.advice}." if check.advice else ""
        table.add_row(check.id, status, *map(escape, (check.where, check.found, advice)))
    console.print(table)
    counts: Counter[str] = Counter(check.status for check in report.checks)
    machines = f"{len(report.machines)} node{'s' if len(report.machines) > 1 else ''}"
    parts = [f"{counts['pass']} passed"]
    parts += [f"{counts[status]} {word}" for status, word in (("warn", "warned"), ("fail", "failed")) if counts[status]]
    console.print(f"{machines}: {', '.join(parts)}.", style=_STYLES[report.status])
