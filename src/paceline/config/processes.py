"""Which task is trained, and by which processes on which machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.config.options import option
from paceline.config.values import parse_duration_s, parse_nodes, parse_nproc
from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ProcessOptions:
    """The task, and where it runs."""

    task: str = option("", "file.py:Name, package.module:Name or a recipe's name.", group="Task")
    set: tuple[str, ...] = option((), "A hyperparameter as field=value; may be repeated.", group="Task")

    on: Literal[
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
    ] = option("auto", "The launcher. auto: inprocess for one process, spawn for several.", group="Processes")
    nproc: int | str = option(
        1,
        "Processes on this machine; auto: one a GPU, else one a core. 8,4: for machines 0 and 1.",
        group="Processes",
    )
    nodes: int | str = option(
        1,
        "Machines; the same command is run on each. MIN:MAX: begin with MIN, others join and leave.",
        group="Processes",
    )
    node_rank: int | None = option(None, "This machine's number, 0 to nodes - 1.", group="Processes")
    rdzv_endpoint: str | None = option(
        None, "HOST:PORT of machine 0, where several machines meet.", group="Processes"
    )
    token_file: str | None = option(
        None,
        "Holds the secret by which the machines of a run know each other. Default: in the run's directory.",
        group="Processes",
    )
    rdzv_id: str = option("paceline", "A name that all machines of one run share.", group="Processes")
    backend: Literal["auto", "gloo", "nccl"] = option(
        "auto", "The process group's backend.", group="Processes"
    )
    interface: str | None = option(None, "Network interface for gloo and NCCL, e.g. eth0.", group="Processes")
    init_timeout: str = option("5min", "How long to wait for all processes to appear.", group="Processes")
    comm_debug: bool = option(False, "Verbose logs of NCCL, gloo and torch.distributed.", group="Processes")
    threads: int | None = option(
        None,
        "CPU threads a process; a pin. Default: OMP_NUM_THREADS, else cores over processes.",
        group="Processes",
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "Where the model lives.", group="Processes")

    def __post_init__(self) -> None:
        most_nodes = parse_nodes(self.nodes)[1]
        if most_nodes > 1 and self.rdzv_endpoint is None and self.on in ("spawn", "torchrun"):
            raise ConfigError("--nodes above 1 needs --rdzv-endpoint HOST:PORT, the address of machine 0.")
        if self.node_rank is not None and not 0 <= self.node_rank < most_nodes:
            raise ConfigError(f"--node-rank must be between 0 and {most_nodes - 1}, but is {self.node_rank}.")
        parse_nproc(self.nproc)
        parse_duration_s(self.init_timeout, "init_timeout")
