"""What the doctor finds: one :class:`Check` for each thing that it looks at, and a :class:`Report` of all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
class Report:
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
    def from_json(cls, values: Mapping[str, Any]) -> Report:
        """The inverse of :meth:`to_json`."""
        return cls(
            machines=tuple(values["machines"]),
            checks=tuple(Check(**check) for check in values["checks"]),
            interface=values.get("interface"),
        )


def make_report(machines: tuple[str, ...], checks: list[Check], interface: str | None = None) -> Report:
    """Sort the checks, those of one kind by how bad they are."""
    order = {name: number for number, name in enumerate(CHECKS)}
    severity = {"fail": 0, "warn": 1, "pass": 2}
    ranked = sorted(checks, key=lambda check: (order[check.id], severity[check.status]))
    return Report(machines=machines, checks=tuple(ranked), interface=interface)
