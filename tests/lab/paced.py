"""A task that goes no further than a file says: a test decides what is seen while a run is at work."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset, TensorDataset

import paceline
from paceline.core.task import BatchInfo


@dataclass
class Paced(paceline.Task):
    """Eight steps an epoch; a step may begin once the number in the file has reached it."""

    pace: str = ""
    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=16, microbatches=4, epochs=4)

    def build_model(self) -> nn.Module:
        return nn.Linear(6, 3)

    def build_dataset(self, split: str) -> Dataset[Any] | None:
        generator = torch.Generator().manual_seed(len(split))
        inputs = torch.randn(128 if split == "train" else 48, 6, generator=generator)
        return TensorDataset(inputs, inputs[:, :3].argmax(1))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1)

    def on_batch_begin(self, place: BatchInfo) -> None:
        while self.pace and place.split == "train" and int(Path(self.pace).read_text()) < place.step:
            time.sleep(0.01)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        return functional.cross_entropy(model(inputs), labels)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        inputs, labels = batch
        return {"accuracy": (model(inputs).argmax(1) == labels).float()}
