"""Micro-batches for each rank by the speed that was measured."""

from __future__ import annotations

import functools
import heapq
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.parallel.reduction_tree import equal_work_split, whole_subtrees
from paceline.parallel.world import World
from paceline.runs.directory import RunDirectory
from paceline.runs.phases import PhaseTimer

# --- How many micro-batches each rank computes: equally many, or in proportion to its speed. Pure functions ---
#
# A rank's micro-batches are a range, and the ranges follow each other in the order of the ranks, so a list of
# numbers says it all. Ranks at its end may have none: spares, which hold the state and compute nothing.


MIN_GAIN = 0.1
"""The part by which a step must become shorter for the ranks to share anew."""

WINDOWS = 4
"""Windows in a row in which it must, each by itself."""

WINDOW_STEPS, WINDOW_S = 8, 0.5
"""A window lasts at least so many steps, and at least so many seconds."""


class Speed(NamedTuple):
    """What a rank needs for its own part of a step, without waiting for others.

    Attributes:
        microbatch_s: seconds a micro-batch (data, forward, backward).
        step_s: seconds a step besides (optimizer, commit), whatever its number of micro-batches.
    """

    microbatch_s: float
    step_s: float


Window = Sequence[Speed]
"""The mean speed of each computing rank over the same steps."""


def step_time(shares: Sequence[int], speeds: Sequence[Speed]) -> float:
    """Seconds until the last computing rank has done its part of a step."""
    return max(share * speed.microbatch_s + speed.step_s for share, speed in zip(shares, speeds, strict=True))


def optimal_split(num_microbatches: int, speeds: Sequence[Speed]) -> tuple[int, ...]:
    """The shares with the shortest step; among those, the ones with the fewest subtrees to send.

    Every rank gets at least one micro-batch: whoever computes nothing is not measured, and would never get
    any again. One micro-batch after the other goes to the rank that would be done with it first, which is
    optimal where all micro-batches cost a rank the same (Graham's list scheduling, on unit jobs).

    Args:
        num_microbatches: S, at least the number of ranks.
        speeds: each computing rank's.
    """
    shares = [1] * len(speeds)
    next_done = [(2 * speed.microbatch_s + speed.step_s, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(next_done)
    for _ in range(num_microbatches - len(speeds)):
        _, rank = next_done[0]
        shares[rank] += 1
        speed = speeds[rank]
        heapq.heapreplace(next_done, ((shares[rank] + 1) * speed.microbatch_s + speed.step_s, rank))
    longest = step_time(shares, speeds)
    most = [max(share, _most(longest, speed)) for share, speed in zip(shares, speeds, strict=True)]
    return _fewest_subtrees(num_microbatches, most)


def _most(within_s: float, speed: Speed) -> int:
    """The micro-batches that a rank can do in this time, rounding errors aside."""
    return int((within_s - speed.step_s) / speed.microbatch_s * (1 + 1e-9)) if speed.microbatch_s > 0 else 0


def _fewest_subtrees(num_microbatches: int, most: Sequence[int]) -> tuple[int, ...]:
    """Shares from 1 to ``most`` whose ranges are the fewest subtrees, so that the fewest sums are sent."""
    # By the micro-batches that the ranks so far have: (subtrees, shares). The first of equals stays.
    found: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    still_needed, room = len(most), sum(most)
    for limit in most:
        still_needed -= 1
        room -= limit
        extended: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (subtrees, shares) in found.items():
            for stop in range(start + 1, start + limit + 1):
                if not num_microbatches - room <= stop <= num_microbatches - still_needed:
                    continue
                count = subtrees + _subtrees(start, stop)
                if stop not in extended or count < extended[stop][0]:
                    extended[stop] = (count, (*shares, stop - start))
        found = extended
    return found[num_microbatches][1]


@functools.lru_cache(maxsize=4096)
def _subtrees(start: int, stop: int) -> int:
    return len(whole_subtrees(range(start, stop)))


def initial_split(equal: Sequence[int], speeds: Sequence[Speed | None]) -> tuple[int, ...]:
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
    better = optimal_split(sum(shares), median_speed(windows))
    if all(step_time(better, w) <= (1 - MIN_GAIN) * step_time(shares, w) for w in windows):
        return better
    return None


def median_speed(windows: Sequence[Window]) -> list[Speed]:
    """Each rank's median speed over the windows."""
    return [_medians(of_rank) for of_rank in zip(*windows, strict=True)]


def _medians(speeds: Sequence[Speed]) -> Speed:
    return Speed(statistics.median(s.microbatch_s for s in speeds), statistics.median(s.step_s for s in speeds))


class WorkSplitter:
    """Decides when the computing ranks share anew.

    Each rank has one and shows it the same windows, so all decide alike without asking each other.

    Attributes:
        shares: the computing ranks'.
        speeds: their median speeds over the last windows; None before the first.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self.work_split = tuple(shares)
        self.speeds: list[Speed] | None = None
        self._windows: deque[Window] = deque(maxlen=WINDOWS)

    def observe(self, window: Window) -> bool:
        """Take in a window; say whether ``shares`` are others from now on."""
        self._windows.append(window)
        self.speeds = median_speed(self._windows)
        better = decide(self.work_split, self._windows) if len(self._windows) == WINDOWS else None
        if better is None:
            return False
        self.work_split = better
        self._windows.clear()  # they say how fast the ranks were with other shares
        return True


# --- Shares by measured speed: what each rank measures of itself, and when all of them share anew ---


SPEED_WIDTH = len(Speed._fields)
"""Numbers in a rank's row; all are 0 where it has no measure to give."""

_MICROBATCH_PHASES = ("data", "forward", "backward")
_STEP_PHASES = ("optimizer", "other")


class SpeedMeter:
    """Measures this rank's speed over a window, from the marks that the trainer makes anyway.

    Within a window it takes the mean: where a CPU quota stalls one step in five, a median would see none
    of it. On a GPU forward and backward are timed there, between two events in its stream.

    Args:
        timer: the trainer's.
        device: the rank's.
    """

    def __init__(self, timer: PhaseTimer, device: torch.device) -> None:
        self._timer = timer
        self._events = (_event(), _event()) if device.type == "cuda" else None
        self._recorded = False
        self.restart()

    def restart(self) -> None:
        """Begin a new window."""
        self._from = dict(self._timer.seconds)
        self._training_from = self._timer.training_s()
        self._gpu_s = 0.0
        self._steps = self._microbatches = 0

    def begin(self) -> None:
        """A step's data is there, and its first forward is next."""
        if self._events is not None:
            if self._recorded:  # the step before has been waited for
                self._gpu_s += self._events[0].elapsed_time(self._events[1]) / 1000
            self._events[0].record()

    def end(self, microbatches: int) -> None:
        """The backward of the step's last micro-batch has been run, or enqueued."""
        if self._events is not None:
            self._events[1].record()
            self._recorded = True
        self._steps += 1
        self._microbatches += microbatches

    def speed(self) -> Speed | None:
        """The speed over the window; None where it is too short yet, or held no micro-batch."""
        training_s = self._timer.training_s() - self._training_from
        if self._steps < WINDOW_STEPS or training_s < WINDOW_S or not self._microbatches:
            return None
        microbatch_s = self._spent(("data",)) + self._gpu_s if self._events else self._spent(_MICROBATCH_PHASES)
        return Speed(microbatch_s / self._microbatches, self._spent(_STEP_PHASES) / self._steps)

    def _spent(self, phases: Sequence[str]) -> float:
        return sum(self._timer.seconds[phase] - self._from[phase] for phase in phases)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class LoadBalancer:
    """How the ranks of one world share the micro-batches; every rank has one and calls it alike.

    Args:
        world: the ranks.
        num_microbatches: S.
        by_speed: whether they share by speed; else equally.
        speed: this rank's, from an earlier world.
        directory: where rank 0 records shares that are not equal.
        servers: how many ranks, the first ones, have no micro-batches at all.

    Raises:
        PeerLostError: a rank is gone.
    """

    def __init__(
        self,
        world: World,
        num_microbatches: int,
        *,
        by_speed: bool,
        speed: Speed | None,
        directory: RunDirectory,
        servers: int = 0,
    ) -> None:
        assert not (servers and by_speed)
        computing = world.num_active - servers
        self._rank = world.rank
        self._servers = (0,) * servers
        self._spares = (0,) * (world.world_size - computing - servers)
        self._earlier = speed
        self._directory = directory
        self._speed_meter: SpeedMeter | None = None
        self._equal = shares = equal_work_split(num_microbatches, computing)
        # With a micro-batch for each rank there is nothing to give away.
        self._by_speed = by_speed and 1 < computing < num_microbatches
        if self._by_speed:
            gathered = world.all_gather_object(speed)[:computing]
            shares = initial_split(shares, [None if told is None else Speed(*told) for told in gathered])
        self._balancer = WorkSplitter(shares)

    @property
    def work_split(self) -> tuple[int, ...]:
        """Each rank's micro-batches; none are the servers' and the spares'."""
        return self._servers + self._balancer.work_split + self._spares

    @property
    def speed(self) -> Speed | None:
        """This rank's speed, as far as it is known, for the next world."""
        speeds = self._balancer.speeds
        return speeds[self._rank] if speeds and self._rank < len(speeds) else self._earlier

    @property
    def measures_speed(self) -> bool:
        """Whether ranks share by speed, and so measure theirs."""
        return self._speed_meter is not None

    def watch(self, timer: PhaseTimer, device: torch.device, step: int) -> None:
        """Measure from now on, before the first step but ``step``."""
        if self._by_speed:
            self._speed_meter = SpeedMeter(timer, device)
        if self._balancer.work_split != self._equal:
            self._record(step, self._equal)

    def begin(self) -> None:
        """See :meth:`Stopwatch.begin`."""
        if self._speed_meter is not None:
            self._speed_meter.begin()

    def end(self, microbatches: int) -> None:
        """See :meth:`Stopwatch.end`."""
        if self._speed_meter is not None:
            self._speed_meter.end(microbatches)

    def row(self, step: int) -> Speed | None:
        """What this rank tells the others in the reduction of ``step``."""
        if self._speed_meter is None or step % WINDOW_STEPS:
            return None
        return self._speed_meter.speed()

    def observe(self, rows: Sequence[Sequence[float]], step: int) -> bool:
        """Take in what all ranks told of ``step``; say whether ``shares`` are others from now on."""
        if self._speed_meter is None:
            return False
        before = self._balancer.work_split
        window = [Speed(*row) for row in rows[: len(before)]]
        # A window ends for all ranks at the same step: when the last of them has measured long enough.
        if not all(speed.microbatch_s > 0 for speed in window):
            return False
        self._speed_meter.restart()
        if not self._balancer.observe(window):
            return False
        self._record(step, before)
        return True

    def _record(self, step: int, before: Sequence[int]) -> None:
        if self._rank == 0:
            self._directory.append_event(
                "shares",
                step=step,
                shares=list(self.work_split),
                before=[*before, *self._spares],
                ms_per_microbatch=[round(speed.microbatch_s * 1e3, 3) for speed in self._balancer.speeds or ()],
            )
