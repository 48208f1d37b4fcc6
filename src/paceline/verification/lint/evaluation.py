"""Samples that an evaluation sees twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Subset

from paceline.verification.lint.places import definition
from paceline.verification.lint.subject import Subject, same
from paceline.verification.report import Finding

_PADDED_UP_TO = 16


def look_at_duplicates(subject: Subject) -> Iterator[Finding]:
    """A split that was padded to a multiple of something begins anew at its end."""
    for split in ("val", "test"):
        dataset = subject.split(split)
        twice = _repeated(subject, dataset)
        if twice:
            yield Finding(
                lint="duplicated-samples",
                message=f"{twice} of the {split} data's {len(dataset)} samples are there twice, and count "
                "twice in its metrics. Return each sample once: Paceline shares them without padding.",
                place=definition(subject.task.build_dataset),
            )


def _repeated(subject: Subject, dataset: Any) -> int:
    if not hasattr(type(dataset), "__getitem__") or not hasattr(dataset, "__len__"):
        return 0
    inner: Any = dataset
    while isinstance(inner, Subset):
        twice = len(inner.indices) - len(set(map(int, inner.indices)))
        if twice:
            return twice
        inner = inner.dataset
    size = len(dataset)
    most = min(_PADDED_UP_TO, size // 2)
    if most < 1 or same(subject.sample(dataset, 0), subject.sample(dataset, 1)):
        return 0
    for padding in range(most, 0, -1):
        pairs = ((dataset[size - padding + index], dataset[index]) for index in range(padding))
        if all(same(last, first) for last, first in pairs):
            return padding
    return 0
