"""What one node runs of a job: the processes, their environment, and what may be asked of them. No torch."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from paceline.core.environment import Environment, default_threads
from paceline.core.errors import ConfigError
from paceline.core.process_config import EnvStyle

if TYPE_CHECKING:
    from paceline.runs.directory import RunDirectory

Recovery = Literal["inplace", "restart", "none"]


@dataclass(frozen=True, kw_only=True)
class ProcessGroupSpec:
    """What is to run, and how often.

    Attributes:
        command: Python's arguments: ``("-m", "paceline.training.worker", "JOB.toml")``, or a script and
            its own; where ``python`` is empty, a program and its arguments.
        nproc: processes on this machine.
        counts: processes of each machine, where they differ; default: ``nproc`` everywhere.
        nodes: machines; on each the same command is given.
        node_rank: this machine's number.
        rdzv_endpoint: HOST:PORT of machine 0, where several machines meet.
        rdzv_id: a name that all machines of the job share.
        threads: CPU threads a process; default: OMP_NUM_THREADS, else CPUs over ``nproc``.
        env: environment variables, added to this process's own.
        directory: where ranks above 0 print, and where failures are recorded; None: all print here.
        grace_s: how long the others may take to end after one rank failed.
        master_port: port of rank 0's store on one machine; default: a free one.
        python: the interpreter; "" for a command that is neither a Python script nor a module.
        rdzv_backend: of torchrun on several machines: "c10d", or "static" with fixed ranks.
        local_rank_argument: torchrun gives each script ``--local-rank=N``, as torch.distributed.launch did.
        env_style: which variables tell a process its place.
        hosts: what the machines know each other by, in their order, where it is known; perhaps of the first
            one alone.
        roles: what each rank is, for the tensorflow env style.
        recover: what happens when a worker dies: "inplace": it is replaced, and the others go on; "restart":
            all are started again; "none": the job ends.
        max_restarts: replacements without progress after which the job ends; of torchrun, restarts in all.
        heartbeat_s: a worker or an agent that is silent for so long is taken for lost.
        least_nodes: with fewer machines a job that recovers waits for others; default: it goes on with one.
        most_nodes: how many machines may join; default: ``nodes``.
        spares: processes, over all machines, that hold the state and compute only once others are lost.
        task_code: a digest of the task's code and options; equal on all machines of a job.
        joins: this machine joins a job that runs.
        interface: the network interface to other machines.
        token_file: holds the secret that the job's agents share; default: in the run's directory.
        init_timeout_s: how long to look for the other machines.
    """

    command: tuple[str, ...]
    nproc: int = 1
    counts: tuple[int, ...] = ()
    nodes: int = 1
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str = "paceline"
    threads: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    directory: RunDirectory | None = None
    grace_s: float = 10.0
    master_port: int | None = None
    python: str = sys.executable
    rdzv_backend: Literal["c10d", "static"] = "c10d"
    local_rank_argument: bool = False
    env_style: EnvStyle = "torch"
    hosts: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    recover: Recovery = "none"
    max_restarts: int = 8
    heartbeat_s: float = 2.0
    least_nodes: int = 1
    most_nodes: int | None = None
    spares: int = 0
    task_code: str = ""
    joins: bool = False
    interface: str | None = None
    token_file: Path | None = None
    init_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("there is no command to launch.")
        for name in ("nproc", "nodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be at least 1, but is {getattr(self, name)}.")
        most = self.most_nodes or self.nodes
        if most > 1 and self.rdzv_endpoint is None and not self.joins:
            raise ConfigError("--nodes above 1 needs --rdzv-endpoint HOST:PORT, the address of machine 0.")
        check_node_rank(self.node_rank, most)

    @property
    def argv(self) -> tuple[str, ...]:
        """The command of one process."""
        return (self.python, *self.command) if self.python else self.command

    @property
    def world_size(self) -> int:
        """Processes over all machines."""
        return sum(self.counts) or self.nodes * self.nproc

    @property
    def first_rank(self) -> int:
        """The lowest rank on this machine."""
        node_rank = self.node_rank or 0
        return sum(self.counts[:node_rank]) if self.counts else node_rank * self.nproc

    def thread_variables(self) -> dict[str, str]:
        """OMP_NUM_THREADS as a worker must find it, so that it is the same under every launcher."""
        if self.threads is None and "OMP_NUM_THREADS" in {**os.environ, **self.env}:
            return {}
        share = Environment(world_size=self.nproc, local_world_size=self.nproc)
        return {"OMP_NUM_THREADS": str(default_threads(share, self.threads, {}))}


def check_node_rank(node_rank: int | None, nodes: int) -> None:
    """Make sure that a machine's number, where it has one, is one of so many machines'.

    Raises:
        ConfigError: it is not.
    """
    if node_rank is not None and not 0 <= node_rank < nodes:
        raise ConfigError(f"--node-rank must be between 0 and {nodes - 1}, but is {node_rank}.")


@dataclass(frozen=True, kw_only=True)
class RenderedProcess:
    """One process to start: ``env`` is added to the launcher's own; ``log`` takes its output.

    One that ``serves`` the others never ends by itself, and is ended after them.
    """

    title: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    rank: int | None = None
    log: Path | None = None
    serves: bool = False

    @property
    def text(self) -> str:
        """The process as a shell command that can be pasted."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        words.append(shlex.join(self.argv))
        if self.log is not None:
            words.append(f">>{shlex.quote(str(self.log))} 2>&1")
        return f"# {self.title}\n" + " \\\n  ".join(words) + "\n"


@dataclass(frozen=True, kw_only=True)
class RenderedProcessGroup:
    """What would run: everything that :meth:`LocalLauncher.submit` needs."""

    spec: ProcessGroupSpec
    processes: tuple[RenderedProcess, ...]

    @property
    def text(self) -> str:
        """One shell command for each process, with the variables that it gets."""
        return "\n".join(process.text for process in self.processes)


class ProcessGroup(Protocol):
    """A submitted job."""

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that the launcher started and that still run."""

    def wait(self) -> int:
        """Return the job's exit code: 0, the first culprit's, or 75 or 130 after a requested stop."""

    def cancel(self) -> None:
        """Ask the job to stop, and kill what remains after the grace period; :meth:`wait` then returns."""
