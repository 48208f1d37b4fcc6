"""Parameters that nothing trains, batch norm over too few values, schedulers that the task steps itself."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.callback import Horizon
from paceline.verification.lint.places import definition, own_caller
from paceline.verification.lint.subject import Subject
from paceline.verification.report import Finding

_LEAST_VALUES = 16
_NAMED = 3


def look_at_the_gradients(subject: Subject) -> Iterator[Finding]:
    """A parameter without a gradient is not trained; nor is one that no optimizer has."""
    if not subject.groups:
        return
    model = subject.model(training=True)
    for number, samples in enumerate(subject.groups):
        subject.loss(model, samples, shard=number).sum.backward()  # type: ignore[no-untyped-call]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    unused = [name for name, parameter in trained.items() if parameter.grad is None]
    if unused:
        yield Finding(
            lint="unused-parameters",
            message=f"{_listed(unused)} get no gradient from the loss: they are not trained, "
            "and DistributedDataParallel would wait for them. Remove or freeze them (requires_grad_(False)).",
            place=definition(subject.task.build_model),
        )
    held = {id(p) for o in subject.optimizers(model) for group in o.param_groups for p in group["params"]}
    forgotten = [name for name, parameter in trained.items() if id(parameter) not in held]
    if forgotten:
        yield Finding(
            lint="unused-parameters",
            message=f"{_listed(forgotten)} are in no optimizer: they are never updated. Give them to one, or "
            "freeze them by requires_grad_(False).",
            place=definition(subject.task.build_optimizer),
        )


@torch.no_grad()
def look_at_batch_norm(subject: Subject) -> Iterator[Finding]:
    """A shard's statistics are those of its own values only."""
    model = subject.model(training=True)
    norms = {name: child for name, child in model.named_modules() if isinstance(child, _BatchNorm)}
    samples = [sample for group in subject.groups for sample in group]
    shards, batch = subject.config.shards, subject.config.global_batch_size
    assert isinstance(shards, int)
    assert batch is not None
    size = max(batch // shards, min(batch, subject.task.min_shard))
    if not norms or not samples:
        return
    few: dict[str, int] = {}

    def look(name: str, inputs: Sequence[Any]) -> None:
        per_sample = inputs[0].numel() / inputs[0].shape[1] / len(samples)
        values = int(per_sample * size)
        if values < _LEAST_VALUES:
            few[name] = values

    for name, child in norms.items():
        child.register_forward_pre_hook(lambda _, inputs, name=name: look(name, inputs))
    subject.loss(model, samples)
    if few:
        name, values = min(few.items(), key=lambda item: item[1])
        yield Finding(
            lint="tiny-batch-norm",
            message=f"batch norm {name!r} takes its mean and variance over {values} values, those of a shard "
            f"of {size} samples. Use fewer --shards, a greater --global-batch-size, or a norm that does not "
            "depend on the batch (GroupNorm, LayerNorm).",
            place=definition(subject.task.build_model),
        )


def look_at_the_schedulers(subject: Subject) -> Iterator[Finding]:
    """Paceline steps a scheduler once a step; a loss is computed once a shard."""
    task = copy.copy(subject.task)
    model = subject.model(training=True)
    steps = subject.config.max_steps or 1
    callback = task.build_callback(model, Horizon(total_steps=steps, steps_per_epoch=steps))
    places: list[str | None] = []
    stepping = Subject(task, subject.config)
    for optimizer in stepping.optimizers(model):
        scheduler = task.build_scheduler(optimizer, steps)
        if scheduler is not None:
            scheduler.step = _noting(scheduler.step, places)
    callback.step_begins(0, 0)
    for samples in subject.groups:
        stepping.loss(model, samples)
    callback.gradients_ready()
    if places:
        yield Finding(
            lint="scheduler-steps",
            message="the task steps its scheduler itself: once a shard, and Paceline once more a step. Leave "
            "that to Paceline, and return the scheduler from build_scheduler.",
            place=next((place for place in places if place), definition(subject.task.build_scheduler)),
        )


def _noting(step: Callable[..., Any], places: list[str | None]) -> Callable[..., Any]:
    def noted(*arguments: Any, **named: Any) -> Any:
        places.append(own_caller(sys._getframe(1)))
        return step(*arguments, **named)

    return noted


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"the parameters {', '.join(names[:_NAMED])}{more}"
