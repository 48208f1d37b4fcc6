"""Asynchronous training between two sync points; and parameters on servers."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paceline.core.callback import Callback
from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError, TaskError
from paceline.core.options import Interval, parse_interval
from paceline.data.stream import StreamLoader
from paceline.elastic.worker_channel import AgentClient
from paceline.elastic.worker_group import StateSource, transfer_state
from paceline.parallel.load_balancing import LoadBalancer
from paceline.parallel.parameter_server import ServerParameters
from paceline.parallel.reducer import StepSums
from paceline.parallel.world import ParallelDims, World
from paceline.training.resolve import DataSetup
from paceline.training.run_context import RunContext
from paceline.training.state import TrainingState, TrainProgress
from paceline.training.trainer import Trainer

# --- Who may begin a step when, and how old the parameters are that a gradient was computed from. Pure ---
#
# Stale-synchronous parallel: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
# Parameter Server", 2013. A worker's clock counts the steps that it has finished; it may begin another while
# its clock is at most ``bound`` ahead of the slowest worker's. Between the moment a worker gets parameters
# and the moment its gradient is applied, each other worker can then finish at most ``2 * bound + 1`` steps.


class StalenessBound:
    """The workers' clocks, from one cut of the run to the next.

    Args:
        workers: how many there are; they are numbered from 0.
        bound: how far ahead of the slowest a worker may begin a step; None: as far as it likes.
    """

    def __init__(self, workers: int, bound: int | None) -> None:
        self._done = [0] * workers
        self._bound = bound

    def can_start(self, worker: int) -> bool:
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


# --- Training with parameter servers, step by step (``--strategy ps``): only servers update ---


class SyncParameterServerTrainer(Trainer):
    """Has only servers hold optimizer state and update; everybody gets the parameters from them.

    Raises:
        UserError: the task's model, optimizers or data cannot be built, or it has a callback of its own.
    """

    def __init__(self, run: RunContext, member: AgentClient | None = None) -> None:
        super().__init__(run, member)
        require_no_callback(run, self.state)

    def join_group(self, mesh: ParallelDims) -> None:
        self._on_servers = ServerParameters(self.state.module, self.run.config.num_servers(mesh.world.world_size))
        drop_others_state(self.state, self._on_servers, mesh.world.rank)
        super().join_group(mesh)

    def _update(self, *, finite: bool = True) -> None:
        if self.world.rank < self._on_servers.servers:
            self._on_servers.keep_gradients_of(self.world.rank)
            super()._update(finite=finite)
        self._on_servers.publish(self.world)

    def _full_state_dict(self) -> dict[str, Any]:
        return with_all_optimizers(super()._full_state_dict(), self.world, self._on_servers.servers)


def require_no_callback(run: RunContext, state: TrainingState) -> None:
    """Refuse a task with a callback: it is called by all ranks alike, and they do not do alike.

    Raises:
        TaskError: it has one.
    """
    if type(state.callback) is not Callback:
        raise TaskError(
            f"--strategy {run.config.strategies[0]} does not work with the callback of {run.task_name}, which "
            "all ranks call alike in each step. Use --strategy ddp."
        )


def drop_others_state(state: TrainingState, on_servers: ServerParameters, rank: int) -> None:
    """Free the optimizer state, which a checkpoint gave whole, of all parameters but this rank's."""
    mine = {id(parameter) for parameter in on_servers.parameters[rank]} if rank < on_servers.servers else set()
    for optimizer in state.optimizers.values():
        for parameter in [p for p in optimizer.state if id(p) not in mine]:
            del optimizer.state[parameter]


def with_all_optimizers(state: dict[str, Any], world: World, servers: int) -> dict[str, Any]:
    """A state with the optimizer state that the other servers hold, on rank 0; all ranks call this together.

    Raises:
        PeerLostError: a rank is gone.
    """
    if servers == 1:
        return state
    merged = {name: dict(optimizer["state"]) for name, optimizer in state["optimizers"].items()}
    for server in range(1, servers):
        mine = merged if world.rank == server else None
        received = transfer_state(world, StateSource(server, 0, (0,)), mine)
        for name, entries in (received or {}).items():
            merged[name].update(entries)
    whole = {
        name: {**optimizer, "state": dict(sorted(merged[name].items()))}
        for name, optimizer in state["optimizers"].items()
    }
    return {**state, "optimizers": whole}


# --- Training in which ranks compute whole steps by themselves, between cuts at which they hold the same
#     state
#
# Asynchronous updates have no moment at which the state is whole: some step is always under way. So the
# run is divided into stretches. In a stretch, steps are computed and applied in whatever order; it ends when
# all its steps are applied, and every rank then has the same parameters. At this cut the state is that of any
# other strategy's run after so many steps: evaluated, saved, stopped and continued as such.


class AsyncTrainer(Trainer):
    """Trains stretch by stretch.

    Attributes:
        staleness: of the updates that this process knows of.

    Raises:
        UserError: the task's model, optimizers or data cannot be built, or do not go with asynchronous steps.
    """

    def __init__(self, run: RunContext, member: AgentClient | None = None) -> None:
        super().__init__(run, member)
        require_no_callback(run, self.state)
        if isinstance(self.loader, StreamLoader):
            raise ConfigError(
                f"--strategy {run.config.strategies[0]} computes steps out of turn, and a stream must be read "
                "in turn. Use a map-style dataset, --strategy ddp, or --strategy ps --ps-mode sync."
            )
        self._sync_points = SyncPoints(run.config, run.data)
        self.staleness = Staleness()

    def fit(self) -> bool:
        if self._apply_due_transitions() or (
            self.state.progress.step and self.checkpoint_manager.is_due(self.state.progress)
        ):
            self._save()
        self.world.progress_tracker.begin("first step")
        while not self.schedule.finished(self.state.progress):
            self._run_to_sync_point(self._sync_points.steps_to_next(self.state.progress))
            self.world.progress_tracker.end()
            stop, save = self._asked()
            if stop:
                self._save_and_stop(stop)
            improved = self._apply_due_transitions()
            if improved or save or self.checkpoint_manager.is_due(self.state.progress):
                self._save()
        self._save(last=True)
        return True

    @abstractmethod
    def _run_to_sync_point(self, steps: int) -> None:
        """Compute and apply the epoch's next ``steps`` steps, or fewer, and cut; all ranks do so together."""

    @property
    def extra_results(self) -> dict[str, Any]:
        report = self.staleness.report() if self.world.rank == 0 else None
        return {"staleness": self.world.broadcast_object(report)}

    def _asked(self) -> tuple[int, bool]:
        """What asks for a stop, on any rank, and whether a save is due by the clock."""
        told = self.world.all_gather_object([self.stop_reason(), self.checkpoint_manager.is_due_by_clock()])
        return max(stop for stop, _ in told), any(save for _, save in told)

    def _compute(self, step: int, step_in_epoch: int) -> StepSums:
        """The gradient of a whole step, at the parameters that this rank has now.

        Args:
            step: its number in the run, which keys its randomness.
            step_in_epoch: its number in the epoch, which says which samples are its.
        """
        progress, strategy = self.state.progress, self.strategy
        mark, move = self.monitor.timer.mark, self.world.progress_tracker.move
        progress.step = step
        move("data")
        microbatches = self.loader.fetch(progress.epoch, step_in_epoch, strategy.microbatches)
        mark("data")
        strategy.begin_step([microbatch.index for microbatch in microbatches])
        strategy.run_microbatches(microbatches, self.runner)
        sums = strategy.reduce(self._control_flags().row())
        mark("reduction")
        return sums

    def _share(self) -> LoadBalancer:
        return LoadBalancer(
            alone(self.world),
            self.run.num_microbatches,
            by_speed=False,
            speed=None,
            directory=self.run.directory,
        )

    def _build_strategy(self) -> None:
        mesh = ParallelDims(alone(self.world), {"dp": 1})
        self.strategy = self.run.build_strategy(self.state.module, mesh, self.balancer.work_split)


def alone(world: World) -> World:
    """This rank as a world of its own, which computes whole steps."""
    return replace(world, rank=0, world_size=1, local_rank=0, local_world_size=1, active=None, subgroup=None)


class SyncPoints:
    """Where stretches end: wherever something is due that looks at the whole state. Pure.

    Args:
        config: the run's options.
        data: how long it goes on.
    """

    def __init__(self, config: RunConfig, data: DataSetup) -> None:
        intervals = [
            parse_interval(config.eval_every, "eval_every", allow_time=False),
            *(parse_interval(text, "checkpoint_every") for text in config.checkpoint_every),
        ]
        assert data.total_steps is not None
        assert data.steps_per_epoch is not None
        self._every = _steps(intervals)
        self._total_steps, self._steps_per_epoch = data.total_steps, data.steps_per_epoch

    def steps_to_next(self, progress: TrainProgress) -> int:
        """Steps from a cut to the next: to the end of the run or the epoch, an evaluation or a save."""
        return min(
            self._total_steps - progress.step,
            self._steps_per_epoch - progress.step_in_epoch,
            *(every - progress.step % every for every in self._every),
        )


def _steps(intervals: Sequence[Interval]) -> list[int]:
    return [interval.steps for interval in intervals if interval.steps is not None]
