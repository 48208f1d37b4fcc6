"""One micro-batch: its forward and backward pass, and what must not happen in it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import nn

from paceline.core.callback import BatchInfo
from paceline.core.errors import DataError, TaskError
from paceline.core.task import Loss
from paceline.data.order import DeterministicSampler
from paceline.data.samples import Loader, MicroBatch
from paceline.parallel.progress import ProgressTracker
from paceline.parallel.reducer import StepSums
from paceline.parallel.strategy import Strategy
from paceline.runs.directory import RunDirectory
from paceline.runs.phases import PhaseTimer
from paceline.training.control import ControlFlags
from paceline.training.evaluation import as_loss
from paceline.training.reproducibility import seed_microbatch
from paceline.training.run_context import RunContext
from paceline.training.schedule import Schedule
from paceline.training.state import TrainingState, TrainProgress

# --- Which step, micro-batch and samples made a loss or gradient NaN or infinite, and what to do about it ---


def describe_non_finite(
    directory: RunDirectory,
    progress: TrainProgress,
    order: DeterministicSampler | None,
    sums: StepSums,
    scale: float | None = None,
) -> str:
    """The message about a step that cannot be applied.

    Args:
        directory: the run's.
        progress: before the step.
        order: of the training samples; None for streams.
        sums: the step's.
        scale: the gradients', which was lowered as far as it goes before they are an error; None without
            --precision fp16.
    """
    step = f"step {progress.step + 1} (epoch {progress.epoch + 1}, step {progress.step_in_epoch + 1} in it)"
    if sums.weight == 0:
        what = f"the weights of the losses of {step} add up to nothing, so there is no mean"
    elif sums.bad_microbatch is None:
        what = f"the gradient of {step} is NaN or infinite, though its loss is {sums.loss:g}"
        if scale is not None and math.isfinite(sums.loss):
            return (
                f"{what}, as were those of the steps before, at each scale of --precision fp16 down to "
                f"{scale:g}. None of these steps was applied, and what checkpoints hold goes on with such a "
                "scale. Mend what backward computes and start a new run; --precision bf16 and fp32 scale "
                "nothing, and name the first such step."
            )
    else:
        what = f"the loss of {step} is NaN or infinite in micro-batch {sums.bad_microbatch}"
        if order is not None:
            start, stop = order.microbatch_bounds(progress.step_in_epoch)[sums.bad_microbatch]
            what += f", {order.describe(progress.epoch, start, stop)}"
    return (
        f"{what}. The step was not applied; checkpoints hold the state before it. "
        f"Mend the samples or the loss, then continue with: paceline resume {directory.path}. "
        "Or start a new run with a lower learning rate or with --clip-norm."
    )


# --- When a step overlaps with the next one, for strategies that can: whenever all ranks just go on ---


class StepOverlap:
    """Reads one step ahead, and decides where the ranks must have done a step before the next one begins.

    That is before an epoch's end, an evaluation, a save and the run's end, which follow from the progress
    alone, and in the step after one in which a rank asked for something: so all ranks decide alike.

    Args:
        schedule: when epochs, evaluations and the run end.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._read: tuple[int, list[MicroBatch]] | None = None
        self._asked = False
        self.overlapping = False
        """Whether the next step has begun within the one that was done last."""

    def fetch(self, loader: Loader, strategy: Strategy, progress: TrainProgress) -> list[MicroBatch]:
        """The micro-batches of the step that comes now."""
        read, self._read = self._read, None
        if read is not None and read[0] == progress.step:
            return read[1]
        return loader.fetch(progress.epoch, progress.step_in_epoch, strategy.microbatches)

    def begin_next(
        self,
        loader: Loader,
        strategy: Strategy,
        progress: TrainProgress,
        save_is_due: Callable[[TrainProgress], bool],
    ) -> None:
        """Have the step that was begun overlap with the next one, unless something comes in between."""
        after = dataclasses.replace(
            progress,
            version=progress.version + 1,
            step=progress.step + 1,
            step_in_epoch=progress.step_in_epoch + 1,
        )
        schedule = self._schedule
        self.overlapping = strategy.overlaps_steps and not (
            self._asked
            or schedule.finished(after)
            or schedule.epoch_ends(after)
            or schedule.evaluation_is_due(after)
            or save_is_due(after)
        )
        if self.overlapping:
            following = loader.fetch(after.epoch, after.step_in_epoch, strategy.microbatches)
            self._read = (after.step, following)
            strategy.overlap_next(following)

    def defer(self, word: ControlFlags) -> ControlFlags:
        """What of a control word is obeyed now: nothing while steps overlap, but soon."""
        if not self.overlapping:
            self._asked = False
            return word
        self._asked = bool(word.stop or word.save or word.reform)
        return ControlFlags()


# --- What one micro-batch computes in a step, and what a rank does that has none ---


def microbatch_loss(run: RunContext, model: nn.Module, step: int, microbatch: MicroBatch) -> Loss:
    """A micro-batch's forward, with the randomness of this step and micro-batch.

    Raises:
        TaskError: the loss is none, or nothing can be learned from it.
    """
    seed_microbatch(run.config.seed, step, microbatch.index)
    return _loss(run, model, step, microbatch)


def _loss(run: RunContext, model: nn.Module, step: int, microbatch: MicroBatch) -> Loss:
    run.task.on_batch_begin(
        BatchInfo(split="train", step=step, number=microbatch.index, samples=microbatch.num_samples)
    )
    with run.autocast():
        loss = as_loss(run.task, run.task.loss(model, microbatch.batch), microbatch.num_samples)
    if not loss.sum.requires_grad:
        raise TaskError(
            f"{type(run.task).__name__}.loss does not depend on the model's parameters, so it has no "
            "gradient. Do not detach it, and do not turn it into a number."
        )
    return loss


class MicrobatchRunner:
    """What a rank does for each of its micro-batches in the steps of one world.

    Args:
        run: what is trained.
        state: whose model computes, and whose scaler scales.
        activity: told of what is done.
        timer: of the phases.
    """

    def __init__(self, run: RunContext, state: TrainingState, activity: ProgressTracker, timer: PhaseTimer) -> None:
        self._run, self._state, self._activity, self._timer = run, state, activity, timer

    def forward(self, model: nn.Module, microbatch: MicroBatch, *, ahead: int = 0) -> Loss:
        """The micro-batch's loss; backward comes next."""
        self._activity.move("forward")
        try:
            return microbatch_loss(self._run, model, self._state.progress.step + ahead, microbatch)
        finally:  # a stage of a pipeline leaves the loss in its middle
            self._timer.mark("forward")
            self._activity.move("backward")

    def forward_unseeded(self, model: nn.Module, microbatch: MicroBatch) -> Loss:
        """The micro-batch's loss with whatever randomness there is; several threads may call this at once."""
        return _loss(self._run, model, self._state.progress.step, microbatch)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as backward gets it."""
        return self._state.scale_loss(loss)

    def backward_done(self) -> None:
        """The micro-batch's backward has been run, or enqueued."""
        self._timer.mark("backward")


class DummyMicrobatch:
    """Data seen before, for the backwards of a rank that has fewer micro-batches in a step than others wait for."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._batch: Any = None

    def run(self, strategy: Strategy, microbatches: Sequence[MicroBatch], epoch: int) -> None:
        """Remember a batch, and run as many backwards that weigh nothing as the strategy asks for."""
        if microbatches:
            self._batch = microbatches[-1].batch
        for _ in range(strategy.num_dummy_steps):
            self._run_one(strategy, epoch)

    def _run_one(self, strategy: Strategy, epoch: int) -> None:
        run = self._run
        if self._batch is None:
            # Apart from the loader, whose streams must stay where they are.
            with closing(run.build_loader()) as loader:
                first = loader.fetch(epoch, 0, range(run.num_microbatches))
            if not first:
                return  # nor has anybody else; the reducer says so
            self._batch = first[0].batch
        batch = self._batch

        def loss(model: nn.Module) -> torch.Tensor:
            run.task.on_batch_begin(BatchInfo(split="train", step=0, number=0, samples=0))
            with run.autocast():
                return as_loss(run.task, run.task.loss(model, batch), 1).sum

        strategy.run_dummy(loss)


# --- What is tried of a task before its model is laid out on the ranks ---


class ExampleBatch:
    """Tries the task on the first micro-batch of its training data.

    Args:
        run: what is trained.
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._microbatch: MicroBatch | None = None

    def parts(self, module: nn.Module) -> Sequence[Any] | None:
        """What the task says of the parts of its model's forward."""
        return self._run.task.pipeline_blocks(module)

    def loss(self, module: nn.Module) -> Loss:
        """The loss of the first micro-batch.

        Raises:
            DataError: there is none.
            TaskError: the loss is none.
        """
        if self._microbatch is None:
            # Apart from the run's loader, whose streams must stay where they are.
            with closing(self._run.build_loader(workers=0)) as loader:
                there = loader.fetch(0, 0, range(self._run.num_microbatches))
            if not there:
                raise DataError("the training data holds no sample.")
            self._microbatch = there[0]
        return microbatch_loss(self._run, module, 0, self._microbatch)
