"""Tasks that do one thing wrong each, and one that does nothing wrong."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import Dataset, Subset, TensorDataset

import paceline

FEATURES, CLASSES, WORDS = 6, 3, 5


@dataclass
class Right(paceline.Task):
    """Labels of words, of which samples have different numbers; dropout, batch norm, a schedule."""

    num: int = 96

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=64, microbatches=4)

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 8),
            nn.Dropout(0.1),
            nn.Flatten(1),
            nn.BatchNorm1d(8 * WORDS),
            nn.Linear(8 * WORDS, CLASSES * WORDS),
            nn.Unflatten(1, (CLASSES, WORDS)),
        )

    def build_dataset(self, split: str) -> Any:
        size = {"train": self.num, "val": 0, "test": 30}[split]
        if not size:
            return None
        generator = torch.Generator().manual_seed(len(split))
        words = torch.randn(size, WORDS, FEATURES, generator=generator)
        labels = torch.randint(0, CLASSES, (size, WORDS), generator=generator)
        # Every sample has at least one label that counts.
        labels[torch.arange(WORDS) > torch.randint(0, WORDS, (size, 1), generator=generator)] = -100
        return TensorDataset(words, labels)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1, momentum=0.9)

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        return StepLR(optimizer, step_size=2)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor | paceline.Loss:
        words, labels = batch
        total = functional.cross_entropy(model(words), labels, reduction="sum")
        return paceline.Loss(total, (labels != -100).sum())

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, Any]:
        words, labels = batch
        counts = labels != -100
        right = (model(words).argmax(dim=1) == labels) & counts
        return {"accuracy": (right.sum(), counts.sum())}


@dataclass
class MeanOfMeans(Right):
    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        words, labels = batch
        return functional.cross_entropy(model(words), labels)  # a mean over words


@dataclass
class UnequalCounts(Right):
    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, Any]:
        total, weight = super().metrics(model, batch)["accuracy"]
        return {"accuracy": (total / weight, 1)}


@dataclass
class StepsItsScheduler(Right):
    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        self.scheduler = super().build_scheduler(optimizer, total_steps)
        return self.scheduler

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor | paceline.Loss:
        self.scheduler.step()  # once a micro-batch
        return super().loss(model, batch)


@dataclass
class Padded(Right):
    """Pads its test data to a multiple of 8, as ``DistributedSampler`` does."""

    def build_dataset(self, split: str) -> Any:
        dataset = super().build_dataset(split)
        if split != "test":
            return dataset
        missing = -len(dataset) % 8
        return Subset(dataset, [*range(len(dataset)), *range(missing)])


@dataclass
class PaddedTensors(Padded):
    """The same, copied."""

    def build_dataset(self, split: str) -> Any:
        dataset = super().build_dataset(split)
        if split != "test":
            return dataset
        words, labels = zip(*(dataset[i] for i in range(len(dataset))), strict=True)
        return TensorDataset(torch.stack(words), torch.stack(labels))


@dataclass
class OwnGenerator(Right):
    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor | paceline.Loss:
        self.generator = getattr(self, "generator", None) or np.random.default_rng(0)
        noise = self.generator.normal()  # goes on from call to call
        total, weight = super().loss(model, batch)
        return paceline.Loss(total * (1 + 0.1 * noise), weight)


@dataclass
class Counts(Right):
    calls: int = 0

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor | paceline.Loss:
        self.calls += 1
        total, weight = super().loss(model, batch)
        return paceline.Loss(total * min(1.0, self.calls / 100), weight)


class Noisy(Dataset[Any]):
    def __init__(self, dataset: Any) -> None:
        self.dataset, self.random = dataset, random.Random(0)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        words, labels = self.dataset[number]
        return words * self.random.random(), labels  # goes on from sample to sample


@dataclass
class NoisyData(Right):
    def build_dataset(self, split: str) -> Any:
        dataset = super().build_dataset(split)
        return Noisy(dataset) if split == "train" else dataset


@dataclass
class SharedDropout(Right):
    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor | paceline.Loss:
        torch.manual_seed(0)  # each micro-batch drops the same
        return super().loss(model, batch)


@dataclass
class Unused(Right):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.add_module("spare", nn.Identity())
        model.spare.weight = nn.Parameter(torch.ones(3))
        return model


@dataclass
class Forgotten(Right):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model[0].parameters(), lr=0.1)


@dataclass
class TinyShards(Right):
    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=16, microbatches=4)


@dataclass
class ReadsTheRank(Right):
    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor | paceline.Loss:
        total, weight = super().loss(model, batch)
        return paceline.Loss(total * (1 + int(os.environ.get("RANK", "0"))), weight)  # the rank


@dataclass
class SharesItself(Right):
    def build_dataset(self, split: str) -> Any:
        dataset = super().build_dataset(split)
        if dataset is None or not dist.is_initialized():
            return dataset
        return Subset(dataset, range(dist.get_rank(), len(dataset), dist.get_world_size()))


@dataclass
class ScalesItsRate(Right):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1 * int(os.environ.get("WORLD_SIZE", "1")))  # by the world


class Squeezed(nn.Module):
    """A layer that computes something else where it runs in rank 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs() if os.environ.get("RANK") == "1" else x


@dataclass
class WrongLayer(Right):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        return nn.Sequential(*[*model][:2], Squeezed(), *[*model][2:])


@dataclass
class WrongBackward(Right):
    """Right forwards, and gradients of the first layer that rank 1 gets wrong by a half."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor | paceline.Loss:
        first = next(model.parameters())
        total, weight = super().loss(model, batch)
        if os.environ.get("RANK") == "1":
            total = total + 0.5 * (first.sum() - first.sum().detach())
        return paceline.Loss(total, weight)


@dataclass
class Plain(Right):
    """Nothing but layers."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(1), nn.Linear(FEATURES * WORDS, CLASSES * WORDS), nn.Unflatten(1, (CLASSES, WORDS))
        )


@dataclass
class Dies(Plain):
    """Rank 1 is gone in the first step, where the model is sharded."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor | paceline.Loss:
        if os.environ.get("RANK") == "1" and type(model).__name__.startswith("FSDP"):
            os._exit(3)
        return super().loss(model, batch)
