"""The options of launchers, processes and recovery."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from paceline.core.environment import EtcdEndpoints, parse_coordinator
from paceline.core.errors import ConfigError
from paceline.core.options import (
    Duration,
    NodeRange,
    OptionGroup,
    option,
    parse_duration_s,
    parse_hang_timeout,
    parse_nodes,
    parse_nproc,
    parse_walltime_s,
)
from paceline.core.plugins import LauncherPlugin, names_type

if TYPE_CHECKING:
    from paceline.core.config import RunConfig

# --- The task and its processes ---


EnvStyle = Literal["torch", "tensorflow", "horovod", "mpi", "none"]
"""The set of rank variables that a process reads; see :mod:`paceline.launch.rank`."""

RankLauncher = Literal["agent", "torchrun", "spawn", "srun", "mpi", "horovod", "ray"]
"""The program that starts the ranks on the nodes of an allocation."""


_task_option = partial(option, group="Task", resume="fresh", bits="always", scope="task")
_start_option = partial(option, group="Processes", resume="kept", bits="never", scope="start")
_node_option = partial(option, group="Processes", resume="fresh", bits="never", scope="place")
_network_option = partial(option, group="Processes", resume="kept", bits="never", scope="place")
_device_option = partial(option, group="Processes", resume="kept", bits="rounding", scope="process")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ProcessOptions(OptionGroup):
    """Options of the task and its processes."""

    task: str = _task_option("", "file.py:Name, package.module:Name or a built-in task's name.", from_launcher=True)
    set: tuple[str, ...] = _task_option((), "A hyperparameter as field=value; may be repeated.")

    on: str = option(
        "auto",
        "The launcher. auto: inprocess for one process, spawn for several.",
        given=names_type("paceline.launchers", LauncherPlugin),
        group="Processes",
        resume="kept",
        bits="never",
        scope="start",
        from_launcher=True,
    )
    nproc: tuple[int, ...] | None = _start_option(
        1,
        "Processes on this node; auto: one per GPU, else one per core; in a Slurm allocation, its tasks. 8,4: by node.",
        parse=parse_nproc,
        given=int | str,
        from_launcher=True,
    )
    nodes: NodeRange = _start_option(
        1,
        "Number of nodes; run the same command on each. MIN:MAX: start with MIN; more may join and leave.",
        parse=parse_nodes,
        given=int | str,
        from_launcher=True,
    )
    node_rank: int | None = _node_option(None, "This node's rank, 0 to nodes - 1.", from_launcher=True)
    rdzv_endpoint: str | None = _node_option(
        None, "HOST:PORT of node 0, for jobs with several nodes.", from_launcher=True
    )
    token_file: str | None = _node_option(
        None, "File with the secret that the nodes of a run share. Default: in the run directory."
    )
    rdzv_id: str = _network_option("paceline", "A job id that all nodes of a run share.", from_launcher=True)
    backend: Literal["auto", "gloo", "nccl"] = _device_option("auto", "The process group's backend.")
    interface: str | None = _network_option(None, "Network interface for gloo and NCCL, e.g. eth0.", from_launcher=True)
    init_timeout: Duration = option(
        "5min",
        "How long to wait for all processes to start.",
        parse=partial(parse_duration_s, name="init_timeout"),
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
    )
    device: Literal["auto", "cpu", "cuda"] = _device_option("auto", "Where to train. auto: on GPUs if available.")

    def check(self, config: RunConfig) -> None:
        """Reject what does not fit the number of nodes."""
        most_nodes = self.nodes.most
        if most_nodes > 1 and self.rdzv_endpoint is None and self.on in ("spawn", "torchrun"):
            raise ConfigError("--nodes above 1 needs --rdzv-endpoint HOST:PORT, the address of node 0.")
        if self.node_rank is not None and not 0 <= self.node_rank < most_nodes:
            raise ConfigError(f"--node-rank must be between 0 and {most_nodes - 1}, but is {self.node_rank}.")


# --- Recovery from processes that die, hang or compute wrong results ---


_recovery_option = partial(option, group="Recovery", resume="kept", bits="never", scope="recovery")
_heartbeat_option = partial(option, group="Recovery", resume="kept", bits="never", scope="process")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class RecoveryOptions(OptionGroup):
    """Options of fault tolerance."""

    recover: Literal["auto", "none", "inplace", "restart"] = _recovery_option(
        "auto",
        "When a process dies. inplace: replace it while the others continue; restart: restart all from the "
        "newest checkpoint; none: end the job. auto: inplace where supported (--on spawn, CPU, ddp, "
        "reduction exact or allreduce), else restart with --on spawn, else none.",
    )
    hot_spares: int = _recovery_option(
        0, "Spare processes, over all nodes, that hold the state and replace lost ones.", needs="spares", minimum=0
    )
    max_restarts: int = _recovery_option(
        8, "End the job after this many replaced processes without a step of progress.", minimum=0
    )

    coordinator: EtcdEndpoints | None = _recovery_option(
        None,
        "etcd://HOST:PORT[,HOST:PORT...] (etcds:// for TLS): this etcd cluster decides which node leads and which "
        "nodes take part. Default: the nodes agree among themselves.",
        parse=parse_coordinator,
    )

    walltime: Duration | None = _recovery_option(
        None, "Save and stop before this time has passed (s, min, h), with exit code 75.", parse=parse_walltime_s
    )

    sdc_check_every: int = _recovery_option(
        0,
        "Every N steps, compute one micro-batch's gradient on a second rank too and compare the bits; name and "
        "remove a rank that differs. 0: never.",
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
    )
    heartbeat: float = _heartbeat_option(
        2.0, "Replace a process after this many seconds without a heartbeat.", minimum=0.2, maximum=3600
    )
    hang_timeout: Duration | None = _heartbeat_option(
        "auto",
        "Step timeout, such as 10min; then report the rank that blocks the step and replace it. "
        "auto: learned, at least 30s. never: no limit.",
        parse=parse_hang_timeout,
    )
