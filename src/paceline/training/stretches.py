"""Training in which ranks compute whole steps by themselves, between cuts at which they hold the same state.

Asynchronous updates have no moment at which the state is whole: some step is always under way. So the
run is divided into stretches. In a stretch, steps are computed and applied in whatever order; it ends when
all its steps are applied, and every rank then has the same parameters. At this cut the state is that of any
other strategy's run after so many steps: evaluated, saved, stopped and continued as such.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paceline.config import Interval, RunConfig, parse_interval
from paceline.data.stream import StreamLoader
from paceline.distributed.mesh import Mesh
from paceline.distributed.reducer import StepSums
from paceline.distributed.world import World
from paceline.errors import ConfigError
from paceline.membership.member import Member
from paceline.training.balance import ShareBalance
from paceline.training.clocks import Staleness
from paceline.training.plan import DataPlan
from paceline.training.run import Run
from paceline.training.servers import require_no_callback
from paceline.training.state import Progress
from paceline.training.trainer import Trainer


class StretchTrainer(Trainer):
    """Trains stretch by stretch.

    Attributes:
        staleness: of the updates that this process knows of.

    Raises:
        UserError: the task's model, optimizers or data cannot be built, or do not go with asynchronous steps.
    """

    def __init__(self, run: Run, member: Member | None = None) -> None:
        super().__init__(run, member)
        require_no_callback(run, self.state)
        if isinstance(self.loader, StreamLoader):
            raise ConfigError(
                f"--strategy {run.config.methods[0]} computes steps out of turn, and a stream must be read "
                "in turn. Use a map-style dataset, --strategy ddp, or --strategy ps --ps-mode sync."
            )
        self._cuts = Cuts(run.config, run.data)
        self.staleness = Staleness()

    def fit(self) -> bool:
        if self._settle() or (self.state.progress.step and self.saver.is_due(self.state.progress)):
            self._save()
        self.world.activity.begin("first step")
        while not self.schedule.finished(self.state.progress):
            self._stretch(self._cuts.steps_to_next(self.state.progress))
            self.world.activity.end()
            stop, save = self._asked()
            if stop:
                self._save_and_stop(stop)
            improved = self._settle()
            if improved or save or self.saver.is_due(self.state.progress):
                self._save()
        self._save(last=True)
        return True

    @abstractmethod
    def _stretch(self, steps: int) -> None:
        """Compute and apply the epoch's next ``steps`` steps, or fewer, and cut; all ranks do so together."""

    @property
    def findings(self) -> dict[str, Any]:
        report = self.staleness.report() if self.world.rank == 0 else None
        return {"staleness": self.world.broadcast_json(report)}

    def _asked(self) -> tuple[int, bool]:
        """What asks for a stop, on any rank, and whether a save is due by the clock."""
        told = self.world.all_gather_json([self.stop_asked(), self.saver.is_due_by_clock()])
        return max(stop for stop, _ in told), any(save for _, save in told)

    def _compute(self, step: int, step_in_epoch: int) -> StepSums:
        """The gradient of a whole step, at the parameters that this rank has now.

        Args:
            step: its number in the run, which keys its randomness.
            step_in_epoch: its number in the epoch, which says which samples are its.
        """
        progress, strategy = self.state.progress, self.strategy
        mark, move = self.monitor.timer.mark, self.world.activity.move
        progress.step = step
        move("data")
        microbatches = self.loader.fetch(progress.epoch, step_in_epoch, strategy.shards)
        mark("data")
        strategy.begin_step([microbatch.shard for microbatch in microbatches])
        strategy.compute(microbatches, self.work)
        sums = strategy.finish_step(self._control().row())
        mark("reduction")
        return sums

    def _share(self) -> ShareBalance:
        return ShareBalance(
            alone(self.world),
            self.run.num_shards,
            by_speed=False,
            speed=None,
            directory=self.run.directory,
        )

    def _build_strategy(self) -> None:
        mesh = Mesh(alone(self.world), {"dp": 1})
        self.strategy = self.run.build_strategy(self.state.module, mesh, self.balance.shares)


def alone(world: World) -> World:
    """This rank as a world of its own, which computes whole steps."""
    return replace(
        world, rank=0, world_size=1, local_rank=0, local_world_size=1, computing=None, subgroup=None
    )


class Cuts:
    """Where stretches end: wherever something is due that looks at the whole state. Pure.

    Args:
        config: the run's options.
        data: how long it goes on.
    """

    def __init__(self, config: RunConfig, data: DataPlan) -> None:
        intervals = [
            parse_interval(config.eval_every, "eval_every", allow_time=False),
            *(parse_interval(text, "checkpoint_every") for text in config.checkpoint_every),
        ]
        assert data.total_steps is not None
        assert data.steps_per_epoch is not None
        self._every = _steps(intervals)
        self._total_steps, self._steps_per_epoch = data.total_steps, data.steps_per_epoch

    def steps_to_next(self, progress: Progress) -> int:
        """Steps from a cut to the next: to the end of the run or the epoch, an evaluation or a save."""
        return min(
            self._total_steps - progress.step,
            self._steps_per_epoch - progress.step_in_epoch,
            *(every - progress.step % every for every in self._every),
        )


def _steps(intervals: Sequence[Interval]) -> list[int]:
    return [interval.steps for interval in intervals if interval.steps is not None]
