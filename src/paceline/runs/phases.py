"""The time of a step by phases, at the cost of one clock reading per mark."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import NamedTuple

PHASES = ("data", "forward", "backward", "reduction", "optimizer", "checkpoint", "evaluation", "other")
"""``reduction`` is only the part of the gradient reduction that does not overlap with backward."""

OUTSIDE_STEPS = ("evaluation", "other")
"""Phases outside training steps, which rates and step times exclude."""


class PhaseTime(NamedTuple):
    """One phase's row of the table.

    Attributes:
        share: of the time in all phases, from 0 to 1.
    """

    seconds: float
    share: float


class PhaseTimer:
    """Attributes time to phases by marks at their ends.

    The times are the host's: asynchronous GPU work counts in the phase in which the host waits for it,
    usually the reduction or the reading of the loss.
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
        """Return the seconds spent in training steps: all phases but :data:`OUTSIDE_STEPS`."""
        return sum(self.seconds.values()) - sum(self.seconds[phase] for phase in OUTSIDE_STEPS)

    def table(self, since: Mapping[str, float] | None = None) -> dict[str, PhaseTime]:
        """Return seconds and share of every phase, since an earlier copy of ``seconds`` or since the start."""
        spent = {phase: s - (since[phase] if since else 0.0) for phase, s in self.seconds.items()}
        total = sum(spent.values())
        return {phase: PhaseTime(s, s / total if total > 0 else 0.0) for phase, s in spent.items()}
