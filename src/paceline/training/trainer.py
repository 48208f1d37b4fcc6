"""The loop, and what one step is."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.data.ledger import LedgerEntry
from paceline.data.stream import StreamLoader
from paceline.data.workers import data_workers
from paceline.distributed.process import describe_stop
from paceline.distributed.reducer import StepSums
from paceline.distributed.shares import Speed
from paceline.distributed.world import World
from paceline.errors import ConfigError, NonFiniteLossError, PeerLostError, StopRequested
from paceline.membership.member import Member
from paceline.monitoring.monitor import Monitor
from paceline.monitoring.phases import PHASES
from paceline.strategies.base import Strategy
from paceline.training import control
from paceline.training.balance import ShareBalance
from paceline.training.checkpointing import open_checkpointer
from paceline.training.evaluation import EvaluationStopped, Evaluator
from paceline.training.judge import Judge
from paceline.training.non_finite import describe_non_finite
from paceline.training.randomness import seed_model
from paceline.training.run import Run
from paceline.training.saving import RECENT_STEPS, Saver
from paceline.training.schedule import Schedule
from paceline.training.state import TrainingState, built_model
from paceline.training.step import SpareBatch, shard_loss
from paceline.training.verification import Verifier, require_verifiable

if TYPE_CHECKING:
    from paceline.monitoring.profiler import StepProfiler


class Trainer:
    """Trains a run from where its state stands to its end; every rank has one and calls it alike.

    It is made alone; then it takes part in one world, or in one after another as ranks come and go:
    :meth:`attach`, :meth:`fit`, :meth:`detach`. What belongs to the run stays: the task's model and
    optimizers, the data, and the state. What belongs to a world is made anew.

    Use it as a context manager: what it opens is closed at exit.

    Attributes:
        run: what is trained.
        state: the model and all that changes with it.
        valid: whether ``state`` is whole, and so is what its version says.
        recent: the last steps' ledger entries.
        samples: of the steps that this process took part in.
        checkpointer: writes its checkpoints, in whichever world it is rank 0.
        world: the ranks; from :meth:`attach` on, like ``balance``, ``strategy``, ``verifier``,
            ``monitor``, ``saver``, ``profiler``.

    Args:
        run: what is trained.
        member: what tells of other ranks' coming and going; None where the world is to stay.

    Raises:
        UserError: the task's model, optimizers or data cannot be built.
    """

    world: World
    balance: ShareBalance
    strategy: Strategy
    monitor: Monitor
    saver: Saver
    profiler: StepProfiler | None
    verifier: Verifier | None

    def __init__(self, run: Run, member: Member | None = None) -> None:
        require_verifiable(run)
        self.run = run
        self._member = member
        self._resources = ExitStack()
        self._of_world = ExitStack()
        self._earlier_phases = dict.fromkeys(PHASES, 0.0)
        self._speed: Speed | None = None
        self.samples = 0
        self.recent: deque[LedgerEntry] = deque(maxlen=RECENT_STEPS)
        self.state = self._new_state()
        self.valid, self._pristine = False, True
        self.loader = self._resources.enter_context(closing(run.build_loader()))
        self.evaluator = run.build_evaluator("val")
        if self.evaluator is not None:
            self._resources.enter_context(closing(self.evaluator))
        self.judge = Judge(run.config)
        self.checkpointer = self._resources.enter_context(open_checkpointer(run))
        self.schedule = Schedule(run.config, run.data)
        self._spare = SpareBatch(run)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._of_world.__exit__(*error)
        finally:
            self._resources.__exit__(*error)

    def _new_state(self) -> TrainingState:
        run = self.run
        seed_model(run.config.seed)
        module = built_model(run.task).to(run.device)
        return TrainingState(run.task, run.config, module, run.device, run.data.total_steps)

    def restore(self, world: World, saved: Mapping[str, Any] | None) -> None:
        """Begin, or go on from a checkpoint; all ranks do so together.

        Args:
            world: the ranks.
            saved: the state of the checkpoint, the same on all ranks; None to begin.

        Raises:
            CheckpointError: ``saved`` does not fit the task.
            PeerLostError: a rank is gone.
        """
        self.valid = False
        self.recent.clear()
        if not self._pristine:
            self.state = self._new_state()
        if saved is not None:
            self.take(saved)
            return
        # A model may be built with randomness that no seed of torch's reaches.
        world.broadcast_module(self.state.module)
        if self.state.ema is not None:
            world.broadcast_module(self.state.ema)
        self.valid, self._pristine = True, False

    def take(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that a checkpoint or another rank gave.

        Raises:
            CheckpointError: it does not fit the task.
        """
        self.valid, self._pristine = False, False
        self.state.load_state_dict(state)
        if isinstance(self.loader, StreamLoader) and "streams" in state:
            self.loader.load_state_dict(state["streams"])
        if "recent" in state:
            self.recent.clear()
            self.recent.extend(LedgerEntry(*entry) for entry in state["recent"])
        self.valid = True

    def state_to_give(self) -> dict[str, Any]:
        """The state for a rank that lacks it: what :meth:`take` takes."""
        state = {**self.state.state_dict(), "recent": [list(entry) for entry in self.recent]}
        if isinstance(self.loader, StreamLoader):
            epoch, step = self.state.progress.epoch, self.state.progress.step_in_epoch
            state["streams"] = self.loader.positions(epoch, step, range(self.run.num_shards))
        return state

    def attach(self, world: World) -> None:
        """Take part in a world whose ranks all hold the state; all of them call this together.

        Raises:
            UserError: the strategy cannot work with so many processes, or the run directory is not writable.
            PeerLostError: a rank is gone.
        """
        run, progress, stack = self.run, self.state.progress, self._of_world
        self.world = world
        world.activity.helpers = data_workers
        self.balance = ShareBalance(
            world,
            run.num_shards,
            by_speed=run.config.balance == "auto" and run.config.reduction != "torch",
            speed=self._speed,
            directory=run.directory,
        )
        self._build_strategy()
        if isinstance(self.loader, StreamLoader):
            self._gather_positions(self.loader, self.loader.reading)
        self.verifier = None
        if run.config.verify_every:
            self.verifier = stack.enter_context(closing(Verifier(run, world, self.state)))
        stack.callback(lambda: self.strategy.close())
        stack.callback(lambda: self.strategy.abandon())
        self.monitor = stack.enter_context(run.build_monitor(world, progress.step))
        stack.callback(self._keep_phases)
        self.saver = stack.enter_context(
            Saver(run, world, progress, self.recent, self.checkpointer, copies=self._member is not None)
        )
        self.profiler = run.build_profiler(self.monitor, progress.step)
        if self.profiler is not None:
            stack.enter_context(closing(self.profiler))
        self.strategy.module.train()
        self.monitor.timer.mark("other")
        self.balance.watch(self.monitor.timer, run.device, progress.step)
        stack.callback(self._keep_speed)
        self._beat()

    def _build_strategy(self) -> None:
        self.strategy = self.run.build_strategy(self.state.module, self.world, self.balance.shares)

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
            sums = self._step()
            self.run.deadline.step_took(time.monotonic() - began)
            word = control.merge(sums.rows)
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
        self._save(last=True)
        return True

    def _step(self) -> StepSums:
        """Fetch, forward and backward, reduce, update, commit."""
        run, progress, strategy = self.run, self.state.progress, self.strategy
        mark, move = self.monitor.timer.mark, self.world.activity.move
        move("data")
        microbatches = self.loader.fetch(progress.epoch, progress.step_in_epoch, strategy.shards)
        mark("data")

        strategy.begin_step([microbatch.shard for microbatch in microbatches])
        if self.verifier is not None:
            self.verifier.begin_step(strategy)
            mark("other")
        self.balance.begin()
        for microbatch in microbatches:
            move("forward")
            strategy.begin_shard()
            loss = shard_loss(run, strategy.model, progress.step, microbatch)
            mark("forward")
            move("backward")
            strategy.backward(self.state.scaled(loss.sum))
            strategy.end_shard(microbatch.num_samples, loss.weight, loss.sum, microbatch.checksum)
            mark("backward")
        self.balance.end(len(microbatches))
        if strategy.needs_backward:
            self._spare.take_part(strategy, microbatches, progress.epoch)

        move("reduction")
        sums = strategy.finish_step(self._control().row(self._status(), self.balance.row(progress.step)))
        mark("reduction")
        move("optimizer")
        # Overflowed gradients are no error where a scaler then skips the step and tries a smaller scale.
        overflowed = self.state.scaler is not None and sums.bad_shard is None and math.isfinite(sums.loss)
        if not sums.finite and not overflowed:
            raise NonFiniteLossError(describe_non_finite(run.directory, progress, run.data.order, sums))

        self.valid = False
        self.state.update(run.config.clip_norm)
        mark("optimizer")
        self._commit(sums)
        self.valid = True
        return sums

    def _commit(self, sums: StepSums) -> None:
        """Make the step count: one transition of the state, one ledger entry, one report."""
        progress = self.state.progress
        epoch, step_in_epoch = progress.epoch, progress.step_in_epoch
        progress.version += 1
        progress.step += 1
        progress.step_in_epoch += 1
        progress.samples += sums.samples
        self.samples += sums.samples
        self._beat()
        self.saver.record_step(progress, epoch, step_in_epoch, sums, self.balance.shares)
        rows = partial(control.statuses, sums.rows)
        self.monitor.step_done(progress.step, epoch, sums.samples, sums.loss, self.state.learning_rates, rows)
        self.monitor.timer.mark("other")
        self.world.activity.end()

    def _beat(self) -> None:
        self.world.activity.step = self.state.progress.step
        if self._member is not None:
            self._member.pulse.step = self.state.progress.step
            self._member.pulse.version = self.state.progress.version

    def _settle(self) -> bool:
        """Make the transitions that are due after a step; return whether the model became the best.

        They depend on nothing but the state: a run that was stopped right after a step still owes
        them, and makes them when it is resumed.
        """
        progress = self.state.progress
        if self.schedule.epoch_ends(progress):
            progress.epoch += 1
            progress.step_in_epoch = 0
            progress.epoch_ended = False
            progress.version += 1
            self.saver.flush_ledger()
        if self.evaluator is None or not self.schedule.evaluation_is_due(progress):
            return False
        return self._evaluate(self.evaluator)

    def _evaluate(self, evaluator: Evaluator) -> bool:
        progress = self.state.progress
        self.world.activity.begin("evaluation")
        self.monitor.activity("evaluating val")
        began = time.monotonic()
        try:
            metrics = evaluator.run(self.world, self.state.evaluated_module, self.stop_asked)
        except EvaluationStopped as stopped:
            # It changed nothing, and is made again when the run goes on.
            self._save_and_stop(stopped.stop)
        finally:
            self.run.deadline.evaluation_took(time.monotonic() - began)
        progress.evaluated_step = progress.step
        progress.version += 1
        improved = self.judge.apply(metrics, progress)
        self.state.step_plateaus(self.judge.value(metrics))
        epoch = progress.epoch - 1 if progress.step_in_epoch == 0 else progress.epoch
        self.monitor.evaluated("val", progress.step, epoch, metrics)
        self.monitor.timer.mark("evaluation")
        self.world.activity.end()
        return improved

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
        return self.monitor.status(step) if self.monitor.is_due(step) else None

    def stop_asked(self, *, evaluates: bool = False) -> int:
        """What asks for a stop, as in the control word.

        Args:
            evaluates: an evaluation would come before the next such question.
        """
        due = self.world.rank == 0 and self.run.deadline.is_due(
            save_s=self.saver.save_s, evaluates=evaluates and self.evaluator is not None
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
        run, step = self.run, self.state.progress.step
        if stop == control.WALLTIME and self.world.broadcast_json(not self.samples):
            raise ConfigError(
                f"--walltime {run.config.walltime} is over before an evaluation after step {step} is done, "
                "and it would be so again. Give more time, or evaluate less data."
            )
        stopped = {"cause": control.cause(stop), "step": step}
        if self.world.rank == 0:
            run.directory.append_event("stopped", **stopped)
        # Whoever leaves breaks the others' connections, so nobody does before the state is safe.
        with suppress(PeerLostError) if self.world.rank == 0 else nullcontext():
            self.world.barrier()
        raise StopRequested(describe_stop(stopped, run.directory), exit_code=control.exit_code(stop))

    def _share_anew(self) -> None:
        """Share the shards as the balance says, between two steps; all ranks do so together."""
        if isinstance(self.loader, StreamLoader):
            self._gather_positions(self.loader, self.strategy.shards)
        self.strategy.close()
        self._build_strategy()

    def _gather_positions(self, loader: StreamLoader, shards: Iterable[int]) -> dict[str, Any]:
        """Where the streams of each rank's ``shards`` stand; all ranks know it from then on."""
        progress = self.state.progress
        furthest: dict[str, Any] = {}
        mine = loader.positions(progress.epoch, progress.step_in_epoch, shards)
        for of_rank in self.world.all_gather_json(mine):
            for shard, position in of_rank.items():
                if shard not in furthest or furthest[shard]["step"] < position["step"]:
                    furthest[shard] = position
        loader.add_positions(furthest)
        return furthest

    def _save(self, *, last: bool = False) -> None:
        self.world.activity.begin("checkpoint")
        state = self.state.state_dict()
        if isinstance(self.loader, StreamLoader):
            # Who dies later takes its positions along: others then read its shards on from these.
            state["streams"] = self._gather_positions(self.loader, self.strategy.shards)
        self.saver.save(state, self.state.progress, last=last)
        self.monitor.timer.mark("checkpoint")
        self.world.activity.end()
