"""The model, callback, optimizers and schedulers that a task builds; those that cannot be trained are refused."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.core.errors import TaskError, join_names
from paceline.core.task import Callback, RunSchedule, Task
from paceline.parallel.sharded_state import memory_of


@contextmanager
def explain_missing_base(manifest: Mapping[str, Any]) -> Iterator[None]:
    """Add to a task's error where the frozen parameters were that a run has left out of its checkpoints.

    Args:
        manifest: the content of ``run.toml``.
    """
    try:
        yield
    except TaskError as error:
        base = manifest.get("base")
        if base is None or Path(base["address"]).exists():
            raise
        raise TaskError(
            f"{error}\nThe run's checkpoints hold what was trained; the frozen parameters are those of "
            f"{base['address']}, SHA-256 {base['sha256']}. Restore it there."
        ) from error


def build_task_model(task: Task, manifest: Mapping[str, Any] = MappingProxyType({})) -> nn.Module:
    """Build the task's model.

    Args:
        manifest: the content of ``run.toml``, if there is one.

    Raises:
        TaskError: it is not a module, or has no parameter to train.
    """
    with explain_missing_base(manifest):
        module = task.build_model()
    if not isinstance(module, nn.Module):
        raise TaskError(
            f"{type(task).__name__}.build_model returned a {type(module).__name__}; it must return a torch.nn.Module."
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise TaskError(
            f"{type(task).__name__}.build_model returned a model without a trainable parameter: "
            "there is nothing to train."
        )
    for name, parameter in module.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise TaskError(
                f"{name!r} has a hook by register_post_accumulate_grad_hook, which would see the gradient of one "
                "micro-batch alone. Change a step's gradients in a callback's on_before_optimizer_step, or between "
                "backward and update."
            )
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if is_lazy(tensor):
            raise TaskError(f"{name!r} has no shape yet. Call the model with one batch in build_model.")
        if memory_of(tensor).numel() < tensor.numel():
            raise TaskError(
                f"{name!r} has elements that share memory, as expand() and unfold() make them, so it can be neither "
                "loaded nor changed. Register a copy, by contiguous()."
            )
    for layer in module.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            # Autograd adds a sparse gradient entry by entry to the sum so far, so the sum of a row that occurs twice in
            # a micro-batch would depend on the micro-batches before it, and so on the number of ranks.
            layer.sparse = False
        if isinstance(layer, nn.SyncBatchNorm):
            raise TaskError(
                "nn.SyncBatchNorm takes the statistics of what the ranks compute at the moment, which depends on their "
                "number. Leave out convert_sync_batchnorm: Paceline averages the statistics over the micro-batches."
            )
    return module


def build_task_callback(task: Task, module: nn.Module, schedule: RunSchedule) -> Callback:
    """Build the task's callback; one that does nothing if it has none.

    Raises:
        TaskError: it is not a callback.
    """
    callback = task.build_callback(module, schedule)
    if callback is not None and not isinstance(callback, Callback):
        raise TaskError(
            f"{type(task).__name__}.build_callback returned a {type(callback).__name__}; it must return one "
            "paceline.Callback, or None."
        )
    return Callback() if callback is None else callback


def build_task_optimizers(task: Task, module: nn.Module) -> dict[str, Optimizer]:
    """Build the task's optimizers, by name; a single one is "main".

    Raises:
        TaskError: they are not optimizers, or train nothing.
    """
    built = task.build_optimizer(module)
    named = dict(built) if isinstance(built, Mapping) else {"main": built}
    for name, optimizer in named.items():
        if not isinstance(optimizer, Optimizer):
            raise TaskError(
                f"{type(task).__name__}.build_optimizer returned a {type(optimizer).__name__} for {name!r}; "
                "it must return a torch.optim.Optimizer, or a dict of them."
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if (closure and closure.default is closure.empty) and type(task).train_step is Task.train_step:
            raise TaskError(
                f"{type(optimizer).__name__} computes the loss itself, within its step. Define train_step, with "
                "step.update(closure=lambda: step.backward(self.loss)), or use another optimizer."
            )
    if not named or not any(_trainable(optimizer) for optimizer in named.values()):
        raise TaskError(f"{type(task).__name__}.build_optimizer returned no optimizer with a trainable parameter.")
    return named


def _trainable(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def build_task_scheduler(task: Task, optimizer: Optimizer, total_steps: int | None) -> Any:
    """Build the task's scheduler of an optimizer; None if it has none.

    Raises:
        TaskError: it is not a scheduler, or needs the number of steps, which a stream does not have.
    """
    if total_steps is not None:
        scheduler = task.build_scheduler(optimizer, total_steps)
        missing = [name for name in ("step", "state_dict", "load_state_dict") if not hasattr(scheduler, name)]
        if scheduler is not None and missing:
            raise TaskError(
                f"{type(task).__name__}.build_scheduler returned a {type(scheduler).__name__} without "
                f"{join_names(missing)}. Use a scheduler of torch.optim.lr_scheduler, such as LambdaLR, or add them."
            )
        return scheduler
    # Only what follows evaluations can do without the number of steps.
    needs = "a scheduler needs the number of steps, and a stream has no length. Give --max-steps."
    try:
        scheduler = task.build_scheduler(optimizer, 0)
    except (ValueError, ZeroDivisionError) as error:
        raise TaskError(f"{needs} (With 0 steps, build_scheduler fails: {error})") from error
    if scheduler is not None and not isinstance(scheduler, ReduceLROnPlateau):
        raise TaskError(needs)
    return scheduler
