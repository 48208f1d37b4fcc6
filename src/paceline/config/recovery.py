"""What happens when a process dies, hangs or computes something else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.config.options import option
from paceline.config.processes import ProcessOptions
from paceline.config.values import parse_duration_s, parse_hang_timeout


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class RecoveryOptions(ProcessOptions):
    """How a run goes on after a fault."""

    recover: Literal["auto", "none", "inplace", "restart"] = option(
        "auto",
        "When a process dies. inplace: replace it while the others continue; restart: restart all from the "
        "newest checkpoint; none: end the job. auto: inplace where supported (--on spawn, CPU, ddp, "
        "reduction exact or fast), else restart with --on spawn, else none.",
        group="Recovery",
        resume="kept",
        bits="never",
        scope="recovery",
        summary=True,
    )
    spares: int = option(
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

    verify_every: int = option(
        0,
        "Every N steps, compute one shard's gradient on a second rank too and compare the bits; name and "
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
