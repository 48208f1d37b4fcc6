"""Small tasks that use what a task may use, and a place to interrupt them; others are in the files beside this one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.utils.data import TensorDataset

import paceline
from paceline.core.task import BatchInfo

CLASSES, FEATURES = 3, 12


class Interruption:
    """Sends this process a SIGTERM when a loss is computed for the ``at``-th time."""

    at = 0
    calls = 0

    def count(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


interruption = Interruption()


def points(num: int, seed: int = 0) -> TensorDataset:
    """Points around one centre a class, so near each other that no model is right about all."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num) % CLASSES
    noise = torch.randn(num, FEATURES, generator=generator)
    return TensorDataset(noise + 0.7 * functional.one_hot(labels, FEATURES), labels)


@dataclass
class Points(paceline.Task):
    """An MLP and SGD; what the other tasks change something of."""

    lr: float = 0.1
    num: int = 100
    num_val: int = 0
    num_test: int = 0

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=16, microbatches=4, epochs=2)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    def build_dataset(self, split: str) -> Any:
        number = {"train": self.num, "val": self.num_val, "test": self.num_test}[split]
        return points(number, seed=len(split)) if number else None

    def build_optimizer(self, model: nn.Module) -> Optimizer | Mapping[str, Optimizer]:
        return SGD(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor | paceline.Loss:
        if model.training:
            interruption.count()
        return functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, Any]:
        return {"accuracy": (model(batch[0]).argmax(dim=1) == batch[1]).float()}


@dataclass
class Annealed(Points):
    """A loss whose weight follows the progress of the run."""

    def on_batch_begin(self, info: BatchInfo) -> None:
        self.info = info

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor | paceline.Loss:
        interruption.count()
        mean = functional.cross_entropy(model(batch[0]), batch[1])
        return (
            mean * (1 - 0.9 * (self.info.progress or 0.0))
            + 0.01 * (self.info.epoch or 0) * model(batch[0]).square().mean()
        )


@dataclass
class Everything(Points):
    """Convolution, batch norm, dropout, AdamW, and a schedule that waits for the validation loss."""

    lr: float = 0.02
    num: int = 250

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=48, microbatches=12, epochs=40)

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, FEATURES)),
            nn.Conv1d(1, 6, kernel_size=3),
            nn.BatchNorm1d(6),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(6 * (FEATURES - 2), CLASSES),
        )

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=self.lr)

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> ReduceLROnPlateau:
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


@dataclass
class Layered(Points):
    """Pairs of linear layers that can be split, with a norm in between; AdamW.

    Attributes:
        double: compute in float64.
    """

    lr: float = 0.02
    num: int = 107
    num_val: int = 20
    double: bool = False

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=24, microbatches=4, epochs=2)

    def build_model(self) -> nn.Module:
        model = nn.Sequential(
            *(nn.Linear(FEATURES, 16), nn.GELU(), nn.Linear(16, FEATURES)),
            *(nn.LayerNorm(FEATURES), nn.Dropout(0.2)),
            *(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
        )
        return model.double() if self.double else model

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor | paceline.Loss:
        features = batch[0].double() if self.double else batch[0]
        return super().loss(model, [features, batch[1]])

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, Any]:
        features = batch[0].double() if self.double else batch[0]
        return super().metrics(model, [features, batch[1]])


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(8, CLASSES)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.seen: torch.Tensor

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(self.counted(features))

    def counted(self, features: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return self.body(features)


@dataclass
class TwoOptimizers(Points):
    """Two optimizers with a schedule each, samples of different weights, sums with weights as metrics."""

    num: int = 107

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=24, microbatches=5, epochs=2)

    def build_model(self) -> nn.Module:
        return TwoParts()

    def build_optimizer(self, model: nn.Module) -> Mapping[str, Optimizer]:
        assert isinstance(model, TwoParts)
        return {
            "body": SGD(model.body.parameters(), lr=self.lr, momentum=0.9, nesterov=True),
            "head": AdamW(model.head.parameters(), lr=0.01),
        }

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: 1 - step / (total_steps + 1))

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> paceline.Loss:
        if model.training:
            interruption.count()
        weights = 1.0 + batch[1]
        losses = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return paceline.Loss((losses * weights).sum(), weights.sum())

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, Any]:
        right = model(batch[0]).argmax(dim=1) == batch[1]
        weights = 1.0 + batch[1]
        return {"accuracy": right.float(), "weighted": ((right * weights).sum(), weights.sum())}


@dataclass
class ManyMetrics(Points):
    """Metrics of every kind, on a validation split that three ranks cannot share evenly."""

    num: int = 32
    num_val: int = 37
    num_test: int = 3

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, Any]:
        scores = model(batch[0]).softmax(dim=1)
        positive = (batch[1] == 0).long()
        return {
            "accuracy": (scores.argmax(dim=1) == batch[1]).float(),
            "recall": (((scores[:, 0] > 0.4) * positive).sum(), positive.sum()),
            "auroc": (scores[:, 0], positive),
            "f1": (scores.argmax(dim=1), batch[1]),
            "mean": (scores[:, 0],),
        }

    def build_metrics(self) -> Mapping[str, Any]:
        from torchmetrics import MeanMetric
        from torchmetrics.classification import BinaryAUROC, MulticlassF1Score

        return {
            "auroc": BinaryAUROC(),
            "f1": MulticlassF1Score(num_classes=CLASSES, average="macro"),
            "mean": MeanMetric(),
        }


@dataclass
class WorseAndWorse(Points):
    """Its "score" is best at the first evaluation, after which it only falls."""

    num_val: int = 10
    num_test: int = 10

    def build_model(self) -> nn.Module:
        return TwoParts()

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, Any]:
        assert isinstance(model, TwoParts)
        return {"score": (-float(model.seen), 1.0), "undefined": (0.0, 0.0)}


@dataclass
class Lagging(Points):
    """Rank 1 needs 40 ms longer for a micro-batch than the others."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        if os.environ.get("RANK") == "1":
            time.sleep(0.04)
        return super().loss(model, batch)
