"""What is to be measured; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.core.errors import ConfigError
from paceline.insight.bench.communication.collectives import Op

Backend = Literal["gloo", "nccl", "mpi"]
Mode = Literal["process-per-device", "one-process", "threads-per-device"]


@dataclass(frozen=True, kw_only=True)
class CommunicationPlan:
    """What is measured.

    Attributes:
        backend: who carries the data.
        mode: how ranks are driven.
        ops: the collectives.
        sizes: bytes of each.
        nproc: ranks of this machine.
        iterations: timed repetitions.
        warmup: repetitions before.
        interface: the network interface between machines.
    """

    backend: Backend
    mode: Mode
    ops: tuple[Op, ...]
    sizes: tuple[int, ...]
    nproc: int
    iterations: int = 20
    warmup: int = 5
    interface: str | None = None

    def __post_init__(self) -> None:
        for name in ("nproc", "iterations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be at least 1, but is {getattr(self, name)}.")
        if self.warmup < 0:
            raise ConfigError(f"--warmup must be 0 or more, but is {self.warmup}.")
        if self.mode != "process-per-device" and self.backend == "mpi":
            raise ConfigError(f"--mode {self.mode} does not work with --backend mpi: an MPI rank is a process.")
        if self.mode == "one-process" and self.backend != "nccl":
            raise ConfigError(
                f"--mode one-process drives several GPUs by NCCL, which --backend {self.backend} "
                "cannot. On CPUs use --mode process-per-device or threads-per-device."
            )
