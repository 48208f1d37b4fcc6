"""The training of a task by a loop in plain PyTorch, with which Paceline on one process is compared.

All strategies are compared with one process, so a mistake that one process makes as well would be found nowhere. The
loop takes from Paceline only the micro-batches, the random keys and the calls of the task's callback; the rest is
written as a user of PyTorch would write it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import chain

import torch
from torch import nn
from torch.nn.utils.clip_grad import clip_grad_norm_
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.core.errors import ConfigError, TaskError
from paceline.core.task import Callback, Loss, RankInfo
from paceline.torch_internals import buffer_table
from paceline.training.evaluation import split_values
from paceline.training.reproducibility import (
    seed_microbatch,
    seed_model,
    seed_step,
    seed_transition,
    seed_update,
)
from paceline.training.run_context import RunContext
from paceline.training.step import announce_microbatch, overrides_train_step

AVERAGE = "the average of "
"""Before the name of a tensor of the moving average (``--ema``)."""


def _require_comparable(run: RunContext) -> None:
    """Refuse a run that the loop does not compute."""
    name = type(run.task).__name__
    if overrides_train_step(run.task):
        raise TaskError(f"{name} defines train_step, so its step is not the one of the loop.")
    if run.data.order is None:
        raise TaskError(f"the training data of {name} are a stream, and the loop reads data with a length.")
    if run.config.values.get("lr_scale"):
        raise ConfigError("--lr-scale is not in the loop.")


def train_plainly(run: RunContext, world_size: int = 1) -> dict[str, torch.Tensor]:
    """Train the run's task in a loop of plain PyTorch.

    Returns:
        The model's state by name; with ``--ema`` also that of its average, each name after :data:`AVERAGE`.

    Raises:
        UserError: the loop does not compute such a run, or the task cannot be trained.
    """
    assert world_size == 1
    _require_comparable(run)
    task, config, order = run.task, run.config, run.data.order
    assert order is not None
    assert run.data.total_steps is not None
    seed_model(config.training.seed)
    model = task.build_model()
    run.preparation.prepare(model)
    model = model.to(run.device).train()
    average = copy.deepcopy(model) if config.training.ema is not None else None
    callback = task.build_callback(model, run.run_schedule) or Callback()
    built = task.build_optimizer(model)
    optimizers = list(built.values()) if isinstance(built, Mapping) else [built]
    schedulers = [task.build_scheduler(optimizer, run.data.total_steps) for optimizer in optimizers]
    buffers = _Buffers(model)
    callback.attach(_alone(run), step=0, epoch=0)
    with closing(run.build_loader(workers=0)) as loader, closing(callback):
        for step in range(run.data.total_steps):
            epoch, step_in_epoch = divmod(step, order.steps_per_epoch)
            seed_step(config.training.seed, step)
            if step_in_epoch == 0:
                callback.on_epoch_begin(epoch)
            callback.on_step_begin(step, step_in_epoch)

            model.zero_grad()
            loss_sum = weight = 0.0
            for microbatch in loader.fetch(epoch, step_in_epoch, range(run.num_microbatches)):
                seed_microbatch(config.training.seed, step, microbatch.index)
                announce_microbatch(run, step, microbatch)
                loss, _ = split_values(task.loss(model, microbatch.batch))
                if not isinstance(loss, Loss):
                    loss = Loss(loss * microbatch.num_samples, microbatch.num_samples)
                loss.sum.backward()  # type: ignore[no-untyped-call]
                loss_sum, weight = loss_sum + loss.sum.item(), weight + float(loss.weight)
                buffers.end_microbatch(microbatch.num_samples)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= weight
                    if parameter.grad.is_sparse:  # SparseAdam shall update the rows whose gradient is not zero
                        parameter.grad = parameter.grad.to_dense().to_sparse(1)
            buffers.end_step()

            seed_update(config.training.seed, step)
            callback.on_gradients_reduced(due=False)
            callback.on_before_optimizer_step()
            if config.training.clip_norm is not None:
                clip_grad_norm_(model.parameters(), config.training.clip_norm)
            for optimizer in optimizers:
                optimizer.step()
            for scheduler in schedulers:
                if scheduler is not None and not isinstance(scheduler, ReduceLROnPlateau):
                    scheduler.step()
            if average is not None:
                assert config.training.ema is not None
                _move_average(average, model, config.training.ema if step else 0.0)
            callback.on_step_end(step + 1, loss_sum / weight)
            if step_in_epoch + 1 == order.steps_per_epoch:
                seed_transition(config.training.seed, step + epoch + 2)
                callback.on_epoch_end(epoch)
                if callback.should_stop:
                    break
        callback.on_fit_end()
    trained = dict(_tensors(model))
    if average is not None:
        trained |= {AVERAGE + name: value for name, value in _tensors(average) if name not in _derived(average)}
    return trained


class _Buffers:
    """The model's buffers: each micro-batch begins with the step's, and the step ends with their mean."""

    def __init__(self, model: nn.Module) -> None:
        self._entries = [
            (buffer_table(owner), name, buffer)
            for owner in model.modules()
            for name, buffer in buffer_table(owner).items()
            if buffer is not None
        ]
        self._begin_step()

    def _begin_step(self) -> None:
        self._base = [buffer.clone() for _, _, buffer in self._entries]
        self._sums = [
            torch.zeros_like(buffer, dtype=buffer.dtype if _has_mean(buffer) else torch.int64) for buffer in self._base
        ]
        self._changed = [False] * len(self._base)
        self._samples = 0
        self._microbatches = 0

    @torch.no_grad()
    def end_microbatch(self, samples: int) -> None:
        for index, (table, name, buffer) in enumerate(self._entries):
            base, total = self._base[index], self._sums[index]
            value = table[name]
            assert value is not None
            self._changed[index] |= not torch.equal(value, base)
            total += value * samples if _has_mean(base) else value.to(total.dtype) - base.to(total.dtype)
            table[name] = buffer.copy_(base)
        self._samples += samples
        self._microbatches += 1

    @torch.no_grad()
    def end_step(self) -> None:
        for index, (_, _, buffer) in enumerate(self._entries):
            base, total = self._base[index], self._sums[index]
            if not self._changed[index]:
                continue
            if _has_mean(base):
                buffer.copy_(total / self._samples)
            else:
                buffer.copy_(base + total.div(self._microbatches, rounding_mode="floor"))
        self._begin_step()


def _has_mean(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@torch.no_grad()
def _move_average(average: nn.Module, model: nn.Module, decay: float) -> None:
    """Average parameters and floating-point buffers; copy buffers without a mean: integers, masks with infinities."""
    pairs = zip(chain(average.parameters(), average.buffers()), chain(model.parameters(), model.buffers()), strict=True)
    for mean, value in pairs:
        if _has_mean(value) and value.isfinite().all():
            mean.lerp_(value, 1 - decay)
        else:
            mean.copy_(value)


def _derived(average: nn.Module) -> set[str]:
    """Return the buffers that a parametrization computes from its weight, and so not as an average."""
    return {
        f"{prefix}.{name}"
        for prefix, owner in average.named_modules()
        if isinstance(owner, ParametrizationList)
        for name, _ in owner.named_buffers()
    }


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _alone(run: RunContext) -> RankInfo:
    return RankInfo(
        rank=0,
        world_size=1,
        local_rank=0,
        device=run.device,
        directory=run.directory.path,
        log_every=run.config.records.log_every,
        gather=lambda value: [value],
        trains=False,
    )
