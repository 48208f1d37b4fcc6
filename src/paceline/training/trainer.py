"""The loop: step, evaluate, save, until the run is finished or must stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from functools import cached_property
from typing import Any, NoReturn, Self

import torch

from paceline.core.built_in import PARTS
from paceline.core.errors import (
    ConfigError,
    DataError,
    NonFiniteLossError,
    PacelineError,
    PeerLostError,
    StopRequested,
    TaskError,
)
from paceline.core.plugins import import_object
from paceline.core.task import Callback
from paceline.data.stream import StreamLoader
from paceline.elastic.worker_channel import AgentClient
from paceline.parallel.strategy_selection import strategy_name
from paceline.parallel.world import ParallelDims, World
from paceline.runs.code_record import CodeRecorder
from paceline.runs.failures import describe_stop
from paceline.training import control
from paceline.training.checkpoint_manager import open_checkpointer
from paceline.training.control import ControlFlags, StopCause
from paceline.training.evaluation import EvaluationStopped, Validation
from paceline.training.group_context import Carryover, Engine, GroupContext, OpenStep
from paceline.training.reproducibility import seed_transition
from paceline.training.run_context import RunContext
from paceline.training.state import TrainingState
from paceline.training.state_manager import StateManager
from paceline.training.step import SyncStep, overrides_train_step, require_train_step_support

# --- The step, computed by all ranks together ---


class SyncEngine(Engine):
    """All ranks compute each step together, and every one applies it.

    Args:
        update: applies the gradients if those of all ranks are finite; by default to the whole state.
    """

    def __init__(
        self, run: RunContext, states: StateManager, world: World, update: Callable[[bool], None] | None = None
    ) -> None:
        super().__init__(run, states, world)
        self._update = update
        self._composed_step = import_object(PARTS["train_step"]) if overrides_train_step(run.task) else None
        self._keeps_copies = True

    def steps(self, group: GroupContext) -> Generator[SyncStep, None, ControlFlags]:
        """Open one step, or those up to the next synchronization; commit each when the next thing is asked for."""
        began = time.monotonic()
        progress = self._states.state.progress
        while True:
            step = self._open(group)
            yield step
            with self._states.mutating():
                sums = step.commit()
            # A copy is of use only if a pass can fail after a change; steps of a task are alike.
            self._keeps_copies = step.changed_before_pass
            if self._run.schedule.sync_schedule.is_sync_step(progress):
                break
            group.on_step_end()
        self._run.deadline.step_took(time.monotonic() - began)
        flags = control.merge(sums.rows)
        for hook in group.hooks:
            flags = hook.filter_request(flags)
        progress.epoch_ended = not flags.has_next_batch
        return flags

    def _open(self, group: GroupContext) -> SyncStep:
        if self._composed_step is not None:
            step: SyncStep = self._composed_step(self._run, self._states, group, keeps_copy=self._keeps_copies)
            return step
        return SyncStep(self._run, self._states, group, self._update)

    def end_interval(self, group: GroupContext) -> None:
        """End the step for the hooks."""
        group.on_step_end()


# --- The loop ---

_MAY_CHANGE_THE_STATE = ("on_epoch_begin", "on_step_begin", "state_dict")


class Trainer:
    """Trains a run from the position of its state to its end; all ranks make the same calls.

    The trainer owns the objects of the run: the task's model and optimizers, the data, the state. A
    :class:`GroupContext` owns the objects of one group of ranks; as ranks join and leave, one group follows another:
    :meth:`join_group`, :meth:`steps`, :meth:`leave_group`. The trainer is a context manager, which closes what it
    opened.

    Attributes:
        checkpointer: writes checkpoints in the background while this rank is rank 0 of a group.
        carryover: values that this process takes from one group into the next, in addition to the state.

    Args:
        engine: computes and applies the steps.
        agent: the client of the agent; None if the group is fixed.

    Raises:
        UserError: the task's model, optimizers or data cannot be built, or the engine cannot train them.
    """

    def __init__(self, run: RunContext, engine: type[Engine], agent: AgentClient | None = None) -> None:
        require_train_step_support(run)
        self.run = run
        self._engine = engine
        self._agent = agent
        self._group: GroupContext | None = None
        self.carryover = Carryover()
        with ExitStack() as stack:
            for hook in run.hooks:
                stack.callback(hook.close)
                hook.validate()
            loader = stack.enter_context(closing(run.build_loader()))
            self.checkpointer = stack.enter_context(open_checkpointer(run))
            self.states = stack.enter_context(closing(StateManager(run, loader, self._await_readers)))
            self.code = stack.enter_context(closing(CodeRecorder()))
            engine.validate(run, self.states)
            self._resources = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self.leave_group()
        finally:
            self._resources.__exit__(*error)

    @property
    def state(self) -> TrainingState:
        """The model and all that changes with it."""
        return self.states.state

    @cached_property
    def validation(self) -> Validation:
        """The evaluations during training, built late because the task may need its model for them."""
        evaluator = self.run.build_evaluator("val")
        return self._resources.enter_context(closing(Validation(evaluator, self.run.config, self.run.deadline)))

    def rehearse_evaluation(self, mesh: ParallelDims) -> None:
        """Evaluate a batch of a new run; all ranks call this together.

        A mistake in the evaluation would otherwise be found after the first epoch. Nothing changes, not even if the
        task's metrics change buffers.

        Raises:
            UserError: the split is empty, the task's metrics are wrong or change buffers, or an option names another
                metric.
            PeerLostError: a rank is gone.
        """
        if not self.validation.exists:
            return
        module = self.state.evaluated_module
        before = [buffer.clone() for buffer in module.buffers()]
        with self.run.watch_evaluation(module):
            self.validation.rehearse(mesh, self.state, is_collective=self.states.is_collective)
        with torch.no_grad():
            for buffer, value in zip(module.buffers(), before, strict=True):
                buffer.copy_(value)

    def join_group(self, mesh: ParallelDims) -> GroupContext:
        """Enter a group whose ranks all hold the state; all of them call this together.

        Raises:
            UserError: the strategy cannot work with so many processes, or the run directory is not writable.
            PeerLostError: a rank is gone.
        """
        self._group = GroupContext(
            self.run,
            self.states,
            mesh,
            self._engine,
            checkpointer=self.checkpointer,
            carryover=self.carryover,
            agent=self._agent,
        )
        return self._group

    def leave_group(self) -> None:
        """Leave the group, if this rank is in one: the state is that of the last complete step.

        A save in the background continues.
        """
        group, self._group = self._group, None
        if group is not None:
            group.close()
            self.states.undo_step()

    def _await_readers(self) -> None:
        """Wait until no save reads the state; a slow disk counts as a checkpoint, not as a slow step."""
        if self._group is None:
            return self.checkpointer.wait_for_tensors()
        with self._group.world.progress_tracker.in_stage("checkpoint"):
            self.checkpointer.wait_for_tensors()

    def steps(self, group: GroupContext) -> Iterator[OpenStep]:
        """Yield the steps that are left, each for the caller to compute; commits, saves and stops happen in between.

        It ends when the run does, or, without :attr:`finished`, where the ranks leave together for another group.

        Raises:
            StopRequested: a signal or the end of --walltime requested it; the state is saved.
            SilentDataCorruptionError, NondeterminismError: two ranks computed different gradients for a micro-batch.
            NonFiniteLossError: a loss or gradient was NaN or infinite; that step was not applied.
            CheckpointError: the last checkpoint could not be written.
            PeerLostError: a rank is gone; :meth:`leave_group` leaves the state of the last complete step.
        """
        if self.states.is_collective and not self.state.progress.version:
            self.rehearse_evaluation(group.mesh)  # before there is a group, its ranks could not evaluate
        # The actions that are due after the last step are due also if that step was in another group.
        if self._apply_due_transitions(group) or (
            self.state.progress.step and group.checkpoint_manager.is_due(self.state.progress)
        ):
            self._save(group)
        group.world.progress_tracker.begin("first step")
        while not self.finished:
            flags = yield from group.engine.steps(group)
            if flags.stop:
                self._save_and_stop(group, flags.stop)
            if flags.reform:
                return
            improved = self._apply_due_transitions(group)
            if improved or flags.save or group.checkpoint_manager.is_due(self.state.progress):
                self._save(group)
            group.engine.end_interval(group)
        self.state.callback.on_fit_end()
        self._save(group, last=True)

    @property
    def finished(self) -> bool:
        """Whether no step is left."""
        return self.run.schedule.finished(self.state.progress)

    def _apply_due_transitions(self, group: GroupContext) -> bool:
        """Make the transitions that are due after a step; return whether the model became the best.

        They depend on the state alone: a run that was stopped right after a step makes them when it is resumed.
        """
        progress = self.state.progress
        if self.run.schedule.epoch_ends(progress):
            with self.states.mutating():
                progress.epoch += 1
                progress.step_in_epoch = 0
                progress.epoch_ended = False
                progress.version += 1
                seed_transition(self.run.config.training.seed, progress.version)
                if not self._evaluation_is_due():
                    self._conclude_epoch()
            group.checkpoint_manager.flush_ledger()
        return self._evaluate(group) if self._evaluation_is_due() else False

    def _evaluation_is_due(self) -> bool:
        progress = self.state.progress
        return bool(progress.measured) or (self.validation.exists and self.run.schedule.evaluation_is_due(progress))

    def _conclude_epoch(self) -> None:
        """Call the task's ``on_epoch_end``, once: within the last transition of the epoch's end."""
        callback, progress = self.state.callback, self.state.progress
        if progress.epochs_concluded < progress.epoch:
            callback.on_epoch_end(progress.epoch - 1)
            progress.epochs_concluded = progress.epoch
        progress.stopped_early = progress.stopped_early or callback.should_stop

    def _evaluate(self, group: GroupContext) -> bool:
        group.world.progress_tracker.begin("evaluation")
        group.check_state()
        try:
            with self.run.watch_evaluation(self.state.evaluated_module):
                metrics = self.state.progress.measured or self.validation.measure(
                    group.mesh, self.state, group.monitor, group.stop_reason, is_collective=self.states.is_collective
                )
        except EvaluationStopped as stopped:
            # It changed nothing, and the resumed run repeats it.
            self._save_and_stop(group, stopped.cause)
        with self.states.mutating():
            seed_transition(self.run.config.training.seed, self.state.progress.version + 1)
            improved = self.validation.apply(metrics, self.state, group.monitor)
            self._conclude_epoch()
        for hook in self.run.hooks:
            if cause := hook.after_evaluation(self, group):
                self._save_and_stop(group, cause)
        group.monitor.timer.mark("evaluation")
        group.world.progress_tracker.end()
        return improved

    def _save(self, group: GroupContext, *, last: bool = False) -> None:
        group.world.progress_tracker.begin("checkpoint")
        group.check_state()
        state = group.full_state_dict()
        # A rank that dies later takes its positions along: others then read its micro-batches on from these.
        streams = self.states.gather_positions(group.world, group.strategy.microbatches)
        if streams is not None:
            state["streams"] = streams
        group.checkpoint_manager.save(state, self.state.progress, last=last)
        group.monitor.timer.mark("checkpoint")
        group.world.progress_tracker.end()

    @contextmanager
    def saving_before_errors(self, group: GroupContext) -> Iterator[None]:
        """Save the steps before an error of the task or its data, if this is rank 0 and has their whole state."""
        try:
            yield
        except Exception as error:
            is_theirs = isinstance(error, TaskError | DataError | NonFiniteLossError)
            if (is_theirs or not isinstance(error, PacelineError)) and self._has_whole_state(group):
                # The user reads the first error alone; after it a GPU may be out of order.
                with suppress(Exception), group.world.progress_tracker.in_stage("checkpoint"):
                    group.strategy.rollback()
                    group.checkpoint_manager.save(group.full_state_dict(), self.state.progress, last=True)
            raise

    def _has_whole_state(self, group: GroupContext) -> bool:
        """Whether this is rank 0 and holds, without the other ranks, the state after the last step."""
        config, world = self.run.config, group.world
        if world.rank != 0 or not self.states.valid or isinstance(self.states.loader, StreamLoader):
            return False  # the other ranks have a stream's positions
        callback = type(self.state.callback)
        changes = any(getattr(callback, name) is not getattr(Callback, name) for name in _MAY_CHANGE_THE_STATE)
        if world.progress_tracker.stage != "evaluation" and (changes or overrides_train_step(self.run.task)):
            return False  # the step that failed may have changed the state of the task or of its callback
        return strategy_name(config, world.world_size) in ("single", "ddp") and not config.changes.own_state

    def _save_and_stop(self, group: GroupContext, cause: StopCause) -> NoReturn:
        # If a rank is lost now, those that continue without it still know that they must stop.
        self.run.signals.received = self.run.signals.received or cause
        self._save(group, last=True)
        self.stop(group, cause)

    def stop(self, group: GroupContext, cause: StopCause) -> NoReturn:
        """Leave, once the state is saved; all ranks do so together.

        Raises:
            StopRequested: always, but for the next case.
            ConfigError: ``--walltime`` was over before a single step was done, and would be so again.
        """
        run, world, step = self.run, group.world, self.state.progress.step
        if cause is StopCause.WALLTIME and world.broadcast_object(not self.carryover.samples):
            raise ConfigError(
                f"--walltime {run.config.values['walltime']} is over before an evaluation after step {step} is done, "
                "and it would be so again. Give more time, or evaluate less data."
            )
        stopped = {"cause": cause.description, "step": step}
        if world.rank == 0:
            run.directory.append_event("stopped", **stopped)
        # A rank that leaves breaks the others' connections, so none does before the state is safe.
        with suppress(PeerLostError) if world.rank == 0 else nullcontext():
            world.barrier()
        raise StopRequested(describe_stop(stopped, run.directory), exit_code=cause.exit_code)
