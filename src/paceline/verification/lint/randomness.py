"""Random numbers that nobody keys, or that every shard gets alike."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import torch

from paceline.verification.lint.places import calls_watched, definition
from paceline.verification.lint.subject import Subject, same
from paceline.verification.report import Finding

_SEEDED = "Paceline keys torch's, Python's and numpy's global generators by sample or shard: draw from those."


@torch.no_grad()
def look_at_the_loss(subject: Subject) -> Iterator[Finding]:
    """The same shard twice gives the same loss; two shards do not draw the same numbers."""
    if not subject.groups:
        return
    samples = subject.groups[0]
    with calls_watched(_draws) as drawn:
        first = subject.loss(subject.model(training=True), samples)
    again = subject.loss(subject.model(training=True), samples)
    if not same(first, again):
        yield Finding(
            lint="unkeyed-randomness",
            message="the loss of one shard of one step comes out differently each time: it draws from a "
            f"generator of its own, so its value depends on who computes how many shards before. {_SEEDED}",
            place=drawn[-1] if drawn else definition(subject.task.loss),
        )
    with calls_watched(_seeds) as seeded:
        subject.loss(subject.model(training=True), samples, shard=0)
    left = _states()
    subject.loss(subject.model(training=True), samples, shard=1)
    for name, state in _states().items():
        if same(state, left[name]):
            yield Finding(
                lint="shared-randomness",
                message=f"the loss seeds {name} itself: every shard, on every rank, draws the same numbers "
                f"(dropout drops the same). Do not seed there. {_SEEDED}",
                place=seeded[-1] if seeded else definition(subject.task.loss),
            )


def look_at_the_data(subject: Subject) -> Iterator[Finding]:
    """The same sample of the same epoch is the same, whoever reads it."""
    dataset = subject.dataset
    if not hasattr(type(dataset), "__getitem__") or not hasattr(dataset, "__len__") or not len(dataset):
        return
    with calls_watched(_draws) as drawn:
        first = subject.sample(dataset, 0)
    if not same(first, subject.sample(dataset, 0)):
        yield Finding(
            lint="unkeyed-randomness",
            message="a sample of the training data comes out differently each time: it draws from a "
            f"generator of its own, so it depends on who read what before. {_SEEDED}",
            place=drawn[-1] if drawn else definition(type(dataset).__getitem__),
        )


def _states() -> dict[str, Any]:
    numpy_state: Any = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "random": torch.tensor([value % 2**32 for value in random.getstate()[1]]),
        "numpy": torch.from_numpy(numpy_state[1].astype(np.int64)),
    }


def _draws(frame: FrameType, event: str, argument: Any) -> bool:
    """A call to a generator that is not one of the global ones; numpy's calls cannot be watched."""
    if event != "c_call":
        return False
    owner = getattr(argument, "__self__", None)
    if isinstance(owner, random.Random):
        return owner is not getattr(random, "_inst", None)
    return argument is os.urandom


def _seeds(frame: FrameType, event: str, argument: Any) -> bool:
    if event == "c_call":
        return getattr(argument, "__name__", "") in ("seed", "manual_seed")
    return frame.f_code is torch.manual_seed.__code__ or frame.f_code is random.Random.seed.__code__
