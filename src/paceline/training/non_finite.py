"""Which step, shard and samples made a loss or gradient NaN or infinite, and what to do about it."""

from __future__ import annotations

import math

from paceline.data.order import DataOrder
from paceline.distributed.reducer import StepSums
from paceline.run_directory import RunDirectory
from paceline.training.state import Progress


def describe_non_finite(
    directory: RunDirectory,
    progress: Progress,
    order: DataOrder | None,
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
    elif sums.bad_shard is None:
        what = f"the gradient of {step} is NaN or infinite, though its loss is {sums.loss:g}"
        if scale is not None and math.isfinite(sums.loss):
            return (
                f"{what}, as were those of the steps before, at each scale of --precision fp16 down to "
                f"{scale:g}. None of these steps was applied, and what checkpoints hold goes on with such a "
                "scale. Mend what backward computes and start a new run; --precision bf16 and fp32 scale "
                "nothing, and name the first such step."
            )
    else:
        what = f"the loss of {step} is NaN or infinite in shard {sums.bad_shard}"
        if order is not None:
            start, stop = order.shard_bounds(progress.step_in_epoch)[sums.bad_shard]
            what += f", {order.describe(progress.epoch, start, stop)}"
    return (
        f"{what}. The step was not applied; checkpoints hold the state before it. "
        f"Mend the samples or the loss, then continue with: paceline resume {directory.path}. "
        "Or start a new run with a lower learning rate or with --clip-norm."
    )
