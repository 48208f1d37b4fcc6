"""The loop, and what one step is."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from paceline.data.stream import StreamLoader
from paceline.distributed.reducer import StepSums
from paceline.errors import NonFiniteLossError
from paceline.membership.member import Member
from paceline.training import control
from paceline.training.evaluation import EvaluationStopped
from paceline.training.non_finite import describe_non_finite
from paceline.training.participant import Participant
from paceline.training.run import Run
from paceline.training.schedule import Schedule
from paceline.training.step import SpareBatch, shard_loss
from paceline.training.stopping import leave


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

        self.replica.valid = False
        self.state.update(run.config.clip_norm)
        mark("optimizer")
        self._commit(sums)
        self.replica.valid = True
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
        if not self.validation.exists or not self.schedule.evaluation_is_due(progress):
            return False
        return self._evaluate()

    def _evaluate(self) -> bool:
        self.world.activity.begin("evaluation")
        try:
            improved = self.validation.run(self.world, self.state, self.monitor, self.stop_asked)
        except EvaluationStopped as stopped:
            # It changed nothing, and is made again when the run goes on.
            self._save_and_stop(stopped.stop)
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

    def _save(self, *, last: bool = False) -> None:
        self.world.activity.begin("checkpoint")
        state = self.state.state_dict()
        # Who dies later takes its positions along: others then read its shards on from these.
        streams = self.replica.gather_positions(self.world, self.strategy.shards)
        if streams is not None:
            state["streams"] = streams
        self.saver.save(state, self.state.progress, last=last)
        self.monitor.timer.mark("checkpoint")
        self.world.activity.end()
