"""A task that trains for a second or two, so that a disk can fail meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline


@dataclass
class Dots(paceline.Task):
    """Tells on which side of a plane a point is.

    Attributes:
        pause_s: of each micro-batch.
    """

    pause_s: float = 0.0
    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=8, microbatches=2)

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def build_dataset(self, split: str) -> TensorDataset:
        points = torch.randn(64, 4, generator=torch.Generator().manual_seed(len(split)))
        return TensorDataset(points, (points.sum(dim=1) > 0).long())

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(self.pause_s)
        return functional.cross_entropy(model(batch[0]), batch[1])
