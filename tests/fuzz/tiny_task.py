"""A task that trains within a second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline


@dataclass
class Tiny(paceline.Task):
    """A linear model on random data."""

    defaults = paceline.Defaults(global_batch_size=8, epochs=2)

    def build_model(self) -> nn.Module:
        """Features (B, 4) -> logits (B, 2)."""
        return nn.Linear(4, 2)

    def build_dataset(self, split: str) -> TensorDataset:
        """Random samples of every split."""
        return TensorDataset(torch.randn(32, 4), torch.randint(2, (32,)))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Cross-entropy."""
        return functional.cross_entropy(model(batch[0]), batch[1])
