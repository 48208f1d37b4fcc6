"""The loop: step, evaluate, save, until the run is finished or must stop."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn, Self

from paceline.core.callback import RankInfo
from paceline.core.errors import NonFiniteLossError
from paceline.data.samples import data_workers
from paceline.data.stream import StreamLoader
from paceline.elastic.worker_channel import AgentClient
from paceline.parallel.load_balancing import LoadBalancer, Speed
from paceline.parallel.reducer import StepSums
from paceline.parallel.strategy import Strategy
from paceline.parallel.world import ParallelDims, World
from paceline.runs.monitor import Monitor
from paceline.runs.phases import PHASES
from paceline.training import control
from paceline.training.checkpoint_manager import CheckpointManager, open_checkpointer
from paceline.training.control import TrialSchedulerClient
from paceline.training.evaluation import EvaluationStopped
from paceline.training.local_sgd import LocalSGD, require_order
from paceline.training.optim import LEAST_SCALE
from paceline.training.run_context import RunContext
from paceline.training.schedule import Schedule
from paceline.training.sdc import SDCChecker, require_verifiable
from paceline.training.state import TrainingState
from paceline.training.state_manager import StateManager
from paceline.training.step import DummyMicrobatch, MicrobatchRunner, StepOverlap, describe_non_finite
from paceline.training.stopping import stop_all_ranks
from paceline.training.validation import Validation

if TYPE_CHECKING:
    from paceline.parallel.torch_ddp import PowerSGD
    from paceline.runs.profiler import StepProfiler


# --- What a rank has of its run, and of the world that it takes part in ---


class GroupContext:
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
        mesh, world: the ranks; from :meth:`attach` on, like ``balancer``, ``strategy``, ``sdc``,
            ``local_sgd`` (where ranks train apart), ``monitor``, ``checkpoint_manager``, ``profiler``, ``runner``.

    Args:
        run: what is trained.
        member: what tells of other ranks' coming and going; None where the world is to stay.

    Raises:
        UserError: the task's model, optimizers or data cannot be built.
    """

    mesh: ParallelDims
    world: World
    balancer: LoadBalancer
    strategy: Strategy
    monitor: Monitor
    checkpoint_manager: CheckpointManager
    profiler: StepProfiler | None
    sdc: SDCChecker | None
    local_sgd: LocalSGD | None
    runner: MicrobatchRunner

    def __init__(self, run: RunContext, member: AgentClient | None = None) -> None:
        require_verifiable(run)
        if run.config.local_sgd_steps:
            require_order(run)
        self.run = run
        self._member = member
        self._resources = ExitStack()
        self._of_world = ExitStack()
        self._earlier_phases = dict.fromkeys(PHASES, 0.0)
        self._speed: Speed | None = None
        self.samples = 0
        self.states = StateManager(run)
        self._resources.callback(self.states.close)
        self.loader = self.states.loader = self._resources.enter_context(closing(run.build_loader()))
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
        return self.states.state

    def join_group(self, mesh: ParallelDims) -> None:
        """Take part in a world whose ranks all hold the state; all of them call this together.

        Raises:
            UserError: the strategy cannot work with so many processes, or the run directory is not writable.
            PeerLostError: a rank is gone.
        """
        run, progress, stack = self.run, self.state.progress, self._of_world
        self.mesh, self.world = mesh, mesh.world
        world = mesh.world
        world.progress_tracker.helpers = data_workers
        self.balancer = self._share()
        self._build_strategy()
        self.states.gather_positions(world)
        self.local_sgd = None
        if run.config.local_sgd_steps:
            self.local_sgd = LocalSGD(run, mesh, self.state, self.balancer.work_split)
            stack.enter_context(closing(self.local_sgd))
        self.sdc = None
        if run.config.sdc_check_every:
            self.sdc = stack.enter_context(closing(SDCChecker(run, world, self.state)))
        stack.callback(lambda: self.strategy.close())
        stack.callback(lambda: self.strategy.rollback())
        self.monitor = stack.enter_context(run.build_monitor(world, progress.step))
        stack.callback(self._keep_phases)
        self.checkpoint_manager = stack.enter_context(
            CheckpointManager(
                run,
                world,
                progress,
                self.states.recent,
                self.checkpointer,
                copies=self._member is not None and not self.states.in_step,
            )
        )
        self.profiler = run.build_profiler(self.monitor, progress.step)
        if self.profiler is not None:
            stack.enter_context(closing(self.profiler))
        self.runner = MicrobatchRunner(run, self.state, world.progress_tracker, self.monitor.timer)
        self.strategy.module.train()
        self.monitor.timer.mark("other")
        self.balancer.watch(self.monitor.timer, run.device, progress.step)
        stack.callback(self._keep_speed)
        self.state.callback.attach(self._group(), step=progress.step, epoch=progress.epoch)
        self._heartbeat()

    def _group(self) -> RankInfo:
        run, world = self.run, self.world
        return RankInfo(
            rank=world.rank,
            world_size=world.world_size,
            local_rank=world.local_rank,
            device=run.device,
            directory=run.directory.path,
            log_every=run.config.log_every,
            gather=world.all_gather_object,
        )

    def _share(self) -> LoadBalancer:
        """Share the micro-batches for the first time in this world; all ranks do so together."""
        run = self.run
        return LoadBalancer(
            self.mesh.data,
            run.num_microbatches,
            by_speed=run.balances_load,
            speed=self._speed,
            directory=run.directory,
            servers=run.config.num_servers(self.world.world_size),
        )

    def _build_strategy(self) -> None:
        self.strategy = self.run.build_strategy(self.state.module, self.mesh, self.balancer.work_split)
        left_out, self.state.pending_powersgd_state = self.state.pending_powersgd_state, None
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

    def leave_group(self) -> None:
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
        self._speed = self.balancer.speed

    def _rebalance(self) -> None:
        """Share the micro-batches as the balance says, between two steps; all ranks do so together."""
        self.states.gather_positions(self.world, self.strategy.microbatches)
        self.strategy.close()
        self._build_strategy()

    def _heartbeat(self) -> None:
        self.world.progress_tracker.step = self.state.progress.step
        if self._member is not None:
            self._member.pulse.step = self.state.progress.step
            self._member.pulse.version = self.state.progress.version


# --- The loop, and what one step is ---


class Trainer(GroupContext):
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

    def __init__(self, run: RunContext, member: AgentClient | None = None) -> None:
        super().__init__(run, member)
        self.schedule = Schedule(run.config, run.data)
        self._dummy = DummyMicrobatch(run)
        self._overlap = StepOverlap(self.schedule)
        self._trial_scheduler = None
        if run.trial_scheduler is not None:
            self._trial_scheduler = self._resources.enter_context(closing(TrialSchedulerClient(run.trial_scheduler)))

    def fit(self) -> bool:
        """Train to the end, and save.

        Returns:
            Whether the end is reached; else the ranks left together, after a step, for another world.

        Raises:
            StopRequested: a signal or the end of --walltime asked for it; the state is saved.
            SilentDataCorruptionError, NondeterminismError: two ranks computed different gradients for a micro-batch.
            NonFiniteLossError: a loss or gradient was NaN or infinite; that step was not applied.
            CheckpointError: the last checkpoint could not be written.
            PeerLostError: a rank is gone; :meth:`detach` leaves the state of the last whole step.
        """
        # What a run owes after its last step, it owes also if that was in another world.
        if self._apply_due_transitions() or (
            self.state.progress.step and self.checkpoint_manager.is_due(self.state.progress)
        ):
            self._save()
        self.world.progress_tracker.begin("first step")
        while not self.schedule.finished(self.state.progress):
            began = time.monotonic()
            sums = self._run_interval()
            self.run.deadline.step_took(time.monotonic() - began)
            word = self._overlap.defer(control.merge(sums.rows))
            self.state.progress.epoch_ended = not word.more
            if word.stop:
                self._save_and_stop(word.stop)
            if word.reform:
                return False
            improved = self._apply_due_transitions()
            if improved or word.save or self.checkpoint_manager.is_due(self.state.progress):
                self._save()
            if self.profiler is not None:
                self.profiler.on_step_end(self.state.progress.step)
            if self.balancer.observe(control.speeds(sums.rows), self.state.progress.step):
                self._rebalance()
        self.state.callback.on_fit_end()
        self._save(last=True)
        return True

    def _run_interval(self) -> StepSums:
        """Steps until all ranks hold the same state again: one, unless they train apart."""
        while True:
            sums = self._step()
            if self.schedule.sync_schedule.is_sync_step(self.state.progress):
                return sums
            if self.profiler is not None:
                self.profiler.on_step_end(self.state.progress.step)

    def _step(self) -> StepSums:
        """Fetch, forward and backward, reduce, update, commit."""
        run, progress, strategy = self.run, self.state.progress, self.strategy
        mark, move = self.monitor.timer.mark, self.world.progress_tracker.move
        callback = self.state.callback
        if progress.step_in_epoch == 0:
            callback.on_epoch_begin(progress.epoch)
        callback.on_step_begin(progress.step, progress.step_in_epoch)
        move("data")
        microbatches = self._overlap.fetch(self.loader, strategy, progress)
        mark("data")

        strategy.begin_step([microbatch.index for microbatch in microbatches])
        self._overlap.begin_next(self.loader, strategy, progress, self.checkpoint_manager.is_due)
        if self.sdc is not None:
            self.sdc.begin_step(strategy)
            mark("other")
        self.balancer.begin()
        strategy.run_microbatches(microbatches, self.runner)
        self.balancer.end(len(microbatches))
        self._dummy.run(strategy, microbatches, progress.epoch)

        move("reduction")
        row = self._control_flags().row(self._status(), self.balancer.row(progress.step))
        sums = strategy.reduce(row)
        if self.local_sgd is not None:
            sums = self.local_sgd.synchronize_metadata(sums)
        mark("reduction")
        move("optimizer")
        if not sums.finite and not self._overflowed(sums):
            scale = None if self.state.scaler is None else self.state.scaler.get_scale()
            raise NonFiniteLossError(describe_non_finite(run.directory, progress, run.data.order, sums, scale))

        logged = callback.on_gradients_reduced(due=self.monitor.is_due(progress.step + 1))
        with self.states.mutating():
            self._update(finite=sums.finite)
            mark("optimizer")
            return self._commit(sums, row, logged)

    def _overflowed(self, sums: StepSums) -> bool:
        """Whether gradients are no error: a scaler then skips the step, and tries a smaller scale."""
        if self.state.scaler is None or sums.bad_microbatch is not None or not math.isfinite(sums.loss):
            return False
        return self.state.scaler.get_scale() > LEAST_SCALE

    def _update(self, *, finite: bool = True) -> None:
        """Apply the gradients, where those of all ranks are finite."""
        clip_norm = self.run.config.clip_norm
        clip = None if clip_norm is None else partial(self.states.clip_gradients, clip_norm)
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
        self._heartbeat()
        if self.local_sgd is None:
            self.checkpoint_manager.record_step(progress, epoch, step_in_epoch, sums, self.balancer.work_split)
        else:
            sums = self._sync_replicas(epoch, step_in_epoch, sums, row)
        rows = partial(control.statuses, sums.rows)
        self.state.callback.on_step_end(progress.step, sums.loss)
        self.monitor.on_step_end(progress.step, epoch, sums.samples, sums.loss, self.state.learning_rates, rows, logged)
        self.monitor.timer.mark("other")
        self.world.progress_tracker.end()
        return sums

    def _sync_replicas(self, epoch: int, step_in_epoch: int, sums: StepSums, row: Sequence[float]) -> StepSums:
        """At a round's end have all ranks hold one state, and enter the round into the ledger."""
        assert self.local_sgd is not None
        self.world.progress_tracker.move("reduction")
        done, rows = self.local_sgd.on_step_end(epoch, step_in_epoch, sums, row)
        for record in done:
            self.checkpoint_manager.record_step(
                record.progress, record.epoch, record.step_in_epoch, record.sums, self.balancer.work_split
            )
        self.monitor.timer.mark("reduction")
        return dataclasses.replace(sums, rows=rows)

    def _apply_due_transitions(self) -> bool:
        """Make the transitions that are due after a step; return whether the model became the best.

        They depend on nothing but the state: a run that was stopped right after a step still owes
        them, and makes them when it is resumed.
        """
        progress = self.state.progress
        if self.schedule.epoch_ends(progress):
            with self.states.mutating():
                progress.epoch += 1
                progress.step_in_epoch = 0
                progress.epoch_ended = False
                progress.version += 1
                if not self._evaluation_is_due():
                    self._conclude_epoch()
            self.checkpoint_manager.flush_ledger()
        return self._evaluate() if self._evaluation_is_due() else False

    def _evaluation_is_due(self) -> bool:
        return self.validation.exists and self.schedule.evaluation_is_due(self.state.progress)

    def _conclude_epoch(self) -> None:
        """Tell the task of an epoch's end, once: within the last transition that the end brings about."""
        callback, progress = self.state.callback, self.state.progress
        if progress.epochs_concluded < progress.epoch:
            callback.on_epoch_end(progress.epoch - 1)
            progress.epochs_concluded = progress.epoch
        progress.stopped_early = progress.stopped_early or callback.should_stop

    def _evaluate(self) -> bool:
        self.world.progress_tracker.begin("evaluation")
        try:
            metrics = self.validation.measure(
                self.mesh, self.state, self.monitor, self.stop_reason, in_step=self.states.in_step
            )
        except EvaluationStopped as stopped:
            # It changed nothing, and is made again when the run goes on.
            self._save_and_stop(stopped.stop)
        with self.states.mutating():
            improved = self.validation.apply(metrics, self.state, self.monitor)
            self._conclude_epoch()
        if self._trial_scheduler is not None and not self._should_continue(self._trial_scheduler):
            self._save_and_stop(control.TRIAL_SCHEDULER)
        self.monitor.timer.mark("evaluation")
        self.world.progress_tracker.end()
        return improved

    def _should_continue(self, referee: TrialSchedulerClient) -> bool:
        """Whether the run is to go on after the evaluation that was just applied."""
        progress, world = self.state.progress, self.world
        finished = self.schedule.finished(progress)
        answer = False
        if world.rank == 0:
            answer = referee.should_continue(
                step=progress.step, epoch=progress.epoch, metrics=self.validation.metrics, finished=finished
            )
        return bool(world.broadcast_object(answer)) or finished

    def _control_flags(self) -> control.ControlFlags:
        more = not (isinstance(self.loader, StreamLoader) and self.loader.exhausted(self.strategy.microbatches))
        deadline = self.run.deadline
        evaluates = deadline.is_set and self.schedule.evaluation_follows(self.state.progress, more=more)
        return control.ControlFlags(
            stop=self.stop_reason(evaluates=evaluates),
            save=self.checkpoint_manager.is_due_by_clock(),
            more=more,
            reform=self._member is not None and self._member.should_reform(self.world.generation),
            **({} if self.sdc is None else self.sdc.fingerprints),
        )

    def _status(self) -> Sequence[float] | None:
        step = self.state.progress.step + 1
        # Where steps overlap, the rows that come with a step are those of the one before.
        due = self.monitor.is_due(step) or (self.strategy.overlaps_steps and self.monitor.is_due(step + 1))
        return self.monitor.status(step) if due else None

    def stop_reason(self, *, evaluates: bool = False) -> int:
        """What asks for a stop, as in the control word.

        Args:
            evaluates: an evaluation would come before the next such question.
        """
        due = self.world.rank == 0 and self.run.deadline.is_due(
            save_s=self.checkpoint_manager.save_s, evaluates=evaluates and self.validation.exists
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
        stop_all_ranks(self.run, self.world, stop, step=self.state.progress.step, idle=not self.samples)

    def _full_state_dict(self) -> dict[str, Any]:
        """What is to be saved, on rank 0; all ranks call this together."""
        state = self.states.full_state_dict(self.world)
        if (powersgd := self._powersgd) is not None:
            state["powersgd"] = powersgd.gather_state()
        return state

    @property
    def extra_results(self) -> dict[str, Any]:
        """What the run found out, besides, for ``result.json``."""
        return {}

    def _save(self, *, last: bool = False) -> None:
        self.world.progress_tracker.begin("checkpoint")
        state = self._full_state_dict()
        # Who dies later takes its positions along: others then read its micro-batches on from these.
        streams = self.states.gather_positions(self.world, self.strategy.microbatches)
        if streams is not None:
            state["streams"] = streams
        self.checkpoint_manager.save(state, self.state.progress, last=last)
        self.monitor.timer.mark("checkpoint")
        self.world.progress_tracker.end()
