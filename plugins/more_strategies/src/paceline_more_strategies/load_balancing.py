"""Load balancing: the work split by measured speed."""

from __future__ import annotations

import functools
import heapq
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.data.samples import MicroBatch
from paceline.parallel.reducer import StepSums
from paceline.parallel.reduction_tree import whole_subtrees
from paceline.parallel.strategy import Strategy
from paceline.runs.monitor import PhaseTimer
from paceline.training.control import ControlFlags, values_of
from paceline.training.hooks import RunHook, StepHook

if TYPE_CHECKING:
    from paceline.training.group_context import GroupContext
    from paceline.training.run_context import RunContext
    from paceline.training.state_manager import StateManager

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
    most = [  # micro-batches that a rank can do in this time, whatever is rounded
        max(share, int((longest - speed.step_s) / speed.microbatch_s * (1 + 1e-9)) if speed.microbatch_s > 0 else 0)
        for share, speed in zip(work_split, speeds, strict=True)
    ]
    return _fewest_subtrees(num_microbatches, most)


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


_MICROBATCH_PHASES = ("data", "forward", "backward")
_STEP_PHASES = ("optimizer", "other")


class SpeedMeter:
    """Measures this rank's speed over a window, from the trainer's phase timer.

    It uses the mean: if a CPU quota stalls one step in five, the median would not show it. On a GPU, forward and
    backward are timed by two events in its stream.
    """

    def __init__(self, timer: PhaseTimer, device: torch.device) -> None:
        self._timer = timer
        self._events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._recorded = False
        self.restart()

    def restart(self) -> None:
        self._seconds_before = dict(self._timer.seconds)
        self._training_before = self._timer.training_s()
        self._gpu_s = 0.0
        self._steps = 0
        self._microbatches = 0

    def begin(self) -> None:
        """Mark the start of a step's first forward."""
        if self._events:
            if self._recorded:  # the previous step has been awaited
                self._gpu_s += self._events[0].elapsed_time(self._events[1]) / 1000
            self._events[0].record()

    def end(self, microbatches: int) -> None:
        """Mark the end, or the enqueuing, of the backward of the step's last micro-batch."""
        if self._events:
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


class LoadBalancing(RunHook):
    """Lets slower ranks compute fewer micro-batches, where ranks may have any number of them.

    Attributes:
        speed: this rank's last measurement, from which its next group begins.
    """

    def __init__(self, run: RunContext) -> None:
        super().__init__(run)
        self.speed: Speed | None = None

    def step_hook(self, group: GroupContext, states: StateManager) -> StepHook | None:
        """Split the work by speed, unless the reduction, the strategy or a single rank forbid it."""
        config = self.run.config
        if config.reducer not in ("exact", "allreduce") or config.non_elastic_options:
            return None
        # With one micro-batch per rank there is nothing to balance.
        return LoadBalancer(self, group, states) if 1 < group.world.num_active < self.run.num_microbatches else None


class LoadBalancer(StepHook):
    """Divides the micro-batches of one group by speed; every rank has one and calls it alike.

    Rank 0 records unequal splits in the run directory.
    """

    def __init__(self, balancing: LoadBalancing, group: GroupContext, states: StateManager) -> None:
        self._balancing = balancing
        self._group = group
        self._progress = states.state.progress
        self._window: Window = ()
        world, equal = group.world, group.work_split
        gathered = world.all_gather_object(balancing.speed)[: world.num_active]
        earlier = [None if speed is None else Speed(*speed) for speed in gathered]
        self._splitter = WorkSplitter(initial_split(equal[: world.num_active], earlier))
        self._spares = equal[world.num_active :]
        self._meter = SpeedMeter(group.monitor.timer, balancing.run.device)
        if self._split != equal:
            self._record(equal)
            group.split_work(self._split)

    @property
    def _split(self) -> tuple[int, ...]:
        return self._splitter.work_split + self._spares

    def before_microbatches(self, strategy: Strategy, microbatches: Sequence[MicroBatch]) -> None:
        self._meter.begin()

    def after_microbatches(self, strategy: Strategy, microbatches: Sequence[MicroBatch]) -> None:
        self._meter.end(len(microbatches))

    def report(self, flags: ControlFlags) -> ControlFlags:
        """Report this rank's speed, if it has measured long enough."""
        speed = None if self._progress.step % WINDOW_STEPS else self._meter.speed()
        return flags if speed is None else replace(flags, **speed._asdict())

    def after_reduce(self, sums: StepSums) -> StepSums:
        """Note the speeds of all ranks; a window ends for all at the same step, when the last has measured enough."""
        columns = (values_of(sums.rows, name)[: len(self._splitter.work_split)] for name in Speed._fields)
        window = [Speed(*values) for values in zip(*columns, strict=True)]
        if window and all(speed.microbatch_s > 0 for speed in window):
            self._window = window
        return sums

    def on_step_end(self, step: int) -> None:
        """Split the work in another way, if the ranks' speeds differ clearly."""
        window, self._window = self._window, ()
        if not window:
            return
        before = self._split
        self._meter.restart()
        changed = self._splitter.observe(window)
        if self._splitter.speeds and self._group.world.rank < len(window):
            self._balancing.speed = self._splitter.speeds[self._group.world.rank]
        if changed:
            self._record(before)
            self._group.split_work(self._split)

    def _record(self, before: Sequence[int]) -> None:
        if self._group.world.rank == 0:
            self._balancing.run.directory.append_event(
                "shares",
                step=self._progress.step,
                shares=list(self._split),
                before=list(before),
                ms_per_microbatch=[round(speed.microbatch_s * 1e3, 3) for speed in self._splitter.speeds or ()],
            )
