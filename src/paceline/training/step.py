"""The computation of a step: forward and backward of a micro-batch, and the refusal of sums that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from paceline.core.errors import NonFiniteLossError, TaskError
from paceline.core.task import BatchInfo, Loss
from paceline.data.order import DeterministicSampler
from paceline.data.samples import MicroBatch
from paceline.parallel.progress import ProgressTracker
from paceline.parallel.reducer import StepSums
from paceline.runs.directory import RunDirectory
from paceline.runs.phases import PhaseTimer
from paceline.training.evaluation import as_loss
from paceline.training.optim import LEAST_SCALE, ShardedGradScaler
from paceline.training.reproducibility import seed_microbatch
from paceline.training.run_context import RunContext
from paceline.training.state import TrainingState, TrainProgress

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

    loss: Callable[[nn.Module, MicroBatch], torch.Tensor | Loss] | None = None
    number: int = 0


ONLY_PASS = Pass()


def microbatch_loss(
    run: RunContext, model: nn.Module, step: int, microbatch: MicroBatch, current_pass: Pass = ONLY_PASS
) -> Loss:
    """Run a micro-batch's forward, with the random keys of this step, pass and micro-batch.

    Raises:
        TaskError: the task returned no loss, or one that does not depend on the parameters.
    """
    seed_microbatch(run.config.training.seed, step, microbatch.index, current_pass.number)
    return _loss(run, model, step, microbatch, current_pass)


def announce_microbatch(run: RunContext, step: int, microbatch: MicroBatch) -> None:
    """Tell the task the position of the micro-batch that it computes next."""
    steps_per_epoch, total_steps = run.data.steps_per_epoch, run.data.total_steps
    run.task.on_batch_begin(
        BatchInfo(
            split="train",
            step=step,
            number=microbatch.index,
            samples=microbatch.num_samples,
            epoch=None if steps_per_epoch is None else step // steps_per_epoch,
            progress=None if total_steps is None else step / total_steps,
        )
    )


def _loss(run: RunContext, model: nn.Module, step: int, microbatch: MicroBatch, current_pass: Pass = ONLY_PASS) -> Loss:
    announce_microbatch(run, step, microbatch)
    own = current_pass.loss
    with run.autocast():
        value = run.task.loss(model, microbatch.batch) if own is None else own(model, microbatch)
        loss = as_loss(run.task, value, microbatch.num_samples)
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
    """

    def __init__(self, run: RunContext, state: TrainingState, activity: ProgressTracker, timer: PhaseTimer) -> None:
        self.current_pass = ONLY_PASS
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
        return microbatch_loss(self._run, model, self._state.progress.step + ahead, microbatch, self.current_pass)

    def forward_unseeded(self, model: nn.Module, microbatch: MicroBatch) -> Loss:
        """Compute the micro-batch's loss without seeding; several threads may call this at once."""
        return _loss(self._run, model, self._state.progress.step, microbatch)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Scale the loss for backward."""
        return self._state.scale_loss(loss)

    def backward_done(self) -> None:
        """Record that the micro-batch's backward has run, or is enqueued."""
        self._timer.mark("backward")
