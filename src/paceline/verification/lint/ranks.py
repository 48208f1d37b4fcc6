"""A task that asks which rank it is: what it then computes depends on the number of processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist

from paceline.verification.lint.places import calls_watched
from paceline.verification.lint.subject import Subject, same
from paceline.verification.report import Finding

_VARIABLES = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
_READ = {*_VARIABLES, "SLURM_PROCID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}
_ASKING = {dist.get_rank.__code__, dist.get_world_size.__code__}
_IN_WORDS = {
    "model": "the model that build_model returns",
    "train": "the training data",
    "val": "the validation data",
    "test": "the test data",
    "rates": "the learning rates",
    "loss": "the loss",
}
_STEPS = 3


def look_at_the_ranks(subject: Subject) -> Iterator[Finding]:
    """What the first of one rank builds and computes, the second of two must build and compute as well."""
    alone = _built(subject)
    with _second_of_two(), calls_watched(_asks) as asked:
        # Anew: what is looked at keeps what it has built.
        second = _built(Subject(subject.task, subject.config))
    wrong = [name for name, value in alone.items() if not same(value, second[name])]
    if len(wrong) > 1 and "loss" in wrong:
        wrong.remove("loss")  # it follows from the others
    if wrong and asked:
        splits = any(name in ("train", "val", "test") for name in wrong)
        advice = (
            "Return all samples: Paceline shares them, and samples would be lost or seen twice."
            if splits
            else "Leave ranks out of it: the result would depend on the number of processes."
        )
        yield Finding(
            lint="reads-the-rank",
            message=f"{_listed(wrong)} differ{'s' if len(wrong) == 1 else ''} from rank to rank. {advice}",
            place=asked[0],
        )


def _listed(names: list[str]) -> str:
    words = [_IN_WORDS[name] for name in names]
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[:-1] else words)


def _built(subject: Subject) -> dict[str, Any]:
    """What a rank builds, and the loss of one batch."""
    model = subject.build()
    first = {"model": dict(model.state_dict())}
    sizes = {split: _outline(subject, split) for split in ("train", "val", "test")}
    rates = []
    for optimizer in subject.optimizers(model):
        scheduler = subject.task.build_scheduler(optimizer, max(_STEPS, subject.config.max_steps or 1))
        rates.append([group["lr"] for group in optimizer.param_groups])
        for _ in range(_STEPS if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler) else 0):
            optimizer.step()  # without gradients: nothing changes
            if not isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step()
            rates.append([group["lr"] for group in optimizer.param_groups])
    loss: Any = ()
    if subject.groups:
        with torch.no_grad():
            loss = tuple(subject.loss(subject.model(training=True), subject.groups[0]))
    return {**first, **sizes, "rates": rates, "loss": loss}


def _outline(subject: Subject, split: str) -> Any:
    """How many samples a split has, and its first."""
    dataset = subject.split(split)
    if not hasattr(type(dataset), "__getitem__") or not hasattr(dataset, "__len__"):
        return None
    return [len(dataset), subject.sample(dataset, 0) if len(dataset) else None]


@contextmanager
def _second_of_two() -> Iterator[None]:
    """Have this process take itself for rank 1 of 2: torch's own stand-in for a group, without a peer."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with mock.patch.dict(os.environ, _VARIABLES):
        dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()


def _asks(frame: FrameType, event: str, argument: Any) -> bool:
    if event != "call":
        return False
    if frame.f_code is os.environ.__class__.__getitem__.__code__:
        return frame.f_locals.get("key") in _READ
    return frame.f_code in _ASKING
