"""Shares by measured speed: what each rank measures of itself, and when all of them share anew."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.distributed.shares import (
    WINDOW_S,
    WINDOW_STEPS,
    Balancer,
    Speed,
    first_shares,
)
from paceline.distributed.tree import equal_shares
from paceline.distributed.world import World
from paceline.monitoring.phases import PhaseTimer
from paceline.run_directory import RunDirectory

SPEED_WIDTH = len(Speed._fields)
"""Numbers in a rank's row; all are 0 where it has no measure to give."""

_SHARD_PHASES = ("data", "forward", "backward")
_STEP_PHASES = ("optimizer", "other")


class Stopwatch:
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
        self._steps = self._shards = 0

    def begin(self) -> None:
        """A step's data is there, and its first forward is next."""
        if self._events is not None:
            if self._recorded:  # the step before has been waited for
                self._gpu_s += self._events[0].elapsed_time(self._events[1]) / 1000
            self._events[0].record()

    def end(self, shards: int) -> None:
        """The backward of the step's last shard has been run, or enqueued."""
        if self._events is not None:
            self._events[1].record()
            self._recorded = True
        self._steps += 1
        self._shards += shards

    def speed(self) -> Speed | None:
        """The speed over the window; None where it is too short yet, or held no shard."""
        training_s = self._timer.training_s() - self._training_from
        if self._steps < WINDOW_STEPS or training_s < WINDOW_S or not self._shards:
            return None
        shard_s = self._spent(("data",)) + self._gpu_s if self._events else self._spent(_SHARD_PHASES)
        return Speed(shard_s / self._shards, self._spent(_STEP_PHASES) / self._steps)

    def _spent(self, phases: Sequence[str]) -> float:
        return sum(self._timer.seconds[phase] - self._from[phase] for phase in phases)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class ShareBalance:
    """How the ranks of one world share the shards; every rank has one and calls it alike.

    Args:
        world: the ranks.
        num_shards: S.
        by_speed: whether they share by speed; else equally.
        speed: this rank's, from an earlier world.
        directory: where rank 0 records shares that are not equal.
        servers: how many ranks, the first ones, have no shards at all.

    Raises:
        PeerLostError: a rank is gone.
    """

    def __init__(
        self,
        world: World,
        num_shards: int,
        *,
        by_speed: bool,
        speed: Speed | None,
        directory: RunDirectory,
        servers: int = 0,
    ) -> None:
        assert not (servers and by_speed)
        computing = world.num_computing - servers
        self._rank = world.rank
        self._servers = (0,) * servers
        self._spares = (0,) * (world.world_size - computing - servers)
        self._earlier = speed
        self._directory = directory
        self._stopwatch: Stopwatch | None = None
        self._equal = shares = equal_shares(num_shards, computing)
        # With a shard for each rank there is nothing to give away.
        self._by_speed = by_speed and 1 < computing < num_shards
        if self._by_speed:
            gathered = world.all_gather_json(speed)[:computing]
            shares = first_shares(shares, [None if told is None else Speed(*told) for told in gathered])
        self._balancer = Balancer(shares)

    @property
    def shares(self) -> tuple[int, ...]:
        """Each rank's shards; none are the servers' and the spares'."""
        return self._servers + self._balancer.shares + self._spares

    @property
    def speed(self) -> Speed | None:
        """This rank's speed, as far as it is known, for the next world."""
        speeds = self._balancer.speeds
        return speeds[self._rank] if speeds and self._rank < len(speeds) else self._earlier

    def watch(self, timer: PhaseTimer, device: torch.device, step: int) -> None:
        """Measure from now on, before the first step but ``step``."""
        if self._by_speed:
            self._stopwatch = Stopwatch(timer, device)
        if self._balancer.shares != self._equal:
            self._record(step, self._equal)

    def begin(self) -> None:
        """See :meth:`Stopwatch.begin`."""
        if self._stopwatch is not None:
            self._stopwatch.begin()

    def end(self, shards: int) -> None:
        """See :meth:`Stopwatch.end`."""
        if self._stopwatch is not None:
            self._stopwatch.end(shards)

    def row(self, step: int) -> Speed | None:
        """What this rank tells the others in the reduction of ``step``."""
        if self._stopwatch is None or step % WINDOW_STEPS:
            return None
        return self._stopwatch.speed()

    def observe(self, rows: Sequence[Sequence[float]], step: int) -> bool:
        """Take in what all ranks told of ``step``; say whether ``shares`` are others from now on."""
        if self._stopwatch is None:
            return False
        before = self._balancer.shares
        window = [Speed(*row) for row in rows[: len(before)]]
        # A window ends for all ranks at the same step: when the last of them has measured long enough.
        if not all(speed.shard_s > 0 for speed in window):
            return False
        self._stopwatch.restart()
        if not self._balancer.observe(window):
            return False
        self._record(step, before)
        return True

    def _record(self, step: int, before: Sequence[int]) -> None:
        if self._rank == 0:
            self._directory.append_event(
                "shares",
                step=step,
                shares=list(self.shares),
                before=[*before, *self._spares],
                ms_per_shard=[round(speed.shard_s * 1e3, 3) for speed in self._balancer.speeds or ()],
            )
