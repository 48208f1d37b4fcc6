"""The end of ``--walltime``: when to stop so that the state is saved by then."""

from __future__ import annotations

import math
import time
from collections import deque

_LEAST_S, _MOST_S, _SHARE = 5.0, 120.0, 0.02
_MARGIN = 2.0  # steps and saves vary; the step after a decision is still done, too
_RECENT = 16


class Deadline:
    """Knows how long steps and evaluations take, and what is left of the time.

    It is asked once a step, by rank 0: wall clocks differ, and the control word tells the others.

    Args:
        walltime_s: the seconds that the job may take; None for no end.
        started: when the job began, in seconds since the epoch: its launcher's clock, so that it is the
            same for all ranks, and for those that replace others.
    """

    def __init__(self, walltime_s: float | None, started: float) -> None:
        self._end = math.inf
        self._least_s = 0.0
        if walltime_s is not None:
            self._end = time.monotonic() + started + walltime_s - time.time()
            self._least_s = min(_MOST_S, max(_LEAST_S, _SHARE * walltime_s))
        self._steps_s: deque[float] = deque(maxlen=_RECENT)
        self._evaluation_s = 0.0

    @property
    def is_set(self) -> bool:
        """Whether there is one."""
        return self._end < math.inf

    def step_took(self, seconds: float) -> None:
        """Learn from a step."""
        self._steps_s.append(seconds)

    def evaluation_took(self, seconds: float) -> None:
        """Learn from an evaluation, whole or not."""
        self._evaluation_s = seconds

    def is_due(self, *, save_s: float, evaluates: bool) -> bool:
        """Whether to stop, for want of time for another step and the save after it.

        Args:
            save_s: how long a save takes.
            evaluates: an evaluation would come before the next such question.
        """
        step_s = max(self._steps_s, default=0.0)
        reserve_s = max(self._least_s, _MARGIN * (step_s + save_s))
        return time.monotonic() + reserve_s + evaluates * self._evaluation_s >= self._end
