"""What the lints look at: the task, its model, and some of its samples."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from paceline.callback import BatchPlace, Horizon
from paceline.config import RunConfig
from paceline.data.permutation import derive_key
from paceline.data.samples import seed_everything
from paceline.task import Loss, Task
from paceline.training.evaluation import as_loss
from paceline.training.randomness import seed_model, seed_shard
from paceline.training.state import built_model

_SAMPLES, _GROUPS = 12, 3
_LINT = 97
"""Domain of the keys of what is looked at."""


class Subject:
    """A task to be looked at.

    Attributes:
        task: a copy of its own, which the lints may change.
        config: of the runs, with shards and batch.

    Args:
        task: what is looked at.
        config: with ``shards``, ``global_batch_size`` and ``max_steps``.
    """

    def __init__(self, task: Task, config: RunConfig) -> None:
        self.task = task
        self.config = config
        self._splits: dict[str, Any] = {}

    def build(self) -> nn.Module:
        """The model, as every rank builds it."""
        seed_model(self.config.seed)
        return built_model(self.task)

    @cached_property
    def _module(self) -> nn.Module:
        module, steps = self.build(), self.config.max_steps or 1
        # A task may keep what it builds, and use it in its loss.
        self.task.build_callback(module, Horizon(total_steps=steps, steps_per_epoch=steps))
        for optimizer in self.optimizers(module):
            self.task.build_scheduler(optimizer, steps)
        return module

    def optimizers(self, module: nn.Module) -> list[Optimizer]:
        """What the task optimizes a model with."""
        built = self.task.build_optimizer(module)
        return [*built.values()] if isinstance(built, Mapping) else [built]

    def model(self, *, training: bool) -> nn.Module:
        """A model to compute with: always in the same state."""
        return copy.deepcopy(self._module).train(training)

    @cached_property
    def dataset(self) -> Any:
        """The training data."""
        return self.split("train")

    def split(self, name: str) -> Any:
        """The dataset of a split, read once."""
        if name not in self._splits:
            self._splits[name] = self.task.build_dataset(name)
        return self._splits[name]

    def sample(self, dataset: Any, number: int) -> Any:
        """A sample, with the randomness that is keyed by it."""
        seed_everything(derive_key(self.config.seed, _LINT, number))
        return dataset[number]

    @cached_property
    def groups(self) -> list[list[Any]]:
        """Some lists of samples, from all over the training data; none where it is a stream that ends."""
        dataset = self.dataset
        wanted = _SAMPLES * _GROUPS
        if hasattr(type(dataset), "__getitem__") and hasattr(dataset, "__len__"):
            size = len(dataset)
            numbers = [index * size // wanted for index in range(wanted)] if size >= wanted else range(size)
            samples = [self.sample(dataset, number) for number in numbers]
        elif isinstance(dataset, torch.utils.data.IterableDataset):
            samples = list(islice(iter(dataset), wanted))
        else:
            samples = []
        groups = [samples[start : start + _SAMPLES] for start in range(0, len(samples), _SAMPLES)]
        return [group for group in groups if len(group) >= 4]

    def batch(self, samples: Sequence[Any]) -> Any:
        """What the task's methods get of these samples."""
        return self.task.collate(list(samples))

    def loss(self, model: nn.Module, samples: Sequence[Any], *, shard: int = 0) -> Loss:
        """The loss of a batch of these samples, with the randomness of a shard."""
        batch = self.batch(samples)
        seed_shard(self.config.seed, 0, shard)
        self.task.begin_batch(BatchPlace(split="train", step=0, number=shard, samples=len(samples)))
        return as_loss(self.task, self.task.loss(model, batch), len(samples))


def same(left: Any, right: Any) -> bool:
    """Whether two nested values hold the same bits."""
    mine, theirs = pytree.tree_leaves(left), pytree.tree_leaves(right)
    return len(mine) == len(theirs) and all(_equal(a, b) for a, b in zip(mine, theirs, strict=True))


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and bool(torch.equal(left, right))
    try:
        return bool((left == right) if not hasattr(left, "shape") else (left == right).all())
    except (TypeError, ValueError, AttributeError):
        return True  # nobody can say
