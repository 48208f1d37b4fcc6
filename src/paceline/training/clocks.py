"""Who may begin a step when, and how old the parameters are that a gradient was computed from. Pure.

Stale-synchronous parallel: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server", 2013. A worker's clock counts the steps that it has finished; it may begin another while
its clock is at most ``bound`` ahead of the slowest worker's. Between the moment a worker gets parameters and
the moment its gradient is applied, each other worker can then finish at most ``2 * bound + 1`` steps.
"""

from __future__ import annotations

from collections import Counter
from typing import Any


class Clocks:
    """The workers' clocks, from one cut of the run to the next.

    Args:
        workers: how many there are; they are numbered from 0.
        bound: how far ahead of the slowest a worker may begin a step; None: as far as it likes.
    """

    def __init__(self, workers: int, bound: int | None) -> None:
        self._done = [0] * workers
        self._bound = bound

    def may_begin(self, worker: int) -> bool:
        """Whether the worker may begin a step now. The slowest always may."""
        return self._bound is None or self._done[worker] <= min(self._done) + self._bound

    def finished(self, worker: int) -> None:
        """The worker's gradient was applied."""
        self._done[worker] += 1


def most_stale(workers: int, bound: int) -> int:
    """The most versions that a gradient's parameters can be behind, with so many workers and this bound."""
    return (workers - 1) * (2 * bound + 1)


class Staleness:
    """How many updates of others came between each gradient's parameters and its own update."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def observe(self, behind: int) -> None:
        """An update was made from parameters that were ``behind`` versions old."""
        self._counts[behind] += 1

    def report(self) -> dict[str, Any]:
        """Mean, maximum and histogram; empty where nothing was observed."""
        updates = sum(self._counts.values())
        if not updates:
            return {}
        total = sum(behind * times for behind, times in self._counts.items())
        return {
            "mean": round(total / updates, 4),
            "max": max(self._counts),
            # JSON has no numbers for keys.
            "histogram": {str(behind): self._counts[behind] for behind in sorted(self._counts)},
        }
