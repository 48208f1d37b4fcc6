"""Steps of passes and updates, which a task's ``train_step`` or a script's own loop puts together."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paceline.core.errors import ConfigError, TaskError
from paceline.core.task import Loss, LossFunction, LossResult, TrainStep
from paceline.data.samples import MicroBatch
from paceline.parallel.point_to_point import describe_tensor, empty_tensor
from paceline.parallel.reducer import StepSums
from paceline.parallel.strategy import ReducerStrategy
from paceline.parallel.world import World
from paceline.training.group_context import GroupContext
from paceline.training.reproducibility import deterministic_kernels, seed_between_passes, seed_microbatch, seed_update
from paceline.training.run_context import RunContext
from paceline.training.state_manager import StateManager
from paceline.training.step import Pass, SyncStep, announce_microbatch


class ComposedStep(SyncStep, TrainStep):
    """A step of passes and updates, which a task's ``train_step`` or a script's own loop puts together.

    Attributes:
        passes: how many it has made.

    Args:
        keeps_copy: copy the state first if ranks may be lost: a pass may fail after a change.
    """

    def __init__(self, run: RunContext, states: StateManager, group: GroupContext, *, keeps_copy: bool) -> None:
        super().__init__(run, states, group)
        if keeps_copy and group.can_lose_ranks:
            states.keep_copy()
        states.invalidate()  # the task's code may change it
        progress, data = states.state.progress, run.data
        self.module = states.state.module
        self.optimizers = states.state.optimizers
        self.step = progress.step
        self.epoch = None if data.epochs is None else progress.epoch
        self.progress = None if data.total_steps is None else self.step / data.total_steps
        self.logged: dict[str, float] = {}
        self.passes = 0
        self._updates = 0
        self._loss = 0.0
        seed_between_passes(run.config.training.seed, self.step, 0)

    def compute(self) -> None:
        """Let the task compute the step."""
        loss = self._run.task.train_step(self)
        if loss is not None:
            self._loss = float(loss)

    def commit(self) -> StepSums:
        """Make the step count.

        Raises:
            TaskError: it made no pass over the micro-batches.
        """
        if self._sums is None:
            raise TaskError(
                "each step must call step.backward or step.backward_over_batch: the ranks agree there whether to save, "
                "to stop or to continue."
            )
        with warnings.catch_warnings():  # about a schedule whose optimizer the task has not stepped yet
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
            self._states.state.advance()
        return self._group.commit(replace(self._sums, loss=self._loss), (), self._values | self.logged)

    def backward(self, loss: LossFunction) -> float:
        return self._run_pass(lambda model, microbatch: loss(model, microbatch.batch))

    def backward_over_batch(
        self, embed: Callable[[nn.Module, Any], torch.Tensor], loss: Callable[[torch.Tensor], torch.Tensor]
    ) -> float:
        strategy = self._group.strategy
        if not isinstance(strategy, ReducerStrategy) or self._states.is_collective:
            raise ConfigError(
                f"--strategy {', '.join(self._run.config.strategies)} shards the model, so all ranks must call it "
                "together, and step.backward_over_batch does not. Use --strategy ddp or zero1."
            )
        with self._in_pass(), deterministic_kernels(self._run.config, self._run.device):
            embedded = self._embed(strategy, embed)
            indices, sizes, rows = _gather_rows(self._group.world, embedded)
            value, gradient = self._loss_over_batch(rows, loss)
        parts = dict(zip(indices, torch.split(gradient, sizes), strict=True))

        def loss_by_chain_rule(model: nn.Module, microbatch: MicroBatch) -> Loss:
            # The reducer divides by the number of samples.
            product = embed(model, microbatch.batch) * (parts[microbatch.index] * len(rows))
            return Loss(product.sum(), float(microbatch.num_samples))

        self._run_pass(loss_by_chain_rule)
        self._loss = value
        return value

    def update(self, *names: str, clip_norm: float | None = None, closure: Callable[[], float] | None = None) -> None:
        state, monitor = self._states.state, self._group.monitor
        if unknown := [name for name in names if name not in self.optimizers]:
            raise TaskError(f"the step updates {unknown[0]!r}, but the optimizers are {', '.join(self.optimizers)}.")
        self._group.world.progress_tracker.move("optimizer")
        seed_update(self._run.config.training.seed, self.step, self._updates)
        self._updates += 1
        self.logged |= state.callback.on_gradients_reduced(due=monitor.is_due(self.step + 1))
        with deterministic_kernels(self._run.config, self._run.device):
            self._states.apply_gradients(names or tuple(self.optimizers), clip_norm, closure)
        if not names:
            self._log_norm()
        monitor.timer.mark("optimizer")

    def log(self, **values: float) -> None:
        self.logged |= values

    def _run_pass(self, loss: Callable[[nn.Module, MicroBatch], LossResult]) -> float:
        with self._in_pass():
            sums = self._reduce(Pass(loss, self.passes))
        self._sums = self._sums or sums
        self.passes += 1
        self._loss = sums.loss
        self.align_random_numbers()
        return sums.loss

    def _in_pass(self) -> AbstractContextManager[None]:
        """A rank may be lost in the pass: if nothing has changed the state before, it stays valid."""
        self.changed_before_pass = self.changed_before_pass or self._updates > 0 or self._states.has_changed
        return nullcontext() if self.changed_before_pass else self._states.unchanged()

    def align_random_numbers(self) -> None:
        """Let all ranks draw the same numbers from here on, after each has drawn for its own micro-batches."""
        seed_between_passes(self._run.config.training.seed, self.step, self.passes)

    def _embed(
        self, strategy: ReducerStrategy, embed: Callable[[nn.Module, Any], torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Compute the embeddings of this rank's micro-batches, without an effect on the model's buffers.

        Raises:
            TaskError: they are not a tensor with one row for each sample.
        """
        run, buffers = self._run, strategy.reducer.buffers
        embedded = {}
        self._group.world.progress_tracker.move("forward")
        buffers.begin()
        for microbatch in self.microbatches:
            seed_microbatch(run.config.training.seed, self.step, microbatch.index, self.passes)
            announce_microbatch(run, self.step, microbatch)
            with torch.no_grad(), run.autocast():
                rows: Any = embed(strategy.model, copy.deepcopy(microbatch.batch))
            buffers.reset()
            if not isinstance(rows, torch.Tensor) or rows.dim() == 0 or len(rows) != microbatch.num_samples:
                what = f"a tensor of shape {tuple(rows.shape)}" if isinstance(rows, torch.Tensor) else type(rows)
                raise TaskError(
                    f"the embeddings of a micro-batch must be a tensor with one row for each of its "
                    f"{microbatch.num_samples} samples, but they are {what}."
                )
            embedded[microbatch.index] = rows
        self._group.monitor.timer.mark("forward")
        return embedded

    def _loss_over_batch(
        self, rows: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[float, torch.Tensor]:
        """Compute the loss of all embeddings and its gradient, on rank 0, for all ranks.

        Raises:
            TaskError: the loss is not a scalar with a gradient.
        """
        world = self._group.world
        gradient, value = torch.zeros_like(rows), 0.0
        seed_between_passes(self._run.config.training.seed, self.step, self.passes)
        if world.rank == 0:  # ranks on other hardware could get other bits
            leaf = rows.detach().requires_grad_()
            with torch.enable_grad(), self._run.autocast():
                total: Any = loss(leaf)
            if not isinstance(total, torch.Tensor) or total.numel() != 1 or not total.requires_grad:
                raise TaskError("the loss over the batch must be a scalar tensor that depends on the embeddings.")
            total.backward()  # type: ignore[no-untyped-call]
            assert leaf.grad is not None
            gradient, value = leaf.grad, float(total.detach())
        world.broadcast_tensor(gradient)
        return float(world.broadcast_object(repr(value))), gradient


def _gather_rows(world: World, embedded: Mapping[int, torch.Tensor]) -> tuple[list[int], list[int], torch.Tensor]:
    """Gather the rows of all micro-batches; all ranks call this together.

    Returns:
        The numbers of the micro-batches in their order, the number of rows of each, and all rows.
    """
    described = world.all_gather_object([[index, describe_tensor(rows)] for index, rows in embedded.items()])
    sizes_of_ranks = [[shape[0] for _, (_, shape, _) in of_rank] for of_rank in described]
    if embedded:
        own = torch.cat(list(embedded.values()))
    else:
        dtype, shape, on_gpu = next(description for of_rank in described for _, description in of_rank)
        own = empty_tensor([dtype, [0, *shape[1:]], on_gpu], world.device)
    gathered = world.all_gather_rows(own, [sum(sizes) for sizes in sizes_of_ranks])
    parts: dict[int, torch.Tensor] = {}
    for of_rank, sizes, rows in zip(described, sizes_of_ranks, gathered, strict=True):
        pieces = torch.split(rows, sizes) if sizes else ()
        parts |= {index: piece for (index, _), piece in zip(of_rank, pieces, strict=True)}
    indices = sorted(parts)
    return indices, [len(parts[index]) for index in indices], torch.cat([parts[index] for index in indices])
