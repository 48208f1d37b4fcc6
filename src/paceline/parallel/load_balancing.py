"""Load balancing: the work split by measured speed."""

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

# --- The work split: equal, or in proportion to speed. Pure functions ---
#
# A rank's micro-batches are a range, in the order of the ranks, so a list of their numbers is enough. Ranks at its end
# may have none: spares, which hold the state and compute nothing.


MIN_GAIN = 0.1
"""The minimum relative gain of step time for a new work split."""

WINDOWS = 4
"""Consecutive windows that must each show the gain."""

WINDOW_STEPS, WINDOW_S = 8, 0.5
"""The minimum length of a window, in steps and in seconds."""


class Speed(NamedTuple):
    """The time that a rank needs for its own part of a step, without waiting.

    Attributes:
        microbatch_s: seconds per micro-batch (data, forward, backward).
        step_s: further seconds per step (optimizer, commit), independent of its micro-batches.
    """

    microbatch_s: float
    step_s: float


Window = Sequence[Speed]
"""The mean speed of each active rank over the same steps."""


def step_time(shares: Sequence[int], speeds: Sequence[Speed]) -> float:
    """Return the seconds until the last active rank has done its part of a step."""
    return max(share * speed.microbatch_s + speed.step_s for share, speed in zip(shares, speeds, strict=True))


def optimal_split(num_microbatches: int, speeds: Sequence[Speed]) -> tuple[int, ...]:
    """Return the work split with the shortest step; among equals, the one with the fewest subtrees to send.

    Every rank gets at least one micro-batch, because an idle rank could not be measured again. Each further micro-batch
    goes to the rank that would finish it first, which is optimal if all micro-batches cost a rank the same (Graham's
    list scheduling, on unit jobs).

    Args:
        num_microbatches: S, at least the number of ranks.
        speeds: each active rank's.
    """
    work_split = [1] * len(speeds)
    next_done = [(2 * speed.microbatch_s + speed.step_s, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(next_done)
    for _ in range(num_microbatches - len(speeds)):
        _, rank = next_done[0]
        work_split[rank] += 1
        speed = speeds[rank]
        heapq.heapreplace(next_done, ((work_split[rank] + 1) * speed.microbatch_s + speed.step_s, rank))
    longest = step_time(work_split, speeds)
    most = [max(share, _most(longest, speed)) for share, speed in zip(work_split, speeds, strict=True)]
    return _fewest_subtrees(num_microbatches, most)


def _most(within_s: float, speed: Speed) -> int:
    """Return the number of micro-batches that a rank can do in this time, tolerating rounding errors."""
    return int((within_s - speed.step_s) / speed.microbatch_s * (1 + 1e-9)) if speed.microbatch_s > 0 else 0


def _fewest_subtrees(num_microbatches: int, most: Sequence[int]) -> tuple[int, ...]:
    """Return numbers from 1 to ``most`` whose ranges consist of the fewest subtrees, so that the fewest sums are
    sent.
    """
    # Number of micro-batches of the ranks so far -> (subtrees, work split). The first of equals stays.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    still_needed, remaining = len(most), sum(most)
    for limit in most:
        still_needed -= 1
        remaining -= limit
        extended: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start, (subtrees, work_split) in best.items():
            for stop in range(start + 1, start + limit + 1):
                if not num_microbatches - remaining <= stop <= num_microbatches - still_needed:
                    continue
                count = subtrees + _subtrees(start, stop)
                if stop not in extended or count < extended[stop][0]:
                    extended[stop] = (count, (*work_split, stop - start))
        best = extended
    return best[num_microbatches][1]


@functools.lru_cache(maxsize=4096)
def _subtrees(start: int, stop: int) -> int:
    return len(whole_subtrees(range(start, stop)))


def initial_split(equal: Sequence[int], speeds: Sequence[Speed | None]) -> tuple[int, ...]:
    """Return the initial work split of a world.

    Args:
        equal: the active ranks' equal split, kept unless another one is clearly better.
        speeds: each active rank's earlier measurement; ranks without one count as the median.
    """
    known = [speed for speed in speeds if speed is not None]
    if not known:
        return tuple(equal)
    median = _medians(known)
    return decide(equal, [[median if speed is None else speed for speed in speeds]]) or tuple(equal)


def decide(shares: Sequence[int], windows: Sequence[Window]) -> tuple[int, ...] | None:
    """Return a work split that would have gained ``MIN_GAIN`` in each window, or None.

    It is the best for the median speeds over the windows, so a stall in one of them has no effect.
    """
    better = optimal_split(sum(shares), median_speed(windows))
    if all(step_time(better, w) <= (1 - MIN_GAIN) * step_time(shares, w) for w in windows):
        return better
    return None


def median_speed(windows: Sequence[Window]) -> list[Speed]:
    """Return each rank's median speed over the windows."""
    return [_medians(of_rank) for of_rank in zip(*windows, strict=True)]


def _medians(speeds: Sequence[Speed]) -> Speed:
    return Speed(statistics.median(s.microbatch_s for s in speeds), statistics.median(s.step_s for s in speeds))


class WorkSplitter:
    """Decides when to change the work split.

    Every rank observes the same windows, so all decide alike without communication.

    Attributes:
        work_split: the active ranks' numbers of micro-batches.
        speeds: their median speeds over the last windows; None before the first.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self.work_split = tuple(shares)
        self.speeds: list[Speed] | None = None
        self._windows: deque[Window] = deque(maxlen=WINDOWS)

    def observe(self, window: Window) -> bool:
        """Observe a window; return whether ``work_split`` has changed."""
        self._windows.append(window)
        self.speeds = median_speed(self._windows)
        better = decide(self.work_split, self._windows) if len(self._windows) == WINDOWS else None
        if better is None:
            return False
        self.work_split = better
        self._windows.clear()  # they were measured with another split
        return True


# --- Measurement and re-balancing ---


SPEED_WIDTH = len(Speed._fields)
"""Number of values in a rank's row; all are 0 without a measurement."""

_MICROBATCH_PHASES = ("data", "forward", "backward")
_STEP_PHASES = ("optimizer", "other")


class SpeedMeter:
    """Measures this rank's speed over a window, from the trainer's phase timer.

    It uses the mean: if a CPU quota stalls one step in five, the median would not show it. On a GPU, forward and
    backward are timed by two events in its stream.
    """

    def __init__(self, timer: PhaseTimer, device: torch.device) -> None:
        self._timer = timer
        self._events = (_event(), _event()) if device.type == "cuda" else None
        self._recorded = False
        self.restart()

    def restart(self) -> None:
        """Begin a new window."""
        self._seconds_before = dict(self._timer.seconds)
        self._training_before = self._timer.training_s()
        self._gpu_s = 0.0
        self._steps = self._microbatches = 0

    def begin(self) -> None:
        """Mark the start of a step's first forward."""
        if self._events is not None:
            if self._recorded:  # the previous step has been awaited
                self._gpu_s += self._events[0].elapsed_time(self._events[1]) / 1000
            self._events[0].record()

    def end(self, microbatches: int) -> None:
        """Mark the end, or the enqueuing, of the backward of the step's last micro-batch."""
        if self._events is not None:
            self._events[1].record()
            self._recorded = True
        self._steps += 1
        self._microbatches += microbatches

    def speed(self) -> Speed | None:
        """Return the speed over the window; None if it is too short or has no micro-batch."""
        training_s = self._timer.training_s() - self._training_before
        if self._steps < WINDOW_STEPS or training_s < WINDOW_S or not self._microbatches:
            return None
        microbatch_s = self._elapsed(("data",)) + self._gpu_s if self._events else self._elapsed(_MICROBATCH_PHASES)
        return Speed(microbatch_s / self._microbatches, self._elapsed(_STEP_PHASES) / self._steps)

    def _elapsed(self, phases: Sequence[str]) -> float:
        return sum(self._timer.seconds[phase] - self._seconds_before[phase] for phase in phases)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class LoadBalancer:
    """The work split of one world; every rank has one and calls it alike.

    Args:
        num_microbatches: S.
        by_speed: whether to balance by speed; else split equally.
        speed: this rank's, from an earlier world.
        directory: rank 0 records unequal splits there.
        servers: number of first ranks without micro-batches.

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
        active = world.num_active - servers
        self._rank = world.rank
        self._servers = (0,) * servers
        self._spares = (0,) * (world.world_size - active - servers)
        self._earlier = speed
        self._directory = directory
        self._speed_meter: SpeedMeter | None = None
        self._equal = work_split = equal_work_split(num_microbatches, active)
        # With one micro-batch per rank there is nothing to balance.
        self._by_speed = by_speed and 1 < active < num_microbatches
        if self._by_speed:
            gathered = world.all_gather_object(speed)[:active]
            work_split = initial_split(
                work_split, [None if earlier_speed is None else Speed(*earlier_speed) for earlier_speed in gathered]
            )
        self._balancer = WorkSplitter(work_split)

    @property
    def work_split(self) -> tuple[int, ...]:
        """Each rank's number of micro-batches; 0 for servers and spares."""
        return self._servers + self._balancer.work_split + self._spares

    @property
    def speed(self) -> Speed | None:
        """This rank's speed, if known, for the next world."""
        speeds = self._balancer.speeds
        return speeds[self._rank] if speeds and self._rank < len(speeds) else self._earlier

    @property
    def measures_speed(self) -> bool:
        """Whether ranks share by speed, and so measure theirs."""
        return self._speed_meter is not None

    def watch(self, timer: PhaseTimer, device: torch.device, step: int) -> None:
        """Start measuring, before the first step after ``step``."""
        if self._by_speed:
            self._speed_meter = SpeedMeter(timer, device)
        if self._balancer.work_split != self._equal:
            self._record(step, self._equal)

    def begin(self) -> None:
        """See :meth:`SpeedMeter.begin`."""
        if self._speed_meter is not None:
            self._speed_meter.begin()

    def end(self, microbatches: int) -> None:
        """See :meth:`SpeedMeter.end`."""
        if self._speed_meter is not None:
            self._speed_meter.end(microbatches)

    def row(self, step: int) -> Speed | None:
        """Return this rank's contribution to the reduction of ``step``."""
        if self._speed_meter is None or step % WINDOW_STEPS:
            return None
        return self._speed_meter.speed()

    def observe(self, rows: Sequence[Sequence[float]], step: int) -> bool:
        """Observe all ranks' rows of ``step``; return whether ``work_split`` has changed."""
        if self._speed_meter is None:
            return False
        previous_split = self._balancer.work_split
        window = [Speed(*row) for row in rows[: len(previous_split)]]
        # A window ends for all ranks at the same step, when the last of them has measured long enough.
        if not all(speed.microbatch_s > 0 for speed in window):
            return False
        self._speed_meter.restart()
        if not self._balancer.observe(window):
            return False
        self._record(step, previous_split)
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
