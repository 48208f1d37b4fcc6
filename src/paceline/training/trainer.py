"""The loop: step, evaluate, save, until the run is finished or must stop."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn, Self

from paceline.core.callback import Group
from paceline.core.errors import NonFiniteLossError
from paceline.data.samples import data_workers
from paceline.data.stream import StreamLoader
from paceline.elastic.worker_channel import Member
from paceline.parallel.load_balancing import ShareBalance, Speed
from paceline.parallel.reducer import StepSums
from paceline.parallel.strategy import Strategy
from paceline.parallel.world import Mesh, World
from paceline.runs.monitor import Monitor
from paceline.runs.phases import PHASES
from paceline.training import control
from paceline.training.checkpoint_manager import Saver, open_checkpointer
from paceline.training.control import Referee
from paceline.training.evaluation import EvaluationStopped
from paceline.training.local_sgd import Together, require_order
from paceline.training.optim import LEAST_SCALE
from paceline.training.run_context import Run
from paceline.training.schedule import Schedule
from paceline.training.sdc import Verifier, require_verifiable
from paceline.training.state import TrainingState
from paceline.training.state_manager import Replica
from paceline.training.step import Lookahead, SpareBatch, StepWork, describe_non_finite
from paceline.training.stopping import leave
from paceline.training.validation import Validation

if TYPE_CHECKING:
    from paceline.parallel.torch_ddp import PowerSGD
    from paceline.runs.profiler import StepProfiler


# --- What a rank has of its run, and of the world that it takes part in ---


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
        from paceline.parallel.torch_ddp import TorchDDP

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


# --- The loop, and what one step is ---


class Trainer(Participant):
    """Trains a run from where its state stands to its end; every rank has one and calls it alike.

    It is made alone; then, in one world after another: :meth:`attach`, :meth:`fit`, :meth:`detach`.

    Attributes:
        schedule: when epochs, evaluations and the run end.

    Args:
        run: what is trained.
        member: what tells of other ranks' coming and going; None where the world is to stay.

    Raises:
        UserError: the task's model, optimizers or data cannot be built.
    """

    def __init__(self, run: Run, member: Member | None = None) -> None:
        super().__init__(run, member)
        self.schedule = Schedule(run.config, run.data)
        self._spare = SpareBatch(run)
        self._lookahead = Lookahead(self.schedule)
        self._referee = None
        if run.referee is not None:
            self._referee = self._resources.enter_context(closing(Referee(run.referee)))

    def fit(self) -> bool:
        """Train to the end, and save.

        Returns:
            Whether the end is reached; else the ranks left together, after a step, for another world.

        Raises:
            StopRequested: a signal or the end of --walltime asked for it; the state is saved.
            CorruptionError, IrreproducibleStepError: two ranks computed different gradients for a shard.
            NonFiniteLossError: a loss or gradient was NaN or infinite; that step was not applied.
            CheckpointError: the last checkpoint could not be written.
            PeerLostError: a rank is gone; :meth:`detach` leaves the state of the last whole step.
        """
        # What a run owes after its last step, it owes also if that was in another world.
        if self._settle() or (self.state.progress.step and self.saver.is_due(self.state.progress)):
            self._save()
        self.world.activity.begin("first step")
        while not self.schedule.finished(self.state.progress):
            began = time.monotonic()
            sums = self._round()
            self.run.deadline.step_took(time.monotonic() - began)
            word = self._lookahead.obeyed(control.merge(sums.rows))
            self.state.progress.epoch_ended = not word.more
            if word.stop:
                self._save_and_stop(word.stop)
            if word.reform:
                return False
            improved = self._settle()
            if improved or word.save or self.saver.is_due(self.state.progress):
                self._save()
            if self.profiler is not None:
                self.profiler.step_done(self.state.progress.step)
            if self.balance.observe(control.speeds(sums.rows), self.state.progress.step):
                self._share_anew()
        self.state.callback.fit_ends()
        self._save(last=True)
        return True

    def _round(self) -> StepSums:
        """Steps until all ranks hold the same state again: one, unless they train apart."""
        while True:
            sums = self._step()
            if self.schedule.rounds.ends(self.state.progress):
                return sums
            if self.profiler is not None:
                self.profiler.step_done(self.state.progress.step)

    def _step(self) -> StepSums:
        """Fetch, forward and backward, reduce, update, commit."""
        run, progress, strategy = self.run, self.state.progress, self.strategy
        mark, move = self.monitor.timer.mark, self.world.activity.move
        callback = self.state.callback
        if progress.step_in_epoch == 0:
            callback.epoch_begins(progress.epoch)
        callback.step_begins(progress.step, progress.step_in_epoch)
        move("data")
        microbatches = self._lookahead.fetch(self.loader, strategy, progress)
        mark("data")

        strategy.begin_step([microbatch.shard for microbatch in microbatches])
        self._lookahead.go_on(self.loader, strategy, progress, self.saver.is_due)
        if self.verifier is not None:
            self.verifier.begin_step(strategy)
            mark("other")
        self.balance.begin()
        strategy.compute(microbatches, self.work)
        self.balance.end(len(microbatches))
        self._spare.take_part(strategy, microbatches, progress.epoch)

        move("reduction")
        row = self._control().row(self._status(), self.balance.row(progress.step))
        sums = strategy.finish_step(row)
        if self.together is not None:
            sums = self.together.agreed(sums)
        mark("reduction")
        move("optimizer")
        if not sums.finite and not self._overflowed(sums):
            scale = None if self.state.scaler is None else self.state.scaler.get_scale()
            raise NonFiniteLossError(
                describe_non_finite(run.directory, progress, run.data.order, sums, scale)
            )

        logged = callback.step_reduced(due=self.monitor.is_due(progress.step + 1))
        with self.replica.changing():
            self._update(finite=sums.finite)
            mark("optimizer")
            return self._commit(sums, row, logged)

    def _overflowed(self, sums: StepSums) -> bool:
        """Whether gradients are no error: a scaler then skips the step, and tries a smaller scale."""
        if self.state.scaler is None or sums.bad_shard is not None or not math.isfinite(sums.loss):
            return False
        return self.state.scaler.get_scale() > LEAST_SCALE

    def _update(self, *, finite: bool = True) -> None:
        """Apply the gradients, where those of all ranks are finite."""
        clip_norm = self.run.config.clip_norm
        clip = None if clip_norm is None else partial(self.replica.clip_gradients, clip_norm)
        self.state.update(clip, finite=finite)

    def _commit(self, sums: StepSums, row: Sequence[float], logged: Mapping[str, float]) -> StepSums:
        """Make the step count: one transition of the state, one ledger entry, one report."""
        progress = self.state.progress
        epoch, step_in_epoch = progress.epoch, progress.step_in_epoch
        progress.version += 1
        progress.step += 1
        progress.step_in_epoch += 1
        progress.samples += sums.samples
        self.samples += sums.samples
        self._beat()
        if self.together is None:
            self.saver.record_step(progress, epoch, step_in_epoch, sums, self.balance.shares)
        else:
            sums = self._come_together(epoch, step_in_epoch, sums, row)
        rows = partial(control.statuses, sums.rows)
        self.state.callback.step_done(progress.step, sums.loss)
        self.monitor.step_done(
            progress.step, epoch, sums.samples, sums.loss, self.state.learning_rates, rows, logged
        )
        self.monitor.timer.mark("other")
        self.world.activity.end()
        return sums

    def _come_together(
        self, epoch: int, step_in_epoch: int, sums: StepSums, row: Sequence[float]
    ) -> StepSums:
        """At a round's end have all ranks hold one state, and enter the round into the ledger."""
        assert self.together is not None
        self.world.activity.move("reduction")
        done, rows = self.together.step_done(epoch, step_in_epoch, sums, row)
        for record in done:
            self.saver.record_step(
                record.progress, record.epoch, record.step_in_epoch, record.sums, self.balance.shares
            )
        self.monitor.timer.mark("reduction")
        return dataclasses.replace(sums, rows=rows)

    def _settle(self) -> bool:
        """Make the transitions that are due after a step; return whether the model became the best.

        They depend on nothing but the state: a run that was stopped right after a step still owes
        them, and makes them when it is resumed.
        """
        progress = self.state.progress
        if self.schedule.epoch_ends(progress):
            with self.replica.changing():
                progress.epoch += 1
                progress.step_in_epoch = 0
                progress.epoch_ended = False
                progress.version += 1
                if not self._evaluation_is_due():
                    self._conclude_epoch()
            self.saver.flush_ledger()
        return self._evaluate() if self._evaluation_is_due() else False

    def _evaluation_is_due(self) -> bool:
        return self.validation.exists and self.schedule.evaluation_is_due(self.state.progress)

    def _conclude_epoch(self) -> None:
        """Tell the task of an epoch's end, once: within the last transition that the end brings about."""
        callback, progress = self.state.callback, self.state.progress
        if progress.epochs_concluded < progress.epoch:
            callback.epoch_ends(progress.epoch - 1)
            progress.epochs_concluded = progress.epoch
        progress.stopped_early = progress.stopped_early or callback.should_stop

    def _evaluate(self) -> bool:
        self.world.activity.begin("evaluation")
        try:
            metrics = self.validation.measure(
                self.mesh, self.state, self.monitor, self.stop_asked, in_step=self.replica.in_step
            )
        except EvaluationStopped as stopped:
            # It changed nothing, and is made again when the run goes on.
            self._save_and_stop(stopped.stop)
        with self.replica.changing():
            improved = self.validation.apply(metrics, self.state, self.monitor)
            self._conclude_epoch()
        if self._referee is not None and not self._goes_on(self._referee):
            self._save_and_stop(control.REFEREE)
        self.monitor.timer.mark("evaluation")
        self.world.activity.end()
        return improved

    def _goes_on(self, referee: Referee) -> bool:
        """Whether the run is to go on after the evaluation that was just applied."""
        progress, world = self.state.progress, self.world
        finished = self.schedule.finished(progress)
        answer = False
        if world.rank == 0:
            answer = referee.goes_on(
                step=progress.step, epoch=progress.epoch, metrics=self.validation.metrics, finished=finished
            )
        return bool(world.broadcast_json(answer)) or finished

    def _control(self) -> control.Control:
        more = not (isinstance(self.loader, StreamLoader) and self.loader.exhausted(self.strategy.shards))
        deadline = self.run.deadline
        evaluates = deadline.is_set and self.schedule.evaluation_follows(self.state.progress, more=more)
        return control.Control(
            stop=self.stop_asked(evaluates=evaluates),
            save=self.saver.is_due_by_clock(),
            more=more,
            reform=self._member is not None and self._member.should_reform(self.world.generation),
            **({} if self.verifier is None else self.verifier.fingerprints),
        )

    def _status(self) -> Sequence[float] | None:
        step = self.state.progress.step + 1
        # Where steps overlap, the rows that come with a step are those of the one before.
        due = self.monitor.is_due(step) or (self.strategy.overlaps_steps and self.monitor.is_due(step + 1))
        return self.monitor.status(step) if due else None

    def stop_asked(self, *, evaluates: bool = False) -> int:
        """What asks for a stop, as in the control word.

        Args:
            evaluates: an evaluation would come before the next such question.
        """
        due = self.world.rank == 0 and self.run.deadline.is_due(
            save_s=self.saver.save_s, evaluates=evaluates and self.validation.exists
        )
        return self.run.signals.received or (control.WALLTIME if due else 0)

    def _save_and_stop(self, stop: int) -> NoReturn:
        # If a rank is lost now, those that go on without it still know that they are to stop.
        self.run.signals.received = self.run.signals.received or stop
        self._save(last=True)
        self.stop(stop)

    def stop(self, stop: int) -> NoReturn:
        """Leave, once the state is saved: raises always; all ranks do so together.

        Raises:
            StopRequested: somebody asked for it.
            ConfigError: the time was up before a single step was done; it would be so again.
        """
        leave(self.run, self.world, stop, step=self.state.progress.step, idle=not self.samples)

    def _whole_state(self) -> dict[str, Any]:
        """What is to be saved, on rank 0; all ranks call this together."""
        state = self.replica.whole_state(self.world)
        if (powersgd := self._powersgd) is not None:
            state["powersgd"] = powersgd.gathered()
        return state

    @property
    def findings(self) -> dict[str, Any]:
        """What the run found out, besides, for ``result.json``."""
        return {}

    def _save(self, *, last: bool = False) -> None:
        self.world.activity.begin("checkpoint")
        state = self._whole_state()
        # Who dies later takes its positions along: others then read its shards on from these.
        streams = self.replica.gather_positions(self.world, self.strategy.shards)
        if streams is not None:
            state["streams"] = streams
        self.saver.save(state, self.state.progress, last=last)
        self.monitor.timer.mark("checkpoint")
        self.world.activity.end()
