"""What became of each method, and of the task's arithmetic. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from paceline.verification.methods import Class
from paceline.verification.traces import Divergence

Verdict = Literal["equal", "within", "diverged", "failed", "not applicable"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method on one number of processes.

    Attributes:
        method: its name.
        world_size: processes.
        promises: its class.
        verdict: what became of it.
        detail: in words: why it is not applicable, how it failed.
        distance: from float64, of what took most of its tolerance.
        tolerance: of that.
        divergence: where it first leaves what it is compared with.
    """

    method: str
    world_size: int
    promises: Class
    verdict: Verdict
    detail: str = ""
    distance: float | None = None
    tolerance: float | None = None
    divergence: Divergence | None = None

    @property
    def ok(self) -> bool:
        """Whether the method keeps what it promises, or promises nothing for this task."""
        return self.verdict in ("equal", "within", "not applicable")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something in the task's arithmetic that is probably not meant.

    Attributes:
        lint: which look found it.
        message: what is wrong, and what to do.
        place: FILE:LINE, where it is known.
    """

    lint: str
    message: str
    place: str | None = None

    def __str__(self) -> str:
        return f"{self.place + ': ' if self.place else ''}{self.message} [{self.lint}]"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What ``paceline verify`` found.

    Attributes:
        task: its name.
        steps: of each run.
        shards: S.
        global_batch_size: in samples.
        seed: of all runs.
        factor: what a tolerance is, times the float32 run's own distance from float64.
        rows: by number of processes, then in the order of the methods.
        warnings: about the task.
        no_double: why there was no run in float64; "" where there was one.
    """

    task: str
    steps: int
    shards: int
    global_batch_size: int
    seed: int
    factor: float
    rows: Sequence[Row]
    warnings: Sequence[Finding]
    no_double: str = ""

    @property
    def ok(self) -> bool:
        """Whether every method keeps what it promises."""
        return all(row.ok for row in self.rows)

    def to_json(self) -> Mapping[str, Any]:
        """JSON types."""
        rows = [
            {**row, "distance": row["distance"] if math.isfinite(row["distance"] or 0.0) else None}
            for row in map(asdict, self.rows)
        ]
        return {**asdict(self), "rows": rows, "ok": self.ok}
