"""A step that the task computes itself: several passes over the micro-batches, and updates between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from paceline.core.task import Loss

LossFunction = Callable[["nn.Module", Any], "torch.Tensor | Loss"]
"""Takes the model and a micro-batch, as :meth:`Task.loss` does."""


class TrainStep(Protocol):
    """One training step, which :meth:`Task.train_step` puts together from these parts.

    All ranks call the same methods in the same order: decide by equal values only, such as ``step``, the
    numbers that :meth:`backward` returns, and the gradients after it. Code between the calls draws the same random
    numbers on all ranks.

    Attributes:
        module: the model; the argument of a loss may be wrapped or compiled.
        optimizers: by name; "main" if the task returned a single one.
        step: steps done before.
        epoch: epochs done before; None if the data is a stream.
        progress: ``step`` over the steps of the run, from 0 to below 1; None if their number is unknown.
    """

    module: nn.Module
    optimizers: Mapping[str, Optimizer]
    step: int
    epoch: int | None
    progress: float | None

    def backward(self, loss: LossFunction) -> float:
        """Compute a loss and its gradient over the whole batch: one pass over the micro-batches.

        Afterwards ``parameter.grad`` is the mean gradient, with the same bits on all ranks; where no micro-batch of
        this pass used the parameter, it is None on all ranks. It lies in memory that the next pass overwrites: clone
        what you need later. Each pass draws random numbers of its own.

        Args:
            loss: called once for each micro-batch of this rank, such as ``self.loss``.

        Returns:
            The mean loss over the batch, the same on all ranks.

        Raises:
            NonFiniteLossError: the loss or the gradient is NaN or infinite.
        """

    def backward_over_batch(
        self, embed: Callable[[nn.Module, Any], torch.Tensor], loss: Callable[[torch.Tensor], torch.Tensor]
    ) -> float:
        """Compute a loss of the embeddings of the whole batch, such as a contrastive one, and its gradient.

        The embeddings of all micro-batches are computed and gathered; then their gradients pass through each
        micro-batch, which is recomputed from the same random numbers (Gao et al., "Scaling Deep Contrastive
        Learning Batch Size under Memory Limited Setup", 2021). So the model depends neither on the number of ranks
        nor, but for rounding, on that of micro-batches, and memory holds the activations of one micro-batch.

        Args:
            embed: returns a micro-batch's embeddings, (B, ...), one row for each sample.
            loss: takes the embeddings of all N samples, (N, ...), in the order of the batch; returns a scalar, the mean
                over the batch. Parameters that it uses directly get no gradient.

        Returns:
            The loss, the same on all ranks.

        Raises:
            ConfigError: the strategy shards the model.
            NonFiniteLossError: as :meth:`backward`.
            TaskError: ``embed`` returns no tensor with a row for each sample, or ``loss`` no scalar with a gradient.
        """

    def update(self, *names: str, clip_norm: float | None = None, closure: Callable[[], float] | None = None) -> None:
        """Step optimizers with the gradients as they are now.

        Learning-rate schedules and the moving average follow once, at the end of the step.

        Args:
            names: of the optimizers, in this order; by default all of them.
            clip_norm: the 2-norm to which the gradients of these optimizers' parameters are scaled down; by default
                ``--clip-norm``.
            closure: computes the loss again, by :meth:`backward`, for optimizers that need it, such as ``LBFGS``.
        """

    def log(self, **values: float) -> None:
        """Add numbers, the same on all ranks, to the step's record in ``metrics.jsonl``."""
