"""Means of means, and metrics averaged over unequal counts: a batch against its unequal parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from paceline.callback import BatchPlace
from paceline.task import Loss
from paceline.verification.lint.places import LastMean, definition
from paceline.verification.lint.subject import Subject, same
from paceline.verification.report import Finding

_RELATIVE = 1e-4


@torch.no_grad()
def look_at_the_loss(subject: Subject) -> Iterator[Finding]:
    """A mean over what samples have different numbers of is none that shards can be added up to."""
    model = subject.model(training=False)
    for samples in subject.groups:
        with LastMean() as mean:
            whole = subject.loss(model, samples)
        if not same(whole, subject.loss(model, samples)):
            return  # randomness that nobody keys is told of elsewhere
        parts = [subject.loss(model, part) for part in _parts(samples)]
        expected, found = _mean([whole]), _mean(parts)
        if _apart(expected, found):
            weighed = isinstance(subject.task.loss(model, subject.batch(samples)), Loss)
            what = (
                "its weight is not what its sum is over"
                if weighed
                else "it is a mean over what samples have different numbers of (tokens, labels that count): "
                "return paceline.Loss(sum, weight)"
            )
            yield Finding(
                lint="mean-of-means",
                message=f"the loss of a batch is {expected:.6g}, but its parts add up to {found:.6g}: {what}"
                "; or samples depend on each other, and so the loss on the number of shards.",
                place=mean.place or definition(subject.task.loss),
            )
            return


@torch.no_grad()
def look_at_the_metrics(subject: Subject) -> Iterator[Finding]:
    """A pair (mean, 1) counts a small block as much as a large one."""
    model = subject.model(training=False)
    whole_names = set(subject.task.build_metrics())
    told: set[str] = set()
    for samples in subject.groups:
        whole = _pairs(subject, model, samples)
        parts = [_pairs(subject, model, part) for part in _parts(samples)]
        for name, pair in whole.items():
            of_parts = [part[name] for part in parts if name in part]
            if name in told or name in whole_names or len(of_parts) < len(parts):
                continue
            expected, found = _mean([pair]), _mean(of_parts)
            if _apart(expected, found):
                told.add(name)
                yield Finding(
                    lint="unequal-counts",
                    message=f"the metric {name!r} of a batch is {expected:.6g}, but its parts add up to "
                    f"{found:.6g}: it is averaged over unequal counts. Return one value a sample, or "
                    "(sum, weight).",
                    place=definition(subject.task.metrics),
                )


def _parts(samples: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    cut = max(1, len(samples) // 3)
    return samples[:cut], samples[cut:]


def _pairs(subject: Subject, model: Any, samples: Sequence[Any]) -> dict[str, Loss]:
    pairs = {}
    batch = subject.batch(samples)
    subject.task.begin_batch(BatchPlace(split="val", step=0, number=0, samples=len(samples)))
    for name, value in subject.task.metrics(model, batch).items():
        if isinstance(value, torch.Tensor) and value.shape == (len(samples),):
            pairs[name] = Loss(value.double().sum(), len(samples))
        elif isinstance(value, tuple) and len(value) == 2:
            pairs[name] = Loss(torch.as_tensor(float(value[0])), float(value[1]))
    return pairs


def _mean(losses: Sequence[Loss]) -> float:
    weight = sum(float(loss.weight) for loss in losses)
    total = sum(float(loss.sum) for loss in losses)
    return total / weight if weight else 0.0


def _apart(left: float, right: float) -> bool:
    return abs(left - right) > _RELATIVE * max(abs(left), abs(right))
