"""A task of one's own: plain PyTorch in a dataclass, and one call that trains it.

    python examples/fashion_mnist.py
    torchrun --standalone --nproc-per-node=2 examples/fashion_mnist.py
    paceline train examples/fashion_mnist.py:Clothes --nproc 4

With the same number of threads a process (OMP_NUM_THREADS=1), all three end with the same weights,
bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline
from paceline_tasks.fashion_mnist import load_fashion_mnist


@dataclass
class Clothes(paceline.Task):
    """Ten kinds of clothes in pictures of 28 x 28 pixels. The fields are what --set and tuning change."""

    lr: float = 0.1
    width: int = 16

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=128, microbatches=4, epochs=3)

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, self.width, kernel_size=5, padding=2),
            nn.BatchNorm2d(self.width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(self.width, 2 * self.width, kernel_size=5, padding=2),
            nn.BatchNorm2d(2 * self.width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(7 * 7 * 2 * self.width, 10),
        )

    def build_dataset(self, split: str) -> TensorDataset | None:
        if split == "val":  # --val-fraction carves one out of "train"
            return None
        return TensorDataset(*load_fashion_mnist(split))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def build_scheduler(
        self, optimizer: torch.optim.Optimizer, total_steps: int
    ) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.lr, total_steps=total_steps, cycle_momentum=False
        )

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images / 255), labels)

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        images, labels = batch
        return {"accuracy": (model(images / 255).argmax(dim=1) == labels).float()}


if __name__ == "__main__":
    paceline.fit(Clothes())
