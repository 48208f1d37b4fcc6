"""A job's requirements on its nodes, and the report of a preflight check."""

from __future__ import annotations

import json
from typing import Any, Literal

from msgspec import Struct, to_builtins

Status = Literal["pass", "warn", "fail"]

CHECKS = (
    *("machines", "python", "libraries", "torch", "task", "gpus", "gpu-health", "ports", "interface", "bandwidth"),
    *("host-name", "clock", "run-directory", "disk-space", "shared-memory", "open-files", "cpus", "all-reduce"),
)
"""All checks, in the order of the report."""


class Check(Struct, frozen=True):
    """The result of one check.

    Attributes:
        where: nodes, a pair of nodes as ``a -> b``, or "all".
        status: "warn": the job will run with a limitation; "fail": it will not run, or not as requested.
    """

    id: str
    where: str
    status: Status
    found: str
    advice: str = ""


class PreflightReport(Struct, frozen=True, kw_only=True):
    """All checks of a job's nodes, in the order of :data:`CHECKS`.

    Attributes:
        machines: names of the nodes, by number; nodes that never connected are named by number.
        interface: the interface that the following job should use; None keeps its own choice.
    """

    machines: tuple[str, ...]
    checks: tuple[Check, ...]
    interface: str | None = None

    @property
    def status(self) -> Status:
        statuses = {check.status for check in self.checks}
        return "fail" if "fail" in statuses else "warn" if "warn" in statuses else "pass"

    def to_json(self) -> dict[str, Any]:
        return {"status": self.status, **to_builtins(self)}


class PreflightSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The requirements of a job on its nodes.

    Attributes:
        run: the run's directory; if it does not exist, its nearest existing parent is checked.
        nproc: processes per node: one number for all nodes, or one for each.
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
        return self.nproc[node_rank] if len(self.nproc) > 1 else self.nproc[0]

    def command(self, python: str) -> tuple[str, ...]:
        """Return the command of each rank, to which the file of the report is added."""
        return (python, "-P", "-m", "paceline_checks.preflight.rank", json.dumps(to_builtins(self)))
