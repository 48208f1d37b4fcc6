"""A step that the task computes itself, with :meth:`Task.train_step`: passes over the micro-batches, and updates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from paceline.core.errors import ConfigError, TaskError
from paceline.core.task import Loss, Task
from paceline.core.train_step import LossFunction, TrainStep
from paceline.data.samples import MicroBatch
from paceline.parallel.microbatches import ReducerStrategy
from paceline.parallel.point_to_point import describe_tensor, empty_tensor
from paceline.parallel.reducer import StepSums
from paceline.parallel.world import World
from paceline.training.group_context import GroupContext
from paceline.training.reproducibility import (
    deterministic_kernels,
    seed_between_passes,
    seed_microbatch,
    seed_update,
)
from paceline.training.run_context import RunContext
from paceline.training.state_manager import StateManager
from paceline.training.step import Pass, announce_microbatch

_STRATEGIES = frozenset({"single", "ddp", "zero1", "fsdp"})


def overrides_train_step(task: Task) -> bool:
    """Return whether the task computes its steps itself."""
    return type(task).train_step is not Task.train_step


def require_train_step_support(run: RunContext) -> None:
    """Refuse options under which a task cannot compute its steps itself.

    Raises:
        ConfigError: names the option.
    """
    if not overrides_train_step(run.task):
        return
    config = run.config
    reasons = {
        f"--strategy {', '.join(config.strategies)}": not set(config.strategies) <= _STRATEGIES,
        f"--reduction {config.parallel.reduction}": config.reducer not in ("exact", "allreduce"),
        "--precision fp16": config.training.precision == "fp16",
        "--sdc-check-every": bool(config.recovery.sdc_check_every),
        **dict.fromkeys(config.changes.own_state, True),
    }
    wrong = [option for option, applies in reasons.items() if applies]
    if wrong:
        raise ConfigError(
            f"{type(run.task).__name__} defines train_step, which works with --strategy single, ddp, zero1 and fsdp, "
            "--reduction exact and allreduce, --precision fp32 and bf16, and without --sdc-check-every and "
            f"--local-sgd-steps; it does not work with {' and '.join(wrong)}."
        )


class _Reduce(Protocol):
    def __call__(
        self, group: GroupContext, microbatches: Sequence[MicroBatch], *, is_first: bool
    ) -> tuple[Sequence[float], StepSums]: ...


class ComposedStep(TrainStep):
    """One step of a task that overrides ``train_step``.

    Attributes:
        logged: what the step adds to the metrics.
        updated_before_pass: whether an update came before a pass, so that a pass that fails leaves half a step.

    Args:
        states: this rank's copy of the state.
        microbatches: this rank's.
        reduce: runs one pass: forward and backward of the micro-batches, and the sums over all ranks.
    """

    def __init__(
        self,
        run: RunContext,
        states: StateManager,
        group: GroupContext,
        microbatches: Sequence[MicroBatch],
        reduce: _Reduce,
    ) -> None:
        self._run, self._states, self._group = run, states, group
        self._microbatches, self._reduce = microbatches, reduce
        progress, data = states.state.progress, run.data
        self.module, self.optimizers = states.state.module, states.state.optimizers
        self.step = progress.step
        self.epoch = None if data.steps_per_epoch is None else self.step // data.steps_per_epoch
        self.progress = None if data.total_steps is None else self.step / data.total_steps
        self.logged: dict[str, float] = {}
        self.updated_before_pass = False
        self._first: StepSums | None = None
        self._passes = self._updates = 0
        self._last_loss = 0.0

    def run(self) -> StepSums:
        """Let the task compute the step; return its sums.

        Raises:
            TaskError: the task made no pass over the micro-batches.
        """
        task = self._run.task
        seed_between_passes(self._run.config.training.seed, self.step, 0)
        loss = task.train_step(self)
        if self._first is None:
            raise TaskError(
                f"{type(task).__name__}.train_step must call step.backward or step.backward_over_batch in each step: "
                "the ranks agree there whether to save, to stop or to continue."
            )
        return replace(self._first, loss=self._last_loss if loss is None else float(loss))

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
        with deterministic_kernels(self._run.config, self._run.device):
            embedded = self._embed(strategy, embed)
            indices, sizes, rows = _gather_rows(self._group.world, embedded)
            value, gradient = self._loss_over_batch(rows, loss)
        parts = dict(zip(indices, torch.split(gradient, sizes), strict=True))

        def loss_by_chain_rule(model: nn.Module, microbatch: MicroBatch) -> Loss:
            # The reducer divides by the number of samples.
            product = embed(model, microbatch.batch) * (parts[microbatch.index] * len(rows))
            return Loss(product.sum(), float(microbatch.num_samples))

        self._run_pass(loss_by_chain_rule)
        self._last_loss = value
        return value

    def update(self, *names: str, closure: Callable[[], float] | None = None) -> None:
        state, monitor = self._states.state, self._group.monitor
        if unknown := [name for name in names if name not in self.optimizers]:
            raise TaskError(
                f"{type(self._run.task).__name__}.train_step updates {unknown[0]!r}, but build_optimizer returned "
                f"{', '.join(self.optimizers)}."
            )
        self._group.world.progress_tracker.move("optimizer")
        seed_update(self._run.config.training.seed, self.step, self._updates)
        self._updates += 1
        self.logged |= state.callback.on_gradients_reduced(due=monitor.is_due(self.step + 1))
        with deterministic_kernels(self._run.config, self._run.device):
            self._states.apply_gradients(names or tuple(self.optimizers), closure)
        monitor.timer.mark("optimizer")

    def log(self, **values: float) -> None:
        self.logged |= values

    def _run_pass(self, loss: Callable[[nn.Module, MicroBatch], torch.Tensor | Loss]) -> float:
        self.updated_before_pass |= self._updates > 0
        self._group.runner.current_pass = Pass(loss, self._passes)
        _, sums = self._reduce(self._group, self._microbatches, is_first=self._first is None)
        self._first = self._first or sums
        self._passes += 1
        self._last_loss = sums.loss
        seed_between_passes(self._run.config.training.seed, self.step, self._passes)
        return sums.loss

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
        for microbatch in self._microbatches:
            seed_microbatch(run.config.training.seed, self.step, microbatch.index, self._passes)
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
        seed_between_passes(self._run.config.training.seed, self.step, self._passes)
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
