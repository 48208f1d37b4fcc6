"""How many shards each rank computes: equally many, or in proportion to its speed. Pure functions.

A rank's shards are a range, and the ranges follow each other in the order of the ranks, so a list of
numbers says it all. Ranks at its end may have none: spares, which hold the state and compute nothing.
"""

from __future__ import annotations

import functools
import heapq
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from paceline.distributed.tree import whole_subtrees

MIN_GAIN = 0.1
"""The part by which a step must become shorter for the ranks to share anew."""

WINDOWS = 4
"""Windows in a row in which it must, each by itself."""

WINDOW_STEPS, WINDOW_S = 8, 0.5
"""A window lasts at least so many steps, and at least so many seconds."""


class Speed(NamedTuple):
    """What a rank needs for its own part of a step, without waiting for others.

    Attributes:
        shard_s: seconds a shard (data, forward, backward).
        step_s: seconds a step besides (optimizer, commit), whatever its number of shards.
    """

    shard_s: float
    step_s: float


Window = Sequence[Speed]
"""The mean speed of each computing rank over the same steps."""


def step_time(shares: Sequence[int], speeds: Sequence[Speed]) -> float:
    """Seconds until the last computing rank has done its part of a step."""
    return max(share * speed.shard_s + speed.step_s for share, speed in zip(shares, speeds, strict=True))


def best_shares(num_shards: int, speeds: Sequence[Speed]) -> tuple[int, ...]:
    """The shares with the shortest step; among those, the ones with the fewest subtrees to send.

    Every rank gets at least one shard: whoever computes nothing is not measured, and would never get
    any again. One shard after the other goes to the rank that would be done with it first, which is
    optimal where all shards cost a rank the same (Graham's list scheduling, on unit jobs).

    Args:
        num_shards: S, at least the number of ranks.
        speeds: each computing rank's.
    """
    shares = [1] * len(speeds)
    next_done = [(2 * speed.shard_s + speed.step_s, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(next_done)
    for _ in range(num_shards - len(speeds)):
        _, rank = next_done[0]
        shares[rank] += 1
        speed = speeds[rank]
        heapq.heapreplace(next_done, ((shares[rank] + 1) * speed.shard_s + speed.step_s, rank))
    longest = step_time(shares, speeds)
    most = [max(share, _most(longest, speed)) for share, speed in zip(shares, speeds, strict=True)]
    return _fewest_subtrees(num_shards, most)


def _most(within_s: float, speed: Speed) -> int:
    """The shards that a rank can do in this time, rounding errors aside."""
    return int((within_s - speed.step_s) / speed.shard_s * (1 + 1e-9)) if speed.shard_s > 0 else 0


def _fewest_subtrees(num_shards: int, most: Sequence[int]) -> tuple[int, ...]:
    """Shares from 1 to ``most`` whose ranges are the fewest subtrees, so that the fewest sums are sent."""
    # By the shards that the ranks so far have: (subtrees, shares). The first of equals stays.
    found: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    still_needed, room = len(most), sum(most)
    for limit in most:
        still_needed -= 1
        room -= limit
        extended: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (subtrees, shares) in found.items():
            for stop in range(start + 1, start + limit + 1):
                if not num_shards - room <= stop <= num_shards - still_needed:
                    continue
                count = subtrees + _subtrees(start, stop)
                if stop not in extended or count < extended[stop][0]:
                    extended[stop] = (count, (*shares, stop - start))
        found = extended
    return found[num_shards][1]


@functools.lru_cache(maxsize=4096)
def _subtrees(start: int, stop: int) -> int:
    return len(whole_subtrees(range(start, stop)))


def first_shares(equal: Sequence[int], speeds: Sequence[Speed | None]) -> tuple[int, ...]:
    """The shares of ranks that begin together.

    Args:
        equal: the computing ranks' equal shares, which stay unless others are clearly better.
        speeds: each computing rank's, as far as it was measured before; others count as the median.
    """
    known = [speed for speed in speeds if speed is not None]
    if not known:
        return tuple(equal)
    middle = _medians(known)
    return decide(equal, [[middle if speed is None else speed for speed in speeds]]) or tuple(equal)


def decide(shares: Sequence[int], windows: Sequence[Window]) -> tuple[int, ...] | None:
    """Shares that would have made the step shorter by ``MIN_GAIN`` in each window; None: stay.

    They are the best for the median speeds over the windows, so a stall in one of them decides nothing.
    """
    better = best_shares(sum(shares), typical(windows))
    if all(step_time(better, w) <= (1 - MIN_GAIN) * step_time(shares, w) for w in windows):
        return better
    return None


def typical(windows: Sequence[Window]) -> list[Speed]:
    """Each rank's median speed over the windows."""
    return [_medians(of_rank) for of_rank in zip(*windows, strict=True)]


def _medians(speeds: Sequence[Speed]) -> Speed:
    return Speed(statistics.median(s.shard_s for s in speeds), statistics.median(s.step_s for s in speeds))


class Balancer:
    """Decides when the computing ranks share anew.

    Each rank has one and shows it the same windows, so all decide alike without asking each other.

    Attributes:
        shares: the computing ranks'.
        speeds: their median speeds over the last windows; None before the first.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self.shares = tuple(shares)
        self.speeds: list[Speed] | None = None
        self._windows: deque[Window] = deque(maxlen=WINDOWS)

    def observe(self, window: Window) -> bool:
        """Take in a window; say whether ``shares`` are others from now on."""
        self._windows.append(window)
        self.speeds = typical(self._windows)
        better = decide(self.shares, self._windows) if len(self._windows) == WINDOWS else None
        if better is None:
            return False
        self.shares = better
        self._windows.clear()  # they say how fast the ranks were with other shares
        return True
