"""The options of launchers, processes and recovery."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.core.errors import ConfigError
from paceline.core.options import (
    option,
    parse_duration_s,
    parse_hang_timeout,
    parse_nodes,
    parse_nproc,
    parse_walltime_s,
)
from paceline.core.plugins import LauncherPlugin

# --- The task and its processes ---


EnvStyle = Literal["torch", "tensorflow", "horovod", "mpi", "none"]
"""The set of rank variables that a process reads; see :mod:`paceline.launch.rank`."""

RankLauncher = Literal["agent", "torchrun", "spawn", "srun", "mpi", "horovod", "ray"]
"""The program that starts the ranks on the nodes of an allocation."""


LauncherName = Literal[
    "auto",
    "inprocess",
    "spawn",
    "torchrun",
    "slurm",
    "submitit",
    "ray",
    "mpi",
    "horovod",
    "ssh",
    "kubernetes",
    "sagemaker",
    "azureml",
    "google",
]
"""Where ``--on`` starts processes, unless it names a plug-in."""


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ProcessOptions:
    """Options of the task and its processes."""

    task: str = option(
        "",
        "file.py:Name, package.module:Name or a built-in task's name.",
        group="Task",
        resume="fresh",
        bits="always",
        scope="task",
        from_launcher=True,
        summary=True,
    )
    set: tuple[str, ...] = option(
        (),
        "A hyperparameter as field=value; may be repeated.",
        group="Task",
        resume="fresh",
        bits="always",
        scope="task",
        summary=True,
    )

    on: LauncherName | LauncherPlugin = option(
        "auto",
        "The launcher. auto: inprocess for one process, spawn for several.",
        group="Processes",
        resume="kept",
        bits="never",
        scope="start",
        from_launcher=True,
    )
    nproc: int | str = option(
        1,
        "Processes on this node; auto: one per GPU, else one per core; in a Slurm allocation, its tasks. 8,4: by node.",
        group="Processes",
        resume="kept",
        bits="never",
        scope="start",
        from_launcher=True,
    )
    nodes: int | str = option(
        1,
        "Number of nodes; run the same command on each. MIN:MAX: start with MIN; more may join and leave.",
        group="Processes",
        resume="kept",
        bits="never",
        scope="start",
        from_launcher=True,
    )
    node_rank: int | None = option(
        None,
        "This node's rank, 0 to nodes - 1.",
        group="Processes",
        resume="fresh",
        bits="never",
        scope="place",
        from_launcher=True,
    )
    rdzv_endpoint: str | None = option(
        None,
        "HOST:PORT of node 0, for jobs with several nodes.",
        group="Processes",
        resume="fresh",
        bits="never",
        scope="place",
        from_launcher=True,
    )
    token_file: str | None = option(
        None,
        "File with the secret that the nodes of a run share. Default: in the run directory.",
        group="Processes",
        resume="fresh",
        bits="never",
        scope="place",
    )
    rdzv_id: str = option(
        "paceline",
        "A job id that all nodes of a run share.",
        group="Processes",
        resume="kept",
        bits="never",
        scope="place",
        from_launcher=True,
    )
    backend: Literal["auto", "gloo", "nccl"] = option(
        "auto",
        "The process group's backend.",
        group="Processes",
        resume="kept",
        bits="rounding",
        scope="process",
    )
    interface: str | None = option(
        None,
        "Network interface for gloo and NCCL, e.g. eth0.",
        group="Processes",
        resume="kept",
        bits="never",
        scope="place",
        from_launcher=True,
    )
    init_timeout: str = option(
        "5min",
        "How long to wait for all processes to start.",
        group="Processes",
        resume="kept",
        bits="never",
        scope="process",
    )
    comm_debug: bool = option(
        False,
        "Log NCCL, gloo and torch.distributed in detail.",
        group="Processes",
        resume="fresh",
        bits="never",
        scope="process",
    )
    threads: int | None = option(
        None,
        "CPU threads per process; affects the bits. Default: OMP_NUM_THREADS, else cores over processes.",
        group="Processes",
        resume="adjustable",
        bits="rounding",
        scope="process",
        minimum=1,
        from_launcher=True,
        fingerprint=True,
        evaluation=True,
        summary=True,
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto",
        "Where to train. auto: on GPUs if available.",
        group="Processes",
        resume="kept",
        bits="rounding",
        scope="process",
        summary=True,
    )

    def __post_init__(self) -> None:
        most_nodes = parse_nodes(self.nodes)[1]
        if most_nodes > 1 and self.rdzv_endpoint is None and self.on in ("spawn", "torchrun"):
            raise ConfigError("--nodes above 1 needs --rdzv-endpoint HOST:PORT, the address of node 0.")
        if self.node_rank is not None and not 0 <= self.node_rank < most_nodes:
            raise ConfigError(f"--node-rank must be between 0 and {most_nodes - 1}, but is {self.node_rank}.")
        parse_nproc(self.nproc)
        parse_duration_s(self.init_timeout, "init_timeout")


# --- Recovery from processes that die, hang or compute wrong results ---


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class RecoveryOptions(ProcessOptions):
    """Options of fault tolerance."""

    recover: Literal["auto", "none", "inplace", "restart"] = option(
        "auto",
        "When a process dies. inplace: replace it while the others continue; restart: restart all from the "
        "newest checkpoint; none: end the job. auto: inplace where supported (--on spawn, CPU, ddp, "
        "reduction exact or allreduce), else restart with --on spawn, else none.",
        group="Recovery",
        resume="kept",
        bits="never",
        scope="recovery",
        summary=True,
    )
    hot_spares: int = option(
        0,
        "Spare processes, over all nodes, that hold the state and replace lost ones.",
        group="Recovery",
        resume="kept",
        bits="never",
        scope="recovery",
        needs="spares",
        minimum=0,
    )
    max_restarts: int = option(
        8,
        "End the job after this many replaced processes without a step of progress.",
        group="Recovery",
        resume="kept",
        bits="never",
        scope="recovery",
        minimum=0,
    )

    walltime: str | None = option(
        None,
        "Save and stop before this time has passed (s, min, h), with exit code 75.",
        group="Recovery",
        resume="kept",
        bits="never",
        scope="recovery",
    )

    sdc_check_every: int = option(
        0,
        "Every N steps, compute one micro-batch's gradient on a second rank too and compare the bits; name and "
        "remove a rank that differs. 0: never.",
        group="Recovery",
        resume="kept",
        bits="never",
        scope="recovery",
        needs="corruption",
        minimum=0,
    )
    purity: Literal["error", "warn", "off"] = option(
        "error",
        "Check that the task computes the same on any number of processes and after a restart. error: stop before "
        "the first checkpoint if it does not, later warn.",
        group="Recovery",
        resume="adjustable",
        bits="never",
        scope="recovery",
        summary=True,
    )
    heartbeat: float = option(
        2.0,
        "Replace a process after this many seconds without a heartbeat.",
        group="Recovery",
        resume="kept",
        bits="never",
        scope="process",
        minimum=0.2,
        maximum=3600,
    )
    hang_timeout: str = option(
        "auto",
        "Step timeout, such as 10min; then report the rank that blocks the step and replace it. "
        "auto: learned, at least 30s. never: no limit.",
        group="Recovery",
        resume="kept",
        bits="never",
        scope="process",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.walltime is not None:
            parse_walltime_s(self.walltime)
        parse_hang_timeout(self.hang_timeout)
