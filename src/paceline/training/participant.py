"""What a rank has of its run, and of the world that it takes part in."""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from paceline.callback import Group
from paceline.data.workers import data_workers
from paceline.distributed.mesh import Mesh
from paceline.distributed.shares import Speed
from paceline.distributed.world import World
from paceline.membership.member import Member
from paceline.monitoring.monitor import Monitor
from paceline.monitoring.phases import PHASES
from paceline.strategies.base import Strategy
from paceline.training.balance import ShareBalance
from paceline.training.checkpointing import open_checkpointer
from paceline.training.replica import Replica
from paceline.training.run import Run
from paceline.training.saving import Saver
from paceline.training.state import TrainingState
from paceline.training.step import StepWork
from paceline.training.together import Together, require_order
from paceline.training.validation import Validation
from paceline.training.verification import Verifier, require_verifiable

if TYPE_CHECKING:
    from paceline.monitoring.profiler import StepProfiler
    from paceline.strategies.powersgd import PowerSGD


class Participant:
    """A rank of a run, in one world or in one after another, as ranks come and go.

    What belongs to the run stays: the task's model and optimizers, the data, and the state. What belongs
    to a world is made anew by :meth:`attach`.

    Use it as a context manager: what it opens is closed at exit.

    Attributes:
        run: what is trained.
        loader: of the training data.
        replica: this rank's copy of the state.
        samples: of the steps that this process took part in.
        checkpointer: writes its checkpoints, in whichever world it is rank 0.
        mesh, world: the ranks; from :meth:`attach` on, like ``balance``, ``strategy``, ``verifier``,
            ``together`` (where ranks train apart), ``monitor``, ``saver``, ``profiler``, ``work``.

    Args:
        run: what is trained.
        member: what tells of other ranks' coming and going; None where the world is to stay.

    Raises:
        UserError: the task's model, optimizers or data cannot be built.
    """

    mesh: Mesh
    world: World
    balance: ShareBalance
    strategy: Strategy
    monitor: Monitor
    saver: Saver
    profiler: StepProfiler | None
    verifier: Verifier | None
    together: Together | None
    work: StepWork

    def __init__(self, run: Run, member: Member | None = None) -> None:
        require_verifiable(run)
        if run.config.sync_every:
            require_order(run)
        self.run = run
        self._member = member
        self._resources = ExitStack()
        self._of_world = ExitStack()
        self._earlier_phases = dict.fromkeys(PHASES, 0.0)
        self._speed: Speed | None = None
        self.samples = 0
        self.replica = Replica(run)
        self._resources.callback(self.replica.close)
        self.loader = self.replica.loader = self._resources.enter_context(closing(run.build_loader()))
        self.checkpointer = self._resources.enter_context(open_checkpointer(run))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._of_world.__exit__(*error)
        finally:
            self._resources.__exit__(*error)

    @cached_property
    def validation(self) -> Validation:
        """The evaluations that are made on the way; what they need of the task may need its model."""
        return self._resources.enter_context(closing(Validation(self.run)))

    @property
    def state(self) -> TrainingState:
        """The model and all that changes with it."""
        return self.replica.state

    def attach(self, mesh: Mesh) -> None:
        """Take part in a world whose ranks all hold the state; all of them call this together.

        Raises:
            UserError: the strategy cannot work with so many processes, or the run directory is not writable.
            PeerLostError: a rank is gone.
        """
        run, progress, stack = self.run, self.state.progress, self._of_world
        self.mesh, self.world = mesh, mesh.world
        world = mesh.world
        world.activity.helpers = data_workers
        self.balance = self._share()
        self._build_strategy()
        self.replica.gather_positions(world)
        self.together = None
        if run.config.sync_every:
            self.together = Together(run, mesh, self.state, self.balance.shares)
            stack.enter_context(closing(self.together))
        self.verifier = None
        if run.config.verify_every:
            self.verifier = stack.enter_context(closing(Verifier(run, world, self.state)))
        stack.callback(lambda: self.strategy.close())
        stack.callback(lambda: self.strategy.abandon())
        self.monitor = stack.enter_context(run.build_monitor(world, progress.step))
        stack.callback(self._keep_phases)
        self.saver = stack.enter_context(
            Saver(
                run,
                world,
                progress,
                self.replica.recent,
                self.checkpointer,
                copies=self._member is not None and not self.replica.in_step,
            )
        )
        self.profiler = run.build_profiler(self.monitor, progress.step)
        if self.profiler is not None:
            stack.enter_context(closing(self.profiler))
        self.work = StepWork(run, self.state, world.activity, self.monitor.timer)
        self.strategy.module.train()
        self.monitor.timer.mark("other")
        self.balance.watch(self.monitor.timer, run.device, progress.step)
        stack.callback(self._keep_speed)
        self.state.callback.attach(self._group(), step=progress.step, epoch=progress.epoch)
        self._beat()

    def _group(self) -> Group:
        run, world = self.run, self.world
        return Group(
            rank=world.rank,
            world_size=world.world_size,
            local_rank=world.local_rank,
            device=run.device,
            directory=run.directory.path,
            log_every=run.config.log_every,
            gather=world.all_gather_json,
        )

    def _share(self) -> ShareBalance:
        """Share the shards for the first time in this world; all ranks do so together."""
        run = self.run
        return ShareBalance(
            self.mesh.data,
            run.num_shards,
            by_speed=run.shares_by_speed,
            speed=self._speed,
            directory=run.directory,
            servers=run.config.num_servers(self.world.world_size),
        )

    def _build_strategy(self) -> None:
        self.strategy = self.run.build_strategy(self.state.module, self.mesh, self.balance.shares)
        left_out, self.state.left_out = self.state.left_out, None
        if left_out is not None and (powersgd := self._powersgd) is not None:
            powersgd.load(left_out)

    @property
    def _powersgd(self) -> PowerSGD | None:
        """Compresses gradients with a memory that belongs to the state, where something does."""
        if self.run.config.comm_hook != "powersgd":
            return None
        from paceline.strategies.torch_ddp import TorchDDP

        assert isinstance(self.strategy, TorchDDP)
        return self.strategy.powersgd

    def detach(self) -> None:
        """Leave the world, as far as it was attached: the state is what it was after the last whole step.

        A save in the background goes on.
        """
        self._of_world.close()

    def phases(self) -> dict[str, float]:
        """Seconds by phase, over all worlds."""
        now = self.monitor.timer.seconds
        return {phase: seconds + now[phase] for phase, seconds in self._earlier_phases.items()}

    def _keep_phases(self) -> None:
        self._earlier_phases = self.phases()

    def _keep_speed(self) -> None:
        self._speed = self.balance.speed

    def _share_anew(self) -> None:
        """Share the shards as the balance says, between two steps; all ranks do so together."""
        self.replica.gather_positions(self.world, self.strategy.shards)
        self.strategy.close()
        self._build_strategy()

    def _beat(self) -> None:
        self.world.activity.step = self.state.progress.step
        if self._member is not None:
            self._member.pulse.step = self.state.progress.step
            self._member.pulse.version = self.state.progress.version
