"""A job for the machines of a Ray cluster, as a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """What is to run on the machines of a cluster; the content of ``ray-job.json``.

    Attributes:
        command: what runs on each machine.
        cpus: CPUs of each machine to reserve.
        gpus: GPUs of each machine to reserve; None: all, in a cluster of the job's own, else none.
        placement: Ray's word for how close the machines are to be.
        workdir: where the command runs.
        env: variables for it.
        recovers: what is left of the job goes on when a machine is lost, and takes another one in.
        replacements: how many lost machines are replaced.
        own_cluster: nobody else uses the cluster.
    """

    command: tuple[str, ...]
    cpus: tuple[int, ...]
    gpus: int | None
    placement: str
    workdir: str
    env: Mapping[str, str]
    recovers: bool = False
    replacements: int = 0
    own_cluster: bool = False

    @property
    def machines(self) -> int:
        """How many there are."""
        return len(self.cpus)

    @property
    def text(self) -> str:
        """The job as JSON, a line for each attribute."""
        lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in asdict(self).items())
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def read(cls, path: Path) -> RayJob:
        """Read a job that :attr:`text` has described."""
        values = json.loads(path.read_text(encoding="utf-8"))
        values |= {name: tuple(values[name]) for name in ("command", "cpus")}
        return cls(**values)
