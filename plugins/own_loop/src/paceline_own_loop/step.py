"""A step of a script's own loop, as the script sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.core.errors import PeerLostError, TaskError
from paceline.core.task import LossResult
from paceline.torch_internals import count_writes
from paceline.training.group_context import GroupContext
from paceline.training.session import clear_frames
from paceline.training.step import Pass, microbatch_loss
from paceline.training.trainer import Trainer
from paceline_own_loop.composed_step import ComposedStep

LossOfBatch = Callable[[Any], LossResult]
"""Takes a micro-batch; returns what :meth:`paceline.Task.loss` does."""


class LoopStep:
    """One step of a script's own loop. It is committed when the loop asks for the next one.

    All ranks call the same methods in the same order: decide by equal values only, such as ``step``, the numbers that
    :meth:`backward` returns, and the gradients after it. Code between the calls draws the same random numbers on all
    ranks; noise for each sample belongs into the loss.

    Attributes:
        step: steps done before.
        epoch: epochs done before; None if the data is a stream.
        progress: ``step`` over the steps of the run, from 0 to below 1; None if their number is unknown.
        ends_epoch: whether the epoch, or the run, ends with this step; False if the data is a stream.
        has_updated: whether :meth:`update` was called.
        left_training: whether gradients were computed with a model in evaluation mode that began in training mode.
        loss_of_rank: the loss of another rank in this step, which the next group then recomputes; else None.
    """

    def __init__(
        self,
        inner: ComposedStep,
        group: GroupContext,
        trainer: Trainer,
        guard: OptimizerGuard,
        parameters: Sequence[nn.Parameter],
        trained: Sequence[nn.Module],
        outlives_losses: bool,
    ) -> None:
        self._inner = inner
        self._outlives_losses = outlives_losses
        self._writes = count_writes(parameters) if outlives_losses else []
        self.loss_of_rank: PeerLostError | None = None
        self._group = group
        self._parameters = parameters
        self._optimizers_step = guard.open
        self._tracker = group.world.progress_tracker
        self._trainer = trainer
        self.step = inner.step
        self.epoch = inner.epoch
        self.progress = inner.progress
        done, steps = trainer.state.progress.step_in_epoch + 1, trainer.run.data.steps_per_epoch
        total = trainer.run.data.total_steps
        self.ends_epoch = done == steps or (steps is not None and inner.step + 1 == total)
        self.has_updated = False
        self.left_training = False
        self._trained = trained
        self._is_updating = False
        self._used: set[int] = set()  # parameters whose gradient an update has used
        for parameter in parameters:
            parameter.grad = None

    def backward(self, loss: LossOfBatch, *names: str) -> float:
        """Compute a loss and its gradient over the whole batch: one pass over the micro-batches.

        The mean gradient, with the same bits on all ranks, is added to ``parameter.grad``, as in PyTorch: within a body
        gradients add up until :meth:`update` has used them, or ``zero_grad()`` drops them. Where no micro-batch used
        the parameter, nothing is added.

        Args:
            loss: called once for each micro-batch of this rank, with the micro-batch.
            names: of optimizers; only their parameters get a gradient. By default all do.

        Returns:
            The mean loss over the batch, the same on all ranks.

        Raises:
            NonFiniteLossError: the loss or the gradient is NaN or infinite.
        """
        if self.loss_of_rank is None:
            with self._surviving(), self._adding_up(names):
                return self._inner.backward(lambda model, batch: loss(batch))
        return self._backward_alone(loss)

    def backward_over_batch(
        self,
        embed: Callable[[Any], torch.Tensor],
        loss: Callable[[torch.Tensor], torch.Tensor],
        *names: str,
    ) -> float:
        """Compute a loss of the embeddings of the whole batch; see :meth:`paceline.TrainStep.backward_over_batch`.

        Args:
            embed: returns a micro-batch's embeddings, (B, ...), one row for each sample.
            loss: takes the embeddings of all N samples, (N, ...); returns a scalar, the mean over the batch.
            names: as for :meth:`backward`.
        """
        if self.loss_of_rank is None:
            with self._surviving(), self._adding_up(names):
                return self._inner.backward_over_batch(lambda model, batch: embed(batch), loss)
        return self._backward_alone(lambda batch: loss(embed(batch)))

    def update(self, *names: str, clip_norm: float | None = None, closure: Callable[[], float] | None = None) -> None:
        """Step optimizers with the gradients as they are now.

        Args:
            names: of the optimizers, in this order; by default all of them.
            clip_norm: the 2-norm to which the gradients of these optimizers' parameters are scaled down.
            closure: computes the loss again, by :meth:`backward`, for optimizers that need it, such as ``LBFGS``.
        """
        if self.loss_of_rank is not None:
            self.has_updated = True
            return
        if self._trainer.state.progress.measured:
            raise TaskError(
                "step.update() was called after run.evaluate(), so the evaluated model is not the one that is saved as "
                "the best. Update first, then evaluate."
            )
        self._is_updating = True  # a closure's gradients replace each other
        try:
            with self._tracker.at_work(), self._optimizers_step():
                self._inner.update(*names, clip_norm=clip_norm, closure=closure)
        finally:
            self._is_updating = False
        state = self._trainer.state
        self._used |= {id(parameter) for name in names or state.optimizers for parameter in state.parameters_of[name]}
        self.has_updated = True

    def stop(self) -> None:
        """Let this step be the run's last, as if its length were over; all ranks call this together."""
        self._trainer.state.progress.stopped_early = True

    def log(self, **values: float) -> None:
        """Add numbers, the same on all ranks, to the step's record in ``metrics.jsonl``.

        Raises:
            TaskError: a value is not a number.
        """
        for name, value in values.items():
            try:
                self._inner.log(**{name: float(value)})
            except (TypeError, ValueError) as error:
                raise TaskError(f"step.log({name}=...) takes a number, not {value!r:.100}.") from error

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Keep the error of a lost rank, and the state before the step, where a next group follows."""
        is_first = not (self._inner.passes or self.has_updated or self._is_updating)
        try:
            yield
            if is_first:  # what the script changed before needs no copy of the whole state
                self._inner.changed_before_pass = False
        except PeerLostError as error:
            if not self._outlives_losses:
                raise
            clear_frames(error)
            self.loss_of_rank = error
            states = self._trainer.states
            if states.valid:
                states.invalidate()
                # A first pass changes only buffers, and the task has kept what the script may have changed before it.
                if is_first and count_writes(self._parameters) == self._writes:
                    self._group.strategy.rollback()
                    states.keep_copy()

    def _backward_alone(self, loss: LossOfBatch) -> float:
        """Compute the mean loss and gradient of this rank's micro-batches, with which the body continues to its end.

        Hooks of the reducer are not called.
        """
        current = Pass(lambda model, microbatch: loss(microbatch.batch), self._inner.passes)
        parameters = [parameter for parameter in self._parameters if parameter.requires_grad]
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        total = weight = 0.0
        for microbatch in self._inner.microbatches:
            value = microbatch_loss(self._trainer.run, self._trainer.state.module, self.step, microbatch, current)
            for gradient, added in zip(
                sums, torch.autograd.grad(value.sum, parameters, allow_unused=True), strict=True
            ):
                if added is not None:
                    gradient.add_(added)
            total += float(value.sum.detach())
            weight += float(value.weight)
        for parameter, gradient in zip(parameters, sums, strict=True):
            parameter.grad = gradient.div_(weight or 1.0)
        return total / (weight or 1.0)

    def leave_group(self) -> None:
        """Release the group, whose connections the script's variable would keep open."""
        del self._inner, self._group, self._trainer

    @contextmanager
    def _adding_up(self, names: tuple[str, ...]) -> Iterator[None]:
        """Add a pass's gradients, of some optimizers' parameters or all, to those that wait for an update."""
        state = self._trainer.state
        if unknown := [name for name in names if name not in state.optimizers]:
            raise TaskError(f"there is no optimizer {unknown[0]!r}; the optimizers are {', '.join(state.optimizers)}.")
        waiting = {
            id(parameter): parameter.grad.clone()
            for parameter in self._parameters
            if parameter.grad is not None and id(parameter) not in self._used and not self._is_updating
        }
        self.left_training |= not all(model.training for model in self._trained)
        with self._tracker.at_work():
            yield
        wanted = {id(parameter) for name in names for parameter in state.parameters_of[name]}
        for parameter in self._parameters:
            if names and id(parameter) not in wanted:
                parameter.grad = None
            earlier = waiting.get(id(parameter))
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)
        self._used -= {id(parameter) for parameter in self._parameters if parameter.grad is not None}

    def record_evaluation(self, name: str, metrics: Mapping[str, float]) -> None:
        """Enter an evaluation into the metrics, as of the end of this step; all ranks then draw alike again.

        With ``best_metric`` that of "val" is entered when the step is committed, and may make its model the best.
        """
        if self.loss_of_rank is not None:
            return
        self._inner.align_random_numbers()
        if name == "val" and self._trainer.run.config.evaluation.best_metric is not None:
            self._trainer.state.progress.measured = dict(metrics)
        else:
            self._group.monitor.on_eval_end(name, self.step + 1, self.epoch or 0, metrics)


class OptimizerGuard:
    """Refuses steps of optimizers outside of :meth:`LoopStep.update`: clipping and sharding would miss them."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._is_open = False

    def __enter__(self) -> Self:
        self._handles = [optimizer.register_step_pre_hook(self._check) for optimizer in self._optimizers]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let optimizers step within the context."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def _check(self, *unused: object) -> None:
        if not self._is_open:
            raise TaskError(
                "optimizer.step() was called in the loop. Call step.update() instead, which steps it on all ranks "
                "alike; it takes the optimizer's name where there are several."
            )
