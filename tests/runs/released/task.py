"""The task of the runs in this directory, which must stay as it is: their checkpoints belong to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import TensorDataset

import paceline


@dataclass
class Largest(paceline.Task):
    """Which of four numbers is the largest?"""

    lr: float = 0.01

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4))

    def build_dataset(self, split: str) -> Any:
        numbers = torch.randn(96, 4, generator=torch.Generator().manual_seed(int(split == "test")))
        return TensorDataset(numbers, numbers.argmax(dim=1)) if split in ("train", "test") else None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=self.lr)

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        return StepLR(optimizer, 5)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"accuracy": (model(batch[0]).argmax(dim=1) == batch[1]).float()}
