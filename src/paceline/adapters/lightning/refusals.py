"""What of Lightning cannot be kept where a step is shared by any number of ranks, and what to use instead."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, callbacks
from lightning.pytorch.utilities.model_helpers import is_overridden

from paceline.errors import TaskError

_HOOKS = {
    "optimizer_step": "Paceline steps the optimizers once the gradients of all shards are summed up",
    "optimizer_zero_grad": "Paceline keeps the gradients in buffers of its own",
    "backward": "Paceline computes and sums up the gradients. Change the loss in training_step",
    "on_before_backward": "a step has one backward for each shard. Change the loss in training_step",
    "lr_scheduler_step": "schedulers are stepped as their interval says. Use one of torch's interface",
    "configure_gradient_clipping": "use --clip-norm",
    "transfer_batch_to_device": "Paceline moves the batches. Use on_after_batch_transfer to change them",
    "on_validation_batch_start": "blocks are shared by the ranks. Use validation_step",
    "on_validation_batch_end": "blocks are shared by the ranks. Use validation_step",
    "on_test_batch_start": "blocks are shared by the ranks. Use test_step",
    "on_test_batch_end": "blocks are shared by the ranks. Use test_step",
    "configure_sharded_model": "every rank holds the whole model. Use configure_model",
}

_CALLBACKS = (
    (
        callbacks.Checkpoint,
        "Paceline keeps checkpoints: --checkpoint-every, --keep, and --best METRIC:min",
    ),
    (callbacks.StochasticWeightAveraging, "use --ema DECAY"),
    (callbacks.WeightAveraging, "use --ema DECAY"),
    (callbacks.GradientAccumulationScheduler, "the global batch is what a step sees, on any number of ranks"),
    (callbacks.Timer, "use --walltime"),
    (callbacks.ProgressBar, "Paceline shows the progress; --quiet hides it"),
    (
        callbacks.BaseFinetuning,
        "it changes the optimizer on the way. Freeze parameters in build_module",
    ),
    (callbacks.ModelPruning, "it changes the parameters on the way"),
    (callbacks.BatchSizeFinder, "use --global-batch-size"),
    (callbacks.LearningRateFinder, "try values with --set"),
)


def refuse_hooks(module: LightningModule) -> None:
    """Refuse a module that overrides what cannot be kept.

    Raises:
        TaskError: names the hook, and what to use instead.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise TaskError(
            f"{name}.automatic_optimization is False. A step's gradients are summed over all shards before "
            "anything is made of them, so training_step cannot step optimizers. Let it return the loss; "
            "where it cannot, run the script as it is: paceline launch --on torchrun -- script.py"
        )
    for hook, instead in _HOOKS.items():
        if is_overridden(hook, module):
            raise TaskError(f"{name}.{hook} cannot be kept: {instead}.")
    if not is_overridden("training_step", module):
        raise TaskError(f"{name} has no training_step; there is nothing to train.")


def refuse_callbacks(given: list[Any]) -> None:
    """Refuse callbacks that do what Paceline does, or what it cannot keep.

    Raises:
        TaskError: names the callback, and what to use instead.
    """
    for callback in given:
        for kind, instead in _CALLBACKS:
            if isinstance(callback, kind):
                raise TaskError(f"the callback {type(callback).__name__} has no place here: {instead}.")
