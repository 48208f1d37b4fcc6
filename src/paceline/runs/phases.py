"""Where the time of a step goes: seconds for each phase, at the cost of one clock reading a mark."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import NamedTuple

PHASES = ("data", "forward", "backward", "reduction", "optimizer", "checkpoint", "evaluation", "other")
"""``reduction`` is only the part of the gradient reduction that backward does not hide."""

OUTSIDE_STEPS = ("evaluation", "other")
"""Phases that are no part of a training step; rates and step times leave them out."""


class PhaseTime(NamedTuple):
    """One phase's row of the table.

    Attributes:
        seconds: time spent in the phase.
        share: of the time in all phases, from 0 to 1.
    """

    seconds: float
    share: float


class PhaseTimer:
    """Attributes time to phases by marks at their ends.

    The times are the host's: on a GPU, work that was enqueued but not yet awaited counts where
    the host waits for it, usually at the reduction or where the loss is read.
    """

    __slots__ = ("_last", "seconds")

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._last = perf_counter()

    def mark(self, phase: str) -> None:
        """Add the time since the last mark to ``phase``.

        Raises:
            KeyError: there is no such phase.
        """
        now = perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now

    def training_s(self) -> float:
        """Seconds spent in training steps so far: all phases but :data:`OUTSIDE_STEPS`."""
        return sum(self.seconds.values()) - sum(self.seconds[phase] for phase in OUTSIDE_STEPS)

    def table(self, since: Mapping[str, float] | None = None) -> dict[str, PhaseTime]:
        """Seconds and share of every phase, since an earlier copy of ``seconds`` or since the start."""
        spent = {phase: s - (since[phase] if since else 0.0) for phase, s in self.seconds.items()}
        total = sum(spent.values())
        return {phase: PhaseTime(s, s / total if total > 0 else 0.0) for phase, s in spent.items()}
