"""What a run under faults came to, held against the undisturbed run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from paceline.chaos.plan import Kind
from paceline.data.audit import AuditReport
from paceline.monitoring.timeline import Timeline


@dataclass(frozen=True)
class KindReport:
    """The faults of one kind.

    Attributes:
        planned, injected, recovered: how many; one that finds no place before the run's end is not injected.
        p50_s, p99_s: of the time from the fault to the recovery.
    """

    kind: Kind
    planned: int
    injected: int
    recovered: int
    p50_s: float | None
    p99_s: float | None


@dataclass(frozen=True)
class Capacity:
    """What the run under faults made of the workers that it had.

    Attributes:
        needed_s: the undisturbed run's training time.
        available_s: the disturbed run's, each second weighed by the share of the undisturbed run's processors
            that the workers which survived could keep busy.
        faults: how many there were.
    """

    needed_s: float
    available_s: float
    faults: int

    @property
    def goodput(self) -> float | None:
        """``needed_s`` over ``available_s``; near 1 where faults cost no more than the workers they took."""
        return self.needed_s / self.available_s if self.available_s > 0 else None

    @property
    def lost_s_per_fault(self) -> float | None:
        """Time lost beyond the lost capacity."""
        return (self.available_s - self.needed_s) / self.faults if self.faults else None


@dataclass(frozen=True, kw_only=True)
class ChaosReport:
    """The outcome; :attr:`problems` is empty where nothing was lost.

    Attributes:
        clean_run, chaos_run: their directories.
        seed: of the faults and of the run.
        exit_code: of the disturbed run.
        steps: of the undisturbed run.
        repeated_steps: computed again, because all that held them were lost.
        samples_lost, samples_duplicated: by the ledger's audit.
        audit: its verdict; "" where there was none.
        clean_sha256, chaos_sha256: of the final models; None where the run did not finish.
    """

    task: str
    clean_run: str
    chaos_run: str
    nproc: int
    seed: int
    exit_code: int
    steps: int
    kinds: tuple[KindReport, ...]
    repeated_steps: int
    samples_lost: int
    samples_duplicated: int
    audit_clean: bool
    audit: str
    capacity: Capacity | None
    clean_sha256: str
    chaos_sha256: str | None

    @property
    def same_model(self) -> bool:
        """Whether the final models are equal, bit for bit."""
        return self.chaos_sha256 == self.clean_sha256

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong, a phrase each."""
        planned, injected, recovered = (
            sum(getattr(kind, name) for kind in self.kinds) for name in ("planned", "injected", "recovered")
        )
        phrases = []
        if self.exit_code:
            phrases.append(f"the run under faults ended with exit code {self.exit_code}")
        if recovered < injected:
            phrases.append(f"{injected - recovered} of {injected} faults were not recovered from")
        if injected < planned:
            phrases.append(
                f"{planned - injected} of {planned} faults found no place before the end: "
                "ask for fewer, or for more steps (--max-steps)"
            )
        if not self.audit_clean:
            phrases.append(f"the audit: {self.audit or 'there is no ledger'}")
        if self.chaos_sha256 is not None and not self.same_model:
            phrases.append("the final model is not the undisturbed run's")
        return tuple(phrases)

    @property
    def ok(self) -> bool:
        """Whether every fault came and was recovered from, the audit is clean and the models are equal."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """The report as JSON types."""
        document = asdict(self)
        if self.capacity is not None:
            document["capacity"] |= {
                "goodput": self.capacity.goodput,
                "lost_s_per_fault": self.capacity.lost_s_per_fault,
            }
        return {"ok": self.ok, "problems": list(self.problems), "same_model": self.same_model, **document}


def kind_reports(
    planned: Sequence[Kind], injected: Sequence[tuple[Kind, float | None]]
) -> tuple[KindReport, ...]:
    """One row a kind.

    Args:
        planned: the kind of each planned fault.
        injected: the kind of each that came, and how long it took to recover; None where it did not.
    """
    rows = []
    for kind in dict.fromkeys(planned):
        times = [seconds for injected_kind, seconds in injected if injected_kind == kind]
        recovered = sorted(seconds for seconds in times if seconds is not None)
        rows.append(
            KindReport(
                kind=kind,
                planned=planned.count(kind),
                injected=len(times),
                recovered=len(recovered),
                p50_s=percentile(recovered, 50),
                p99_s=percentile(recovered, 99),
            )
        )
    return tuple(rows)


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """By nearest rank, of values in order; None of none."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def capacity(clean: Timeline, chaos: Timeline, *, nproc: int, processors: float, faults: int) -> Capacity:
    """Hold the disturbed run's time against the undisturbed one's.

    W workers keep ``min(W, processors)`` processors busy. From the moment a fault hits, only those count
    that the next view is made of. Time in which the run waited for all its workers, because the conductor
    asked for it, is nobody's.

    Args:
        clean: the undisturbed run's history.
        chaos: the disturbed one's.
        nproc: workers of the undisturbed run.
        processors: that the workers share, in units of one worker's threads.
        faults: how many were injected.
    """
    end = max((entry.seconds for entry in chaos.entries), default=0.0)
    begins = {i.end: i.begin for i in chaos.interruptions}
    # A view counts from when the one before was lost.
    worlds = [(begins.get(world.seconds, world.seconds), world.world_size) for world in chaos.worlds]
    available = sum(
        (following[0] - begin) * min(size, processors)
        for (begin, size), following in pairwise([*worlds, (end, 0)])
    )
    sizes = {world.seconds: world.world_size for world in chaos.worlds}
    available -= sum(
        i.seconds * min(sizes.get(i.end, nproc), processors)
        for i in chaos.interruptions
        if i.cause == "gathering"
    )
    return Capacity(clean.goodput.at_work_s, available / min(nproc, processors), faults)


def lost_and_duplicated(report: AuditReport) -> tuple[int, int]:
    """Samples that no step saw, and those that more than one did."""
    return sum(epoch.never for epoch in report.epochs), sum(epoch.repeated for epoch in report.epochs)
