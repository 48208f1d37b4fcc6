"""The options of processes: which ones run where, and what happens when one is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.core.errors import ConfigError
from paceline.core.options import option, parse_duration_s, parse_hang_timeout, parse_nodes, parse_nproc
from paceline.core.plugins import LauncherPlugin

# --- Which task is trained, and by which processes on which machines ---


EnvStyle = Literal["torch", "tensorflow", "horovod", "mpi", "none"]
"""Which variables tell a process its place; see :mod:`paceline.launch.rank`."""

RankLauncher = Literal["agent", "torchrun", "spawn", "srun", "mpi", "horovod", "ray"]
"""What starts the ranks, where a job's machines are there."""


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
    """The task, and where it runs."""

    task: str = option(
        "",
        "file.py:Name, package.module:Name or a recipe's name.",
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
        "Processes on this machine; auto: one per GPU, else one per core. 8,4: for machines 0 and 1.",
        group="Processes",
        resume="kept",
        bits="never",
        scope="start",
        from_launcher=True,
    )
    nodes: int | str = option(
        1,
        "Machines; run the same command on each. MIN:MAX: start with MIN; others may join and leave.",
        group="Processes",
        resume="kept",
        bits="never",
        scope="start",
        from_launcher=True,
    )
    node_rank: int | None = option(
        None,
        "This machine's number, 0 to nodes - 1.",
        group="Processes",
        resume="fresh",
        bits="never",
        scope="place",
        from_launcher=True,
    )
    rdzv_endpoint: str | None = option(
        None,
        "HOST:PORT of machine 0, where several machines meet.",
        group="Processes",
        resume="fresh",
        bits="never",
        scope="place",
        from_launcher=True,
    )
    token_file: str | None = option(
        None,
        "File with the secret that the machines of a run share. Default: in the run's directory.",
        group="Processes",
        resume="fresh",
        bits="never",
        scope="place",
    )
    rdzv_id: str = option(
        "paceline",
        "A name that all machines of one run share.",
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
        "CPU threads per process; the bits depend on it. Default: OMP_NUM_THREADS, else cores over processes.",
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
        "Where to train. auto: on GPUs, where there are any.",
        group="Processes",
        resume="kept",
        bits="rounding",
        scope="process",
        summary=True,
    )

    def __post_init__(self) -> None:
        most_nodes = parse_nodes(self.nodes)[1]
        if most_nodes > 1 and self.rdzv_endpoint is None and self.on in ("spawn", "torchrun"):
            raise ConfigError("--nodes above 1 needs --rdzv-endpoint HOST:PORT, the address of machine 0.")
        if self.node_rank is not None and not 0 <= self.node_rank < most_nodes:
            raise ConfigError(f"--node-rank must be between 0 and {most_nodes - 1}, but is {self.node_rank}.")
        parse_nproc(self.nproc)
        parse_duration_s(self.init_timeout, "init_timeout")


# --- What happens when a process dies, hangs or computes something else ---


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class RecoveryOptions(ProcessOptions):
    """How a run goes on after a fault."""

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
        "Spare processes, over all machines, that hold the state and replace lost ones.",
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
    heartbeat: float = option(
        2.0,
        "Replace a process after this many seconds without a sign of life.",
        group="Recovery",
        resume="kept",
        bits="never",
        scope="process",
        minimum=0.2,
        maximum=3600,
    )
    hang_timeout: str = option(
        "auto",
        "Time that a step may take, such as 10min; then name the rank that blocks it and treat it as dead. "
        "auto: learned, at least 30s. never: no limit.",
        group="Recovery",
        resume="kept",
        bits="never",
        scope="process",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.walltime is not None:
            parse_duration_s(self.walltime, "walltime")
        parse_hang_timeout(self.hang_timeout)
