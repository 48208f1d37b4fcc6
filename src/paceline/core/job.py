"""A job: the configuration of a run's workers, in a file, and the processes that a launcher starts. No torch."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tomli_w

from paceline.core.config import RunConfig, config_from_mapping
from paceline.core.environment import Environment, EtcdEndpoints, default_threads
from paceline.core.errors import ConfigError
from paceline.core.files import parse_json, parse_toml, read_document
from paceline.core.option_groups import EnvStyle, RankLauncher
from paceline.core.options import flag

if TYPE_CHECKING:
    from paceline.runs.directory import RunDirectory


# --- The configuration of a run's workers ---


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """The configuration of a worker; the content of a ``job.toml``.

    Attributes:
        explicit_options: the names of the options that the user gave, also with their default values.
        fields: the task's fields, if a script gave them.
        quiet: show nothing on the terminal.
        supervised: a launcher of Paceline reports failures to the user.
        world_size: number of processes at the run's start, over all nodes; None if each process knows it.
        device: what the launcher has found on this node, which each process must find too; None if it has not looked.
        started: time of the request, in seconds since the epoch, at which ``--walltime`` begins.
        trial_scheduler: the socket of the scheduler that decides after each evaluation whether the run continues.
        script: the file or module of a script with a loop of its own, which each worker runs, and its arguments.
    """

    config: RunConfig
    explicit_options: frozenset[str] = frozenset()
    fields: Mapping[str, Any] | None = None
    quiet: bool = False
    supervised: bool = False
    world_size: int | None = None
    device: Literal["cpu", "cuda"] | None = None
    started: float = field(default_factory=time.time)
    trial_scheduler: str | None = None
    script: tuple[str, ...] = ()

    def with_run_dir(self, path: Path) -> WorkerConfig:
        """Return the configuration of the run in another directory."""
        return replace(self, config=self.config.replace(run_dir=str(path)))

    def to_toml(self) -> str:
        """Return the job as text."""
        document: dict[str, Any] = {"quiet": self.quiet, "supervised": self.supervised}
        if self.world_size is not None:
            document["world_size"] = self.world_size
        if self.device is not None:
            document["device"] = self.device
        document["started"] = self.started
        if self.trial_scheduler is not None:
            document["trial_scheduler"] = self.trial_scheduler
        if self.script:
            document["script"] = list(self.script)
        document["explicit_options"] = sorted(self.explicit_options)
        document["config"] = {k: list(v) if isinstance(v, tuple) else v for k, v in self.config.non_defaults().items()}
        if self.fields is not None:
            # As JSON: a field may be None, which TOML has no word for.
            document["fields"] = json.dumps(dict(self.fields))
        return tomli_w.dumps(document)

    @classmethod
    def from_toml(cls, path: Path) -> WorkerConfig:
        """Read a job.

        Raises:
            ConfigError: the file is damaged, or an option is unknown or wrong.
        """
        try:
            document = parse_toml(read_document(path))
            fields = document.get("fields")
            return cls(
                config=config_from_mapping(document["config"], str(path)),
                explicit_options=frozenset(document["explicit_options"]),
                fields=None if fields is None else parse_json(fields),
                quiet=document["quiet"],
                supervised=document["supervised"],
                world_size=document.get("world_size"),
                device=document.get("device"),
                started=document["started"],
                trial_scheduler=document.get("trial_scheduler"),
                script=tuple(document.get("script", ())),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"the job file {path} is damaged: {error!r:.200}. Start the run again.") from error


def default_run_path(spec: str) -> str:
    """``runs/TASK-TIME`` for a new run; with a number behind it where that is taken."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", spec.rpartition(":")[2] or spec).strip("-").lower()
    path = f"runs/{name or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"
    numbered = (f"{path}-{number}" for number in itertools.count(2))
    return path if not Path(path).exists() else next(p for p in numbered if not Path(p).exists())


# --- A job, described once: every launcher renders this, and each node's agent runs its part of it ---


ONCE_A_RANK: tuple[RankLauncher, ...] = ("srun", "mpi", "horovod")
"""These start each rank themselves; under the others one command is started on each node."""

Recovery = Literal["inplace", "restart", "none"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The place of one node in a job, if it is known.

    Attributes:
        node_rank: this node's number.
        rdzv_endpoint: HOST:PORT of node 0, the rendezvous of several nodes.
        rdzv_id: a name that all nodes of the job share.
        hosts: the host names of the nodes, in their order, as far as they are known; perhaps the first one alone.
        joins: this node joins a running job.
        leaves_stop_codes: :mod:`paceline.launch.stop_codes` runs each rank. It passes Slurm's signals on to the rank,
            and writes the rank's exit code to a file for the job's script.
        log_directory: the run in which ranks above 0 log, and failures are recorded; None: all print to the terminal.
    """

    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str = "paceline"
    hosts: tuple[str, ...] = ()
    joins: bool = False
    leaves_stop_codes: bool = False
    log_directory: RunDirectory | None = None


@dataclass(frozen=True, kw_only=True)
class RecoveryPolicy:
    """The response to the death of a worker, by Paceline's agent or torchrun.

    Attributes:
        recover: "inplace": the worker is replaced, and the others continue; "restart": all workers restart;
            "none": the job ends.
        max_restarts: replacements without progress after which the job ends; for torchrun, all restarts.
        grace_s: how long the others may take to end after one rank failed.
        heartbeat_s: a worker or an agent that is silent for this long counts as lost.
        spares: processes, over all nodes, that hold the state and compute only once others are lost.
        task_digest: a digest of the task's code and options; equal on all nodes of a job.
        token_file: holds the secret that the job's agents share; default: in the run's directory.
        init_timeout_s: time limit of the search for the other nodes.
        coordinator: an etcd cluster that decides on the leader and the nodes; None: the agents do.
    """

    recover: Recovery = "none"
    max_restarts: int = 0
    grace_s: float = 10.0
    heartbeat_s: float = 2.0
    spares: int = 0
    task_digest: str = ""
    token_file: Path | None = None
    init_timeout_s: float = 300.0
    coordinator: EtcdEndpoints | None = None

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ConfigError(f"--max-restarts must be at least 0, but is {self.max_restarts}.")


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """The description of a job: a command, its nodes, and the environment of each process.

    Attributes:
        command: a program and its arguments: ``("python", "train.py", "--lr", "0.1")``. In them
            ``{master_addr}``, ``{master_port}``, ``{node_rank}``, ``{nnodes}``, ``{rank}``, ``{world_size}`` and
            ``{local_rank}`` are replaced at the start.
        name: shown in lists and by the cluster's own tools.
        directory: absolute, and shared by the nodes; it holds the rendered files and the job's logs.
        is_recorded: other commands may query the job later: ``directory`` keeps its exit code for them.
        nodes: the least and the greatest number of nodes.
        nproc: processes per node: one number for all, or one for each.
        gpus_per_node: GPUs of each node to request from the cluster.
        gpu_type: the GPUs' type, or MIG profile, in Slurm's words: a100, 1g.5gb.
        cpus_per_task: CPUs of each process to request from the cluster.
        walltime_s: the job's time limit.
        env: variables for every process.
        threads: OMP_NUM_THREADS of every process; default: the rank launcher's.
        rank_launcher: the program that starts the ranks.
        env_style: the set of rank variables.
        roles: with the tensorflow env style: the role of each rank, such as ``("chief", "worker", "ps")``.
        is_task: the command trains a Paceline task: ``paceline train``, which the agent may start, or a worker.
        run: the run directory of a task.
        job_file: the file with the configuration of a task's workers; None if the command is not their program.
        interface: the network interface to the other nodes.
        master_port: the port on which rank 0 listens; default: derived from the job's number, so that jobs do not
            clash; on one node a free one.
        torchrun: further options of torchrun, if it is the rank launcher: ``("tee=3",)``.
        workdir: the command's working directory.
        python: the interpreter on the nodes.
        preflight: the command of ranks that check the nodes first, if the job is started once on each; the job starts
            only if they find no fault.
        placement: of one node in the job.
        recovery: the response to the death of a worker.
    """

    command: tuple[str, ...]
    name: str = "job"
    directory: Path = field(default_factory=Path.cwd)
    is_recorded: bool = False
    nodes: tuple[int, int] = (1, 1)
    nproc: tuple[int, ...] = (1,)
    gpus_per_node: int | None = None
    gpu_type: str | None = None
    cpus_per_task: int | None = None
    walltime_s: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None
    rank_launcher: RankLauncher = "torchrun"
    env_style: EnvStyle = "torch"
    roles: tuple[str, ...] = ()
    is_task: bool = False
    run: Path | None = None
    job_file: Path | None = None
    interface: str | None = None
    master_port: int | None = None
    torchrun: tuple[str, ...] = ()
    workdir: Path = field(default_factory=Path.cwd)
    python: str = sys.executable
    preflight: tuple[str, ...] = ()
    placement: Placement = field(default_factory=Placement)
    recovery: RecoveryPolicy = field(default_factory=RecoveryPolicy)

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("there is no command to launch. Give it after --, such as: -- python train.py")
        least, most = self.nodes
        for name, number in (("nproc", min(self.nproc)), ("nodes", least)):
            if number < 1:
                raise ConfigError(f"--{name} must be at least 1, but is {number}.")
        if len(self.nproc) > 1 and not least == most == len(self.nproc):
            raise ConfigError(
                f"--nproc {','.join(map(str, self.nproc))} lists {len(self.nproc)} nodes, but --nodes is "
                f"{least if least == most else f'{least}:{most}'}."
            )
        for name in ("gpus_per_node", "cpus_per_task", "threads"):
            value = getattr(self, name)
            if value is not None and value < (0 if name == "gpus_per_node" else 1):
                raise ConfigError(f"{flag(name)} must be a positive number, but is {value}.")
        if self.master_port is not None and not 1 <= self.master_port <= 65535:
            raise ConfigError(f"--master-port must be between 1 and 65535, but is {self.master_port}.")
        check_node_rank(self.placement.node_rank, most)

    def processes_on(self, node_rank: int) -> int:
        """Return the number of processes that a node starts."""
        return self.nproc[node_rank] if len(self.nproc) > 1 else self.nproc[0]

    @property
    def world_size(self) -> int:
        """Processes over the least number of nodes."""
        return sum(self.nproc) if len(self.nproc) > 1 else self.nproc[0] * self.nodes[0]

    @property
    def local_world_size(self) -> int:
        """Processes on this node."""
        return self.processes_on(self.placement.node_rank or 0)

    @property
    def first_rank(self) -> int:
        """The lowest rank on this node."""
        return sum(self.processes_on(node_rank) for node_rank in range(self.placement.node_rank or 0))

    @property
    def is_single_node(self) -> bool:
        """Whether the job has this node only, now and later."""
        return self.nodes[1] == 1 and not self.placement.joins

    @property
    def least_nodes(self) -> int:
        """With fewer nodes a job that recovers waits for others; one of a fixed size continues with one."""
        least, most = self.nodes
        return least if most > least else 1

    @property
    def starts_each_rank(self) -> bool:
        """Whether the command is started once for each rank, not once on each node."""
        return self.rank_launcher in ONCE_A_RANK

    @property
    def outlives_nodes(self) -> bool:
        """Whether the job continues without a lost node: agents do, and torchrun if it may restart on fewer nodes."""
        least, most = self.nodes
        is_elastic = self.rank_launcher == "torchrun" and least < most and self.recovery.max_restarts > 0
        return self.rank_launcher == "agent" or is_elastic

    @property
    def gres(self) -> str:
        """The GPUs of a node in Slurm's words: ``gpu:2``, ``gpu:a100:2``."""
        return ":".join(["gpu", *([self.gpu_type] if self.gpu_type else []), str(self.gpus_per_node)])

    def thread_variables(self) -> dict[str, str]:
        """OMP_NUM_THREADS as a worker must find it, so that it is the same under every launcher."""
        if self.threads is None and "OMP_NUM_THREADS" in {**os.environ, **self.env}:
            return {}
        nproc = self.local_world_size
        share = Environment(world_size=nproc, local_world_size=nproc)
        return {"OMP_NUM_THREADS": str(default_threads(share, self.threads, {}))}


def check_node_rank(node_rank: int | None, nodes: int) -> None:
    """Check that a node's number, if it has one, is below the number of nodes.

    Raises:
        ConfigError: it is not.
    """
    if node_rank is not None and not 0 <= node_rank < nodes:
        raise ConfigError(f"--node-rank must be between 0 and {nodes - 1}, but is {node_rank}.")


def split_python(command: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Split off the interpreter of a script or ``-m`` module with its arguments; ("", command) for anything else.

    Also for an interpreter with options of its own, such as ``-u`` or ``-c``: torchrun knows none but ``-m``.
    """
    is_python = Path(command[0]).name.rstrip("0123456789.") == "python"
    arguments = tuple(command[1:])
    if arguments[:2] == ("-P", "-m"):  # a module of ours, which imports nothing from the current directory
        arguments = arguments[1:]
    has_options = bool(arguments) and arguments[0].startswith("-") and arguments[0] != "-m"
    if is_python and not has_options:
        return command[0], arguments
    return "", tuple(command)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A process to start on this machine.

    Attributes:
        title: says what it is, above its text.
        argv: a program and its arguments.
        env: added to this process's own variables.
        stdin: what it reads.
        rank: of a process that is a rank.
        log: takes its output; default: this process's terminal.
        serves: the process serves the others and never ends; Paceline ends it after the others.
    """

    title: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""
    rank: int | None = None
    log: Path | None = None
    serves: bool = False

    @property
    def text(self) -> str:
        """The command for a shell, ready to be pasted."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        words.append(shlex.join(self.argv))
        if self.log is not None:
            words.append(f">>{shlex.quote(str(self.log))} 2>&1")
        text = f"# {self.title}\n" + " \\\n  ".join(words)
        if not self.stdin:
            return f"{text}\n"
        end = "END"
        while end in self.stdin.splitlines():
            end += "_"
        return f"{text} <<'{end}'\n{self.stdin}{end}\n"

    def to_json(self) -> Mapping[str, object]:
        """Return the document of ``--dry-run --json``."""
        return {"title": self.title, "argv": self.argv, "env": self.env, "stdin": self.stdin}
