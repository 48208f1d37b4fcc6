"""Asynchronous training: each rank computes whole steps, and all hold the same state at sync points only.

Asynchronous updates have no moment at which the state is whole: some step is always under way. So the run is divided
into intervals. Within one, steps are computed and applied in whatever order; it ends when all its steps are applied,
and every rank then has the same parameters. At this sync point the state is that of any other strategy's run after so
many steps: evaluated, saved, stopped and continued as such. :mod:`paceline_more_strategies.server_engines` and
:mod:`paceline_more_strategies.hogwild` are the two engines.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError, TaskError
from paceline.core.task import Callback
from paceline.data.stream import StreamLoader
from paceline.parallel.reducer import StepSums
from paceline.parallel.world import World
from paceline.training.control import ControlFlags, StopCause
from paceline.training.group_context import Engine, GroupContext
from paceline.training.run_context import DataSetup, RunContext
from paceline.training.state import TrainProgress
from paceline.training.state_manager import StateManager

# --- When a rank may begin a step, and the staleness of the parameters behind a gradient. Pure ---
#
# Stale-synchronous parallel: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
# Parameter Server", 2013. A worker's clock counts the steps that it has finished; it may begin another while
# its clock is at most ``bound`` ahead of the slowest worker's. Between the moment a worker gets parameters
# and the moment its gradient is applied, each other worker can then finish at most ``2 * bound + 1`` steps.


class StalenessBound:
    """The workers' clocks, from one cut of the run to the next.

    Args:
        bound: how far ahead of the slowest a worker may begin a step; None: as far as it likes.
    """

    def __init__(self, workers: int, bound: int | None) -> None:
        self._done = [0] * workers
        self._bound = bound

    def can_start(self, worker: int) -> bool:
        """Return whether the worker may begin a step now. The slowest always may."""
        return self._bound is None or self._done[worker] <= min(self._done) + self._bound

    def finished(self, worker: int) -> None:
        """Count an applied gradient of the worker."""
        self._done[worker] += 1


class Staleness:
    """How many updates of others came between each gradient's parameters and its own update."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def observe(self, behind: int, times: int = 1) -> None:
        """Count updates from parameters that were ``behind`` versions old."""
        if times:
            self._counts[behind] += times

    @property
    def stats(self) -> dict[str, float]:
        """Mean and maximum, as entries of the run's result."""
        report = self.report()
        return {"staleness_mean": report.get("mean", 0.0), "staleness_max": report.get("max", 0)}

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


# --- Where an interval ends, what a rank computes in it, and what it refuses ---


class SyncPoints:
    """Return the ends of intervals: the steps after which an action that needs the whole state is due. Pure."""

    def __init__(self, config: RunConfig, data: DataSetup) -> None:
        intervals = [config.evaluation.eval_every, *config.records.checkpoint_every]
        assert data.total_steps is not None
        assert data.steps_per_epoch is not None
        self._every = [interval.steps for interval in intervals if interval.steps is not None]
        self._total_steps = data.total_steps
        self._steps_per_epoch = data.steps_per_epoch

    def steps_to_next(self, progress: TrainProgress) -> int:
        """Steps from a cut to the next: to the end of the run or the epoch, an evaluation or a save."""
        return min(
            self._total_steps - progress.step,
            self._steps_per_epoch - progress.step_in_epoch,
            *(every - progress.step % every for every in self._every),
        )


def compute_step(group: GroupContext, states: StateManager, step: int, step_in_epoch: int) -> StepSums:
    """Compute the gradient of a whole step, at the parameters that this rank has now.

    Args:
        step: its number in the run, which keys its randomness.
        step_in_epoch: its number in the epoch, which says which samples are its.
    """
    progress, strategy = states.state.progress, group.strategy
    mark, move = group.monitor.timer.mark, group.world.progress_tracker.move
    progress.step = step
    move("data")
    microbatches = group.fetch(progress.epoch, step_in_epoch, strategy.microbatches)
    mark("data")
    strategy.begin_step([microbatch.index for microbatch in microbatches])
    strategy.run_microbatches(microbatches, group.runner)
    sums = strategy.reduce(ControlFlags().row())
    mark("reduction")
    return sums


def gather_requests(group: GroupContext) -> ControlFlags:
    """Return any rank's stop request, and whether a save is due by the clock; all ranks call this together."""
    mine = [group.stop_reason(), group.checkpoint_manager.is_due_by_clock()]
    told = group.world.all_gather_object(mine)
    return ControlFlags(stop=StopCause(max(stop for stop, _ in told)), save=any(save for _, save in told))


def require_no_callback(run: RunContext, states: StateManager) -> None:
    """Refuse a task with a callback: all ranks call it alike, and they do not do alike."""
    if type(states.state.callback) is not Callback:
        raise TaskError(
            f"--strategy {run.config.strategies[0]} does not work with the callback of {run.task_name}, which "
            "all ranks call alike in each step. Use --strategy ddp."
        )


def require_asynchronous(run: RunContext, states: StateManager) -> None:
    """Refuse what cannot be trained by steps that are computed out of turn."""
    require_no_callback(run, states)
    if isinstance(states.loader, StreamLoader):
        raise ConfigError(
            f"--strategy {run.config.strategies[0]} computes steps out of turn, and a stream must be read "
            "in turn. Use a map-style dataset, --strategy ddp, or --strategy ps --ps-mode sync."
        )


class AsynchronousEngine(Engine):
    """An engine whose ranks hold the same state at sync points only; it counts stale gradients and steps."""

    validate = staticmethod(require_asynchronous)

    def __init__(self, run: RunContext, states: StateManager, world: World) -> None:
        super().__init__(run, states, world)
        self._sync_points = SyncPoints(run.config, run.data)
        self._staleness = Staleness()
        self._worker_steps: list[int] = []

    @property
    def extra_results(self) -> dict[str, Any]:
        """Rank 0's counts: how old gradients were, and how many steps each worker computed."""
        counts = {"staleness": self._staleness.report(), "worker_steps": self._worker_steps}
        return dict(self._world.broadcast_object(counts))
