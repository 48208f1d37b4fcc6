"""Awkward tasks for ``golden_hashes.py``: each has one thing that is easy to get wrong.

They use as little of Paceline as a task can, so that one file works with many versions of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import IterableDataset, TensorDataset

import paceline

CLASSES, FEATURES, HIDDEN = 3, 12, 16
HOLD_STEP = 5
"""Where training waits while there is a file of the name that GOLDEN_HOLD says: it is killed there."""


def points(num: int, seed: int) -> TensorDataset:
    """Points around one centre a class, so near each other that no model is right about all."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num) % CLASSES
    noise = torch.randn(num, FEATURES, generator=generator)
    return TensorDataset(noise + 0.7 * functional.one_hot(labels, FEATURES), labels)


@dataclass
class Plain(paceline.Task):
    """An MLP and SGD with momentum; the other tasks each change one part of it."""

    num: int = 96
    lr: float = 0.1

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))

    def build_dataset(self, split: str) -> Any:
        sizes = {"train": self.num, "val": 29, "test": 31}
        return points(sizes[split], seed=sizes[split])

    def build_optimizer(self, model: nn.Module) -> Optimizer | Mapping[str, Optimizer]:
        return SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        return {"accuracy": (model(batch[0]).argmax(dim=1) == batch[1]).float()}

    def on_batch_begin(self, place: Any) -> None:
        hold = os.environ.get("GOLDEN_HOLD")
        while hold and place.split == "train" and place.step >= HOLD_STEP and Path(hold).exists():
            time.sleep(0.01)


@dataclass
class BatchNorm(Plain):
    """Statistics of a micro-batch in the forward, and running ones in buffers."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            *(nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU()),
            *(nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU()),
            nn.Linear(HIDDEN, CLASSES),
        )


@dataclass
class Dropout(Plain):
    """Randomness in the forward."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            *(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Dropout(0.3)),
            *(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Dropout(0.3)),
            nn.Linear(HIDDEN, CLASSES),
        )

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=0.01)


@dataclass
class Uneven(Plain):
    """The last batch of each epoch is short: it has too few samples for as many micro-batches as the others."""

    num: int = 99


@dataclass
class TwoOptimizers(Plain):
    """Two optimizers of different kinds, with a schedule each."""

    def build_optimizer(self, model: nn.Module) -> Mapping[str, Optimizer]:
        assert isinstance(model, nn.Sequential)
        return {
            "body": SGD(model[0].parameters(), lr=self.lr, momentum=0.9, nesterov=True),
            "head": AdamW(model[2].parameters(), lr=0.01),
        }

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: 1 - step / (total_steps + 1))


class PointStream(IterableDataset[Any]):
    """Points in a fixed order, each with new noise whenever it is read."""

    def __init__(self, num: int) -> None:
        self._points = points(num, seed=num)

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self._points)):
            features, label = self._points[index]
            yield features + 0.01 * torch.rand(FEATURES), label


@dataclass
class Stream(Plain):
    """Data that can only be read from its beginning; its end comes as a surprise."""

    num: int = 90

    def build_dataset(self, split: str) -> Any:
        return PointStream(self.num) if split == "train" else super().build_dataset(split)
