"""A step of synchronous training: forward and backward of micro-batches, their reduction, one update or several."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.core.built_in import PARTS
from paceline.core.errors import ConfigError, NonFiniteLossError, TaskError
from paceline.core.plugins import import_object
from paceline.core.task import BatchInfo, Callback, Loss, LossResult, Task
from paceline.data.order import DeterministicSampler
from paceline.data.samples import MicroBatch
from paceline.data.stream import StreamLoader
from paceline.parallel.reducer import StepSums
from paceline.parallel.strategy import MicrobatchStrategy, Strategy
from paceline.runs.directory import RunDirectory
from paceline.runs.monitor import PhaseTimer
from paceline.runs.rank_progress import ProgressTracker
from paceline.training.control import ControlFlags, merge
from paceline.training.evaluation import Pair, as_loss, as_pairs, mean_values, split_values
from paceline.training.hooks import StepHook
from paceline.training.optim import LEAST_SCALE, ShardedGradScaler
from paceline.training.reproducibility import (
    deterministic_kernels,
    seed_microbatch,
    seed_step,
    seed_update,
)
from paceline.training.run_context import RunContext
from paceline.training.state import TrainingState, TrainProgress

if TYPE_CHECKING:
    from paceline.training.group_context import GroupContext
    from paceline.training.state_manager import StateManager

# --- Losses and gradients that are NaN or infinite: the step, the micro-batch and the samples that caused them ---


def require_finite(
    run: RunContext, progress: TrainProgress, sums: StepSums, scaler: ShardedGradScaler | None = None
) -> None:
    """Reject a step whose loss or gradient is not finite.

    Args:
        progress: before the step.
        scaler: of the gradients, with --precision fp16. If only gradients overflow, it skips the step and tries a
            smaller scale, as long as there is one.

    Raises:
        NonFiniteLossError: names the step and the samples.
    """
    if sums.finite:
        return
    scale = None if scaler is None else scaler.get_scale()
    overflow = sums.bad_microbatch is None and math.isfinite(sums.loss)
    if scale is not None and overflow and scale > LEAST_SCALE:
        return
    raise NonFiniteLossError(_describe_non_finite(run.directory, progress, run.data.order, sums, scale))


def _describe_non_finite(
    directory: RunDirectory,
    progress: TrainProgress,
    order: DeterministicSampler | None,
    sums: StepSums,
    scale: float | None = None,
) -> str:
    """Write the message about a step that cannot be applied."""
    step = f"step {progress.step + 1} (epoch {progress.epoch + 1}, step {progress.step_in_epoch + 1} in it)"
    if sums.weight == 0:
        what = f"the weights of the losses of {step} add up to nothing, so there is no mean"
    elif sums.bad_microbatch is None:
        what = f"the gradient of {step} is NaN or infinite, though its loss is {sums.loss:g}"
        if scale is not None and math.isfinite(sums.loss):
            return (
                f"{what}, as were those of the steps before, at each scale of --precision fp16 down to "
                f"{scale:g}. None of these steps was applied, and checkpoints continue with such a "
                "scale. Correct the backward computation and start a new run; --precision bf16 and fp32 use no "
                "scale, and name the first such step."
            )
    else:
        what = f"the loss of {step} is NaN or infinite in micro-batch {sums.bad_microbatch}"
        if order is not None:
            start, stop = order.microbatch_bounds(progress.step_in_epoch)[sums.bad_microbatch]
            what += f", {order.describe(progress.epoch, start, stop)}"
    return (
        f"{what}. The step was not applied; checkpoints hold the state before it. "
        f"Correct the samples or the loss, then continue with: {directory.continuation()}. "
        "Or start a new run with a lower learning rate or with --clip-norm."
    )


# --- The computation of one micro-batch ---


@dataclass(frozen=True)
class Pass:
    """One pass over the micro-batches of a step.

    Attributes:
        loss: computes a micro-batch's loss; None: the task's ``loss`` does.
        number: index of the pass within the step.
    """

    loss: Callable[[nn.Module, MicroBatch], LossResult] | None = None
    number: int = 0


ONLY_PASS = Pass()

RecordValues = Callable[[MicroBatch, Mapping[str, Any]], None]
"""Takes the values that a micro-batch's loss returned in addition to the loss."""


def _ignore_values(microbatch: MicroBatch, values: Mapping[str, Any]) -> None:
    """Record nothing."""


def microbatch_loss(
    run: RunContext,
    model: nn.Module,
    step: int,
    microbatch: MicroBatch,
    current_pass: Pass = ONLY_PASS,
    record: RecordValues = _ignore_values,
) -> Loss:
    """Run a micro-batch's forward, with the random keys of this step, pass and micro-batch.

    Raises:
        TaskError: the task returned no loss, or one that does not depend on the parameters.
    """
    seed_microbatch(run.config.training.seed, step, microbatch.index, current_pass.number)
    return _loss(run, model, step, microbatch, current_pass, record)


def announce_microbatch(run: RunContext, step: int, microbatch: MicroBatch) -> None:
    """Tell the task the position of the micro-batch that it computes next."""
    epochs, total_steps = run.data.epochs, run.data.total_steps
    run.task.on_batch_begin(
        BatchInfo(
            split="train",
            step=step,
            number=microbatch.index,
            samples=microbatch.num_samples,
            epoch=None if epochs is None else epochs.position(step)[0],
            progress=None if total_steps is None else step / total_steps,
        )
    )


def _loss(
    run: RunContext,
    model: nn.Module,
    step: int,
    microbatch: MicroBatch,
    current_pass: Pass = ONLY_PASS,
    record: RecordValues = _ignore_values,
) -> Loss:
    announce_microbatch(run, step, microbatch)
    own = current_pass.loss
    with run.autocast():
        result = run.task.loss(model, microbatch.batch) if own is None else own(model, microbatch)
        value, values = split_values(result)
        loss = as_loss(run.task, value, microbatch.num_samples)
    if values:
        record(microbatch, values)
    if not loss.sum.requires_grad:
        raise TaskError(
            f"{type(run.task).__name__}.loss does not depend on the model's parameters in micro-batch "
            f"{microbatch.index} of step {step + 1}, so it has no gradient. Do not detach it, and do not turn it into "
            "a number. If a micro-batch may have nothing to learn from, add 0 * output.sum() to the loss."
        )
    return loss


class MicrobatchRunner:
    """Computes each of a rank's micro-batches in the steps of one group.

    Attributes:
        current_pass: the pass to which the micro-batches belong.
        values: what the losses gave with them in this pass, by micro-batch and name; None: the steps cannot record it.
    """

    def __init__(self, run: RunContext, state: TrainingState, activity: ProgressTracker, timer: PhaseTimer) -> None:
        self.current_pass = ONLY_PASS
        self.values: dict[int, dict[str, Pair]] | None = None
        self._run = run
        self._state = state
        self._activity = activity
        self._timer = timer

    def forward(self, model: nn.Module, microbatch: MicroBatch, *, ahead: int = 0) -> Loss:
        """Compute the micro-batch's loss; backward comes next."""
        self._activity.move("forward")
        try:
            return self.loss(model, microbatch, ahead=ahead)
        finally:  # a stage of a pipeline leaves the loss in its middle
            self._timer.mark("forward")
            self._activity.move("backward")

    def loss(self, model: nn.Module, microbatch: MicroBatch, *, ahead: int = 0) -> Loss:
        """Compute the micro-batch's loss in the current pass."""
        step = self._state.progress.step + ahead
        return microbatch_loss(self._run, model, step, microbatch, self.current_pass, self._record)

    def forward_unseeded(self, model: nn.Module, microbatch: MicroBatch) -> Loss:
        """Compute the micro-batch's loss without seeding; several threads may call this at once."""
        return _loss(self._run, model, self._state.progress.step, microbatch, record=self._record)

    def _record(self, microbatch: MicroBatch, values: Mapping[str, Any]) -> None:
        where = f"{type(self._run.task).__name__}.loss"
        if self.values is None:
            raise TaskError(
                f"{where} returned values to record, which --strategy {', '.join(self._run.config.strategies)} cannot "
                "add up: its ranks do not step together. Return the loss alone."
            )
        self.values[microbatch.index] = as_pairs(where, values, microbatch.num_samples)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Scale the loss for backward."""
        return self._state.scale_loss(loss)

    def backward_done(self) -> None:
        """Record that the micro-batch's backward has run, or is enqueued."""
        self._timer.mark("backward")


class DummyMicrobatch(StepHook):
    """Repeats a batch for the backwards of a rank with fewer micro-batches in a step than other ranks expect."""

    def __init__(self, run: RunContext, state: TrainingState) -> None:
        self._run = run
        self._state = state
        self._batch: Any = None

    def after_microbatches(self, strategy: Strategy, microbatches: Sequence[MicroBatch]) -> None:
        """Keep a batch, and run the strategy's number of backwards with weight 0."""
        if microbatches:
            self._batch = microbatches[-1].batch
        for _ in range(strategy.num_dummy_steps):
            self._run_one(strategy)

    def _run_one(self, strategy: Strategy) -> None:
        run = self._run
        if self._batch is None:
            # With another loader, so that the run's own keeps its position in streams.
            with closing(run.build_loader()) as loader:
                first = loader.fetch(self._state.progress.epoch, 0, range(run.num_microbatches))
            if not first:
                return  # no rank has a batch; the reducer reports it
            self._batch = first[0].batch
        batch = self._batch

        def loss(model: nn.Module) -> torch.Tensor:
            run.task.on_batch_begin(BatchInfo(split="train", step=0, number=0, samples=0))
            with run.autocast():
                return as_loss(run.task, run.task.loss(model, batch), 1).sum

        strategy.run_dummy(loss)


# --- A step: the task's loss and one update; the plug-in of own loops has the steps that a task composes ---


_STRATEGIES = frozenset({"single", "ddp", "zero1", "fsdp"})


def overrides_train_step(task: Task) -> bool:
    """Return whether the task computes its steps itself."""
    return type(task).train_step is not Task.train_step


def require_train_step_support(run: RunContext) -> None:
    """Refuse options under which a task cannot compute its steps itself.

    Raises:
        ConfigError: names the option, or what installs the plug-in of such steps.
    """
    if not overrides_train_step(run.task):
        return
    config = run.config
    reasons = {
        f"--strategy {', '.join(config.strategies)}": not set(config.strategies) <= _STRATEGIES,
        f"--reduction {config.parallel.reduction}": config.reducer not in ("exact", "allreduce"),
        "--precision fp16": config.training.precision == "fp16",
        **dict.fromkeys((*config.changes.whole_loss, *config.changes.own_state), True),
    }
    wrong = [option for option, applies in reasons.items() if applies]
    if wrong:
        raise ConfigError(
            f"{type(run.task).__name__} defines train_step: steps of your own, there or in a loop over paceline.Run, "
            "work with --strategy single, ddp, zero1 and fsdp, --reduction exact and allreduce, --precision fp32 and "
            "bf16, and without --sdc-check-every and --local-sgd-steps; they do not work with "
            f"{' and '.join(wrong)}."
        )
    import_object(PARTS["train_step"])


class SyncStep:
    """A step that all ranks compute together, and every one applies: the task's loss, and one update.

    The engine opens it with its data. Its caller computes it, and asks the engine for the next step; then it is
    committed.

    Attributes:
        microbatches: this rank's.
        changed_before_pass: whether the state changed before a pass, so that a pass that fails leaves half a step.

    Args:
        states: this rank's copy of the state.
        update: applies the gradients if those of all ranks are finite; None: to the whole state.
    """

    changed_before_pass = False

    def __init__(
        self, run: RunContext, states: StateManager, group: GroupContext, update: Callable[[bool], None] | None = None
    ) -> None:
        self._run = run
        self._states = states
        self._group = group
        self._update = states.update if update is None else update
        self._sums: StepSums | None = None
        self._row: Sequence[float] = ()
        self._values: dict[str, float] = {}  # that the losses gave, if a record is due
        progress, timer, tracker = states.state.progress, group.monitor.timer, group.world.progress_tracker
        self._begin_callbacks(progress)
        tracker.move("data")
        self.microbatches = group.fetch(progress.epoch, progress.step_in_epoch, group.strategy.microbatches)
        timer.mark("data")

    def _begin_callbacks(self, progress: TrainProgress) -> None:
        callback = self._states.state.callback
        if type(callback) is not Callback:
            self._states.await_readers()
            seed_step(self._run.config.training.seed, progress.step)
        if progress.step_in_epoch == 0:
            callback.on_epoch_begin(progress.epoch)
        callback.on_step_begin(progress.step, progress.step_in_epoch)

    def compute(self) -> None:
        """Run forward and backward, reduce, and update; afterwards the state is invalid until the commit."""
        run, group, states = self._run, self._group, self._states
        step = states.state.progress.step
        self._sums = self._reduce()
        group.world.progress_tracker.move("optimizer")
        seed_update(run.config.training.seed, step)  # an optimizer or callback may add noise
        due = group.monitor.is_due(step + 1)
        with _undoing_buffers(group.strategy):
            self.logged: Mapping[str, float] = {**self._values, **states.state.callback.on_gradients_reduced(due=due)}
        states.invalidate()
        with deterministic_kernels(run.config, run.device):
            self._update(self._sums.finite)
        self._log_norm()
        group.monitor.timer.mark("optimizer")

    def _log_norm(self) -> None:
        """Log the norm of the gradients, if they were clipped."""
        states = self._states
        if states.grad_norm is not None and self._group.monitor.is_due(states.state.progress.step + 1):
            self.logged = {**self.logged, "grad_norm": float(states.grad_norm)}

    def commit(self) -> StepSums:
        """Make the computed step count; return its sums, with the rows of all ranks."""
        assert self._sums is not None, "a step is computed before it is committed"
        return self._group.commit(self._sums, self._row, self.logged)

    def _reduce(self, current_pass: Pass = ONLY_PASS) -> StepSums:
        """Run forward and backward, and reduce; this rank's row travels with the first pass of a step."""
        run, group, state = self._run, self._group, self._states.state
        strategy, microbatches = group.strategy, self.microbatches
        strategy.begin_step([microbatch.index for microbatch in microbatches])
        group.runner.current_pass = current_pass
        values = group.runner.values = {}
        with _undoing_buffers(strategy):
            with deterministic_kernels(run.config, run.device):
                for hook in group.hooks:
                    hook.before_microbatches(strategy, microbatches)
                strategy.run_microbatches(microbatches, group.runner)
                for hook in group.hooks:
                    hook.after_microbatches(strategy, microbatches)

            group.world.progress_tracker.move("reduction")
            if current_pass.number == 0:
                self._row = self._own_row()
            row = self._row if current_pass.number == 0 else ControlFlags(has_values=bool(values)).row()
            sums = strategy.reduce(row)
            for hook in group.hooks:
                sums = hook.after_reduce(sums)
            if group.monitor.is_due(state.progress.step + 1) and merge(sums.rows).has_values:
                self._values |= mean_values(group.world, values)
            group.monitor.timer.mark("reduction")
            require_finite(run, state.progress, sums, state.scaler)
            return sums

    def _own_row(self) -> Sequence[float]:
        """Return the row that travels with the step's sums: control flags, and this rank's status if due."""
        run, group, progress = self._run, self._group, self._states.state.progress
        strategy, loader, monitor = group.strategy, self._states.loader, group.monitor
        has_next_batch = not (isinstance(loader, StreamLoader) and loader.exhausted(strategy.microbatches))
        evaluates = run.deadline.is_set and run.schedule.evaluation_follows(progress, has_next_batch=has_next_batch)
        flags = ControlFlags(
            stop=group.stop_reason(evaluates=evaluates),
            save=group.checkpoint_manager.is_due_by_clock(),
            has_next_batch=has_next_batch,
            reform=group.should_reform,
            has_values=bool(group.runner.values),
        )
        for hook in group.hooks:
            flags = hook.report(flags)
        step = progress.step + 1
        # If steps overlap, the rows that arrive with a step are those of the previous one.
        due = monitor.is_due(step) or (strategy.overlaps_steps and monitor.is_due(step + 1))
        return flags.row(monitor.status(step) if due else None)


@contextmanager
def _undoing_buffers(strategy: Strategy) -> Iterator[None]:
    """After an error let the module's buffers be those before the pass, although they may be reduced already."""
    try:
        yield
    except BaseException:
        if isinstance(strategy, MicrobatchStrategy):
            with suppress(RuntimeError):  # a GPU that is out of order: the error is about that
                strategy.reducer.buffers.undo()
        raise
