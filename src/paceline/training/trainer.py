"""The loop, and what one step is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from paceline.config import Interval, parse_interval
from paceline.data.stream import StreamLoader
from paceline.distributed.reducer import StepSums
from paceline.errors import NonFiniteLossError, StopRequested, TaskError
from paceline.monitoring.monitor import Monitor
from paceline.strategies.base import Strategy, StrategyOptions
from paceline.strategies.selection import build_strategy
from paceline.task import Task
from paceline.training import control
from paceline.training.evaluation import Evaluator, as_loss
from paceline.training.judge import Judge
from paceline.training.randomness import seed_model, seed_shard
from paceline.training.run import Run
from paceline.training.saving import Saver, is_due
from paceline.training.state import TrainingState

if TYPE_CHECKING:
    from paceline.monitoring.profiler import StepProfiler

_STEP_TIMEOUT_S = 1800.0


class Trainer:
    """Trains a run from where its state stands to its end; every rank has one and calls it alike.

    Use it as a context manager: what it opens is closed at exit.

    Raises:
        UserError: the task's model, optimizers or data cannot be built.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._resources = ExitStack()
        seed_model(run.config.seed)
        module = _built_model(run.task).to(run.world.device)
        options = StrategyOptions(
            num_shards=run.num_shards,
            kind="exact" if run.config.reduction == "exact" else "fast",
            row_length=control.ROW_LENGTH,
            timeout_s=_STEP_TIMEOUT_S,
            compile=run.config.compile,
            static_graph=run.task.static_graph,
        )
        self.strategy: Strategy = build_strategy(module, run.world, run.config, options)
        self._resources.callback(self.strategy.close)
        self.state = TrainingState(run.task, run.config, module, run.world.device, run.data.total_steps)
        self.loader = self._resources.enter_context(closing(run.build_loader()))
        self.evaluator = run.build_evaluator("val")
        if self.evaluator is not None:
            self._resources.enter_context(closing(self.evaluator))
        self.judge = Judge(run.config)
        self._spare_batch: Any = None
        self._evaluate_every = parse_interval(run.config.eval_every, "eval_every", allow_time=False)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: Any) -> None:
        self._resources.__exit__(*error)

    def fit(self, resumed: Mapping[str, Any] | None) -> None:
        """Train to the end, and save.

        Args:
            resumed: the state of the checkpoint to continue from; None to begin.

        Raises:
            StopRequested: a signal asked for it; the state is saved.
            NonFiniteLossError: a loss or gradient was NaN or infinite; that step was not applied.
            CheckpointError: a checkpoint could not be written, or ``resumed`` does not fit.
        """
        self._begin(resumed)
        if self._settle():
            self._save()
        while not self._finished():
            sums = self._step()
            word = control.merge(sums.rows)
            self.state.progress.epoch_ended = not word.more
            if word.stop:
                self._stop(word.stop)
            improved = self._settle()
            if improved or word.save or self.saver.is_due(self.state.progress):
                self._save()
            if self.profiler is not None:
                self.profiler.step_done(self.state.progress.step)
        self._save(synchronous=True)

    def _begin(self, resumed: Mapping[str, Any] | None) -> None:
        """Take over the resumed state, and open what is written while training."""
        run, progress = self.run, self.state.progress
        if resumed is not None:
            self.state.load_state_dict(resumed)
            progress = self.state.progress
            if isinstance(self.loader, StreamLoader):
                self.loader.load_state_dict(resumed["streams"])
        self.monitor = self._resources.enter_context(
            Monitor(
                run.directory,
                rank=run.world.rank,
                world_size=run.world.world_size,
                total_steps=run.data.total_steps,
                steps_per_epoch=run.data.steps_per_epoch,
                first_step=progress.step,
                log_every=run.config.log_every,
                quiet=run.quiet,
                device=run.world.device,
            )
        )
        self.saver = self._resources.enter_context(Saver(run, None if resumed is None else progress.version))
        self.profiler: StepProfiler | None = None
        if run.config.profile:
            from paceline.monitoring.profiler import profile_steps

            self.profiler = self._resources.enter_context(
                closing(
                    profile_steps(
                        run.directory, steps=run.config.profile, first=progress.step, monitor=self.monitor
                    )
                )
            )
        self.strategy.module.train()
        self.monitor.timer.mark("other")

    def _step(self) -> StepSums:
        """Fetch, forward and backward, reduce, update, commit."""
        run, progress, strategy = self.run, self.state.progress, self.strategy
        mark = self.monitor.timer.mark
        microbatches = self.loader.fetch(progress.epoch, progress.step_in_epoch, strategy.shards)
        mark("data")

        strategy.begin_step([microbatch.shard for microbatch in microbatches])
        for microbatch in microbatches:
            strategy.begin_shard()
            seed_shard(run.config.seed, progress.step, microbatch.shard)
            with run.autocast():
                loss = as_loss(
                    run.task, run.task.loss(strategy.model, microbatch.batch), microbatch.num_samples
                )
            if not loss.sum.requires_grad:
                raise TaskError(
                    f"{type(run.task).__name__}.loss does not depend on the model's parameters, so it has no "
                    "gradient. Do not detach it, and do not turn it into a number."
                )
            mark("forward")
            strategy.backward(self.state.scaled(loss.sum))
            strategy.end_shard(microbatch.num_samples, loss.weight, loss.sum, microbatch.checksum)
            mark("backward")
        if strategy.needs_backward:
            if microbatches:
                self._spare_batch = microbatches[-1].batch
            else:
                self._backward_of_nothing()

        sums = strategy.finish_step(self._control().row(self._status()))
        mark("reduction")
        self._refuse_non_finite(sums)

        self.state.update(run.config.clip_norm)
        mark("optimizer")
        self._commit(sums)
        return sums

    def _commit(self, sums: StepSums) -> None:
        """Make the step count: one transition of the state, one ledger entry, one report."""
        progress = self.state.progress
        epoch, step_in_epoch = progress.epoch, progress.step_in_epoch
        progress.version += 1
        progress.step += 1
        progress.step_in_epoch += 1
        progress.samples += sums.samples
        self.saver.record_step(progress, epoch, step_in_epoch, sums)
        rows = partial(control.statuses, sums.rows)
        self.monitor.step_done(progress.step, epoch, sums.samples, sums.loss, self.state.learning_rates, rows)
        self.monitor.timer.mark("other")

    def _settle(self) -> bool:
        """Make the transitions that are due after a step; return whether the model became the best.

        They depend on nothing but the state: a run that was stopped right after a step still owes
        them, and makes them when it is resumed.
        """
        progress = self.state.progress
        if self._epoch_ends():
            progress.epoch += 1
            progress.step_in_epoch = 0
            progress.epoch_ended = False
            progress.version += 1
            self.saver.flush_ledger()
        if self.evaluator is None or not self._evaluation_is_due():
            return False
        return self._evaluate(self.evaluator)

    def _evaluate(self, evaluator: Evaluator) -> bool:
        progress = self.state.progress
        self.monitor.activity("evaluating val")
        metrics = evaluator.run(self.state.evaluated_module)
        progress.evaluated_step = progress.step
        progress.version += 1
        improved = self.judge.apply(metrics, progress)
        self.state.step_plateaus(self.judge.value(metrics))
        epoch = progress.epoch - 1 if progress.step_in_epoch == 0 else progress.epoch
        self.monitor.evaluated("val", progress.step, epoch, metrics)
        self.monitor.timer.mark("evaluation")
        return improved

    def _refuse_non_finite(self, sums: StepSums) -> None:
        if sums.finite:
            return
        if self.state.scaler is not None and sums.bad_shard is None and math.isfinite(sums.loss):
            return  # overflowed gradients: the scaler skips this step and tries a smaller scale
        progress, order = self.state.progress, self.run.data.order
        step = (
            f"step {progress.step + 1} (epoch {progress.epoch + 1}, step {progress.step_in_epoch + 1} in it)"
        )
        if sums.weight == 0:
            what = f"the weights of the losses of {step} add up to nothing, so there is no mean"
        elif sums.bad_shard is None:
            what = f"the gradient of {step} is NaN or infinite, though its loss is {sums.loss:g}"
        else:
            what = f"the loss of {step} is NaN or infinite in shard {sums.bad_shard}"
            if order is not None:
                start, stop = order.shard_bounds(progress.step_in_epoch)[sums.bad_shard]
                numbers = order.indices(progress.epoch, start, stop).tolist()
                shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
                what += f", positions {start} to {stop - 1} of the epoch (samples {shown})"
        raise NonFiniteLossError(
            f"{what}. The step was not applied; checkpoints hold the state before it. "
            f"Mend the samples or the loss, then continue with: paceline resume {self.run.directory.path}. "
            "Or start a new run with a lower learning rate or with --clip-norm."
        )

    def _backward_of_nothing(self) -> None:
        """Run the backward that the other ranks wait for, weighing nothing, on data seen before."""
        if self._spare_batch is None:
            # Apart from the loader, whose streams must stay where they are.
            with closing(self.run.build_loader()) as loader:
                first = loader.fetch(self.state.progress.epoch, 0, range(self.run.num_shards))
            if not first:
                return  # nor has anybody else; the reducer says so
            self._spare_batch = first[0].batch
        self.strategy.begin_shard()
        with self.run.autocast():
            loss = as_loss(self.run.task, self.run.task.loss(self.strategy.model, self._spare_batch), 1)
        self.strategy.backward(loss.sum * 0.0)

    def _control(self) -> control.Control:
        more = not (isinstance(self.loader, StreamLoader) and self.loader.exhausted(self.strategy.shards))
        return control.Control(stop=self.run.signals.received, save=self.saver.is_due_by_clock(), more=more)

    def _status(self) -> Sequence[float] | None:
        step = self.state.progress.step + 1
        return self.monitor.status(step) if self.monitor.is_due(step) else None

    def _stop(self, number: int) -> None:
        """Save and leave: raises always."""
        run, step = self.run, self.state.progress.step
        self._save(synchronous=True)
        if run.world.rank == 0:
            run.directory.append_event("stopped", signal=number, step=step)
        # Whoever leaves breaks the others' connections, so nobody does before the state is safe.
        run.world.barrier()
        raise StopRequested(
            f"stopped after step {step}, as asked; everything is saved. "
            f"Continue with: paceline resume {run.directory.path}",
            exit_code=control.exit_code(number),
        )

    def _save(self, *, synchronous: bool = False) -> None:
        state = self.state.state_dict()
        if isinstance(self.loader, StreamLoader):
            state["streams"] = {}
            for of_rank in self.run.world.all_gather_json(self.loader.state_dict(self.strategy.shards)):
                state["streams"] |= of_rank
        self.saver.save(state, self.state.progress, synchronous=synchronous)
        self.monitor.timer.mark("checkpoint")

    def _finished(self) -> bool:
        progress, total = self.state.progress, self.run.data.total_steps
        if progress.stopped_early:
            return True
        return (
            progress.step >= total if total is not None else progress.epoch >= (self.run.config.epochs or 0)
        )

    def _epoch_ends(self) -> bool:
        progress, steps = self.state.progress, self.run.data.steps_per_epoch
        if progress.step_in_epoch == 0:
            return False
        return progress.epoch_ended if steps is None else progress.step_in_epoch >= steps

    def _evaluation_is_due(self) -> bool:
        progress, every = self.state.progress, self._evaluate_every
        if progress.step == progress.evaluated_step:
            return False
        return is_due(every, progress) or (self._finished() and every != Interval())


def _built_model(task: Task) -> nn.Module:
    """The task's model.

    Raises:
        TaskError: it is none, or there is nothing in it to train.
    """
    module = task.build_model()
    if not isinstance(module, nn.Module):
        raise TaskError(
            f"{type(task).__name__}.build_model returned a {type(module).__name__}; it must return a "
            "torch.nn.Module."
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise TaskError(
            f"{type(task).__name__}.build_model returned a model without a trainable parameter: "
            "there is nothing to train."
        )
    return module
