"""What to examine: the same on all machines of a job, and how its program is told."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from paceline.config import parse_nproc

MODULE = "paceline.doctor.node"


@dataclass(frozen=True, kw_only=True)
class Examination:
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
        words = [python, "-m", MODULE, "--directory", str(self.directory), "--run", str(self.run)]
        words += ["--nproc", ",".join(map(str, self.nproc)), "--keep", str(self.keep)]
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
class Place:
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


def parse_command(argv: list[str]) -> tuple[Examination, Place]:
    """What :meth:`Examination.command` says, once the placeholders are replaced."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--task", default="")
    parser.add_argument("--nproc", type=parse_nproc, default=(1,))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--gpus-per-node", type=int)
    parser.add_argument("--interface")
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--checkpoint-bytes", type=int)
    parser.add_argument("--timeout", dest="timeout_s", type=float, default=60.0)
    parser.add_argument("--agents", action="store_true")
    parser.add_argument("--preflight", action="store_true")
    place = {"nodes": int, "node_rank": int, "master_addr": str, "master_port": int}
    for name, kind in place.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, required=True)
    values = vars(parser.parse_args(argv))
    here = Place(**{name: values.pop(name) for name in place})
    return Examination(**values), here
