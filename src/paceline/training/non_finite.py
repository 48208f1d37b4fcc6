"""Which step, shard and samples made a loss or gradient NaN or infinite, and what to do about it."""

from __future__ import annotations

from paceline.data.order import DataOrder
from paceline.distributed.reducer import StepSums
from paceline.run_directory import RunDirectory
from paceline.training.state import Progress


def describe_non_finite(
    directory: RunDirectory, progress: Progress, order: DataOrder | None, sums: StepSums
) -> str:
    """The message about a step that cannot be applied.

    Args:
        directory: the run's.
        progress: before the step.
        order: of the training samples; None for streams.
        sums: the step's.
    """
    step = f"step {progress.step + 1} (epoch {progress.epoch + 1}, step {progress.step_in_epoch + 1} in it)"
    if sums.weight == 0:
        what = f"the weights of the losses of {step} add up to nothing, so there is no mean"
    elif sums.bad_shard is None:
        what = f"the gradient of {step} is NaN or infinite, though its loss is {sums.loss:g}"
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
