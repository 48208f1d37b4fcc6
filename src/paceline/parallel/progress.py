"""What a rank is doing, and for how long it may: written by its main thread, read by any other. No torch.

A *stage* is what the others wait for as a whole (a step, an evaluation, ...); it has a limit, which is
learned from how long such stages took. A *phase* is a part of it. An *exchange* is whatever all ranks of a
world take part in together; they are numbered, so that two ranks can be compared.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Literal

Stage = Literal["waiting", "joining", "first step", "step", "evaluation", "checkpoint"]

FLOOR_S: dict[Stage, float] = {
    "waiting": math.inf,  # for a world: there is nobody yet who waits for this rank
    "joining": 600.0,
    "first step": 300.0,  # it may compile, and fill caches
    "step": 30.0,
    "evaluation": 300.0,
    "checkpoint": 1800.0,  # the one at the end is awaited, whatever the disk
}
"""Seconds that a stage may take at least, whatever was learned."""

_TIMES_THE_MEDIAN = 10
_RECENT = 25


class ProgressTracker:
    """One rank's.

    Attributes:
        stage: what it is at.
        since: when the stage began, by the monotonic clock.
        moved_at: when it last went on to something else, be it within the stage.
        phase: what it is at within the stage.
        step: optimizer steps done; -1 before it is known.
        exchange: the kind of exchange that it entered last.
        entered: exchanges entered in this world.
        left: exchanges left in this world; it is in one where this is less than ``entered``.
        thread: the one that made this, whose activity it is.
        helpers: gives the process ids of those that work for this rank.

    Args:
        limit_s: what a step may take; None: as learned, ``math.inf``: for ever, as may all stages.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self._limit_s = limit_s
        self.thread = threading.get_ident()
        self._took_s: dict[Stage, deque[float]] = {stage: deque(maxlen=_RECENT) for stage in FLOOR_S}
        self.helpers: Callable[[], Sequence[int]] = tuple
        self.step = -1
        self.join()

    def limit_steps_to(self, limit_s: float | None) -> None:
        """Set what a step may take, as ``limit_s`` says above."""
        self._limit_s = limit_s

    def wait(self) -> None:
        """There is no world: nobody waits for this rank."""
        self.begin("waiting")

    def join(self) -> None:
        """A world begins, and the numbers of its exchanges."""
        self.exchange, self.collective_seq, self.left = "", 0, 0
        self.begin("joining")

    def begin(self, stage: Stage) -> None:
        """Begin a stage."""
        self.stage: Stage = stage
        self.phase: str = stage
        self.since = self.moved_at = monotonic()

    def end(self) -> None:
        """End the stage, learn how long such take, and begin a step."""
        self._took_s[self.stage].append(monotonic() - self.since)
        self.begin("step")

    def move(self, phase: str) -> None:
        """Go on to a phase."""
        self.phase = phase
        self.moved_at = monotonic()

    def begin_collective(self, exchange: str) -> None:
        """Begin to wait for the other ranks, in an exchange of this kind."""
        self.exchange = exchange
        self.collective_seq += 1
        self.moved_at = monotonic()

    def end_collective(self) -> None:
        """The exchange is over."""
        self.left = self.collective_seq

    def suspend_collective(self) -> None:
        """Go out of an exchange that goes on, to work for it; :meth:`enter` then enters the same one again.

        So a rank for whose work the others wait counts one exchange less than they.
        """
        self.collective_seq -= 1
        self.moved_at = monotonic()

    @property
    def limit_s(self) -> float:
        """How long the stage may take."""
        took_s = self._took_s[self.stage]
        floor_s = FLOOR_S[self.stage]
        if self._limit_s is not None:
            if self.stage == "step":
                return self._limit_s
            floor_s = max(floor_s, self._limit_s)
        # A copy: the main thread may add to it meanwhile.
        return max(floor_s, _TIMES_THE_MEDIAN * statistics.median(tuple(took_s) or (0.0,)))

    @property
    def overdue(self) -> bool:
        """Whether the stage takes longer than it may."""
        return monotonic() - self.since > self.limit_s
