"""What happens when a process dies, hangs or computes something else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.config.options import at_least, option
from paceline.config.processes import ProcessOptions
from paceline.config.values import parse_duration_s, parse_hang_timeout
from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class RecoveryOptions(ProcessOptions):
    """How a run goes on after a fault."""

    recover: Literal["auto", "none", "inplace", "restart"] = option(
        "auto",
        "When a process dies. inplace: the others go on and it is replaced; restart: all start again from "
        "the newest checkpoint; none: the job ends, and is resumed by hand. auto: inplace where that works "
        "(--on spawn, CPU, ddp, reduction exact or fast), else restart with --on spawn, else none.",
        group="Recovery",
    )
    spares: int = option(
        0,
        "Processes more, over all machines, that hold the state and compute only once others are lost.",
        group="Recovery",
    )
    max_restarts: int = option(
        8, "Replaced processes without a step of progress, after which the job ends.", group="Recovery"
    )

    walltime: str | None = option(
        None, "Stop in time, saved, before so long has passed (s, min, h); exit code 75.", group="Recovery"
    )

    verify_every: int = option(
        0,
        "Every so many steps, compute one shard's gradient on a second rank too and compare the bits; a "
        "rank that differs is named and leaves. 0: never.",
        group="Recovery",
    )
    heartbeat: float = option(
        2.0, "Seconds of silence after which a process is taken for hung, and replaced.", group="Recovery"
    )
    hang_timeout: str = option(
        "auto",
        "How long a step may take before whoever holds it up is named, and treated as dead: such as 10min; "
        "auto: learned, at least 30s; never.",
        group="Recovery",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("spares", "max_restarts", "verify_every"):
            at_least(name, getattr(self, name), 0)
        if not 0.2 <= self.heartbeat <= 3600:
            raise ConfigError(f"--heartbeat must be from 0.2 to 3600 seconds, but is {self.heartbeat:g}.")
        if self.walltime is not None:
            parse_duration_s(self.walltime, "walltime")
        parse_hang_timeout(self.hang_timeout)
