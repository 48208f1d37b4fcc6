"""Models whose states are much larger than what else a process takes, measured as they train."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adam, Optimizer
from torch.utils.data import TensorDataset

import paceline.parallel.fsdp  # noqa: F401  # so that its imports are not taken for the model's memory
from benchmarks.tasks import Timed, WideMLP
from paceline.core.task import Task
from paceline_tasks.transformer import Transformer


@dataclass
class Measured(Timed):
    """Touches the libraries' code before anything is measured."""

    def note_imports(self) -> None:
        if self.probe._imports_kib is None:
            layers = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 4), nn.LayerNorm(4))
            layers(torch.zeros(2, 4, 4, 4)).sum().backward()
            Adam(layers.parameters()).step()
        super().note_imports()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        """Each rank reports, also one whose stage leaves the loss in its middle."""
        if self.probe.tick():
            rank = dist.get_rank() if dist.is_initialized() else 0
            self.probe.write(Path(f"{self.report}.{rank}"), loss=0.0)
        return super(Timed, self).loss(model, batch)


@dataclass
class MeasuredMLP(Measured, WideMLP):
    """20 million parameters and their momentum."""


@dataclass
class MeasuredTransformer(Measured, Transformer):
    """19 million parameters in six blocks, with Adam's state."""

    layers: int = 6
    width: int = 512
    heads: int = 8
    context: int = 32
    tied: bool = True

    def build_dataset(self, split: str) -> Any:
        self.note_imports()
        if split != "train":
            return None
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randint(256, (64, 33), dtype=torch.uint8, generator=generator))


class Convolutions(Task):
    """14 million parameters in six convolutions, on images of 8 by 8."""

    def build_model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, 512, 1)]
        for _ in range(6):
            layers += [nn.Conv2d(512, 512, 3, padding=1), nn.BatchNorm2d(512), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))

    def build_dataset(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(64, 3, 8, 8, generator=generator)
        return TensorDataset(images, torch.randint(10, (64,), generator=generator))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.01, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)


@dataclass
class MeasuredConvolutions(Measured, Convolutions):
    """The convolutions."""


@dataclass
class MeasuredNothing(Measured, Transformer):
    """A model of no size: what is left is what any process takes."""

    layers: int = 2
    width: int = 8
    heads: int = 2
    context: int = 32

    def build_dataset(self, split: str) -> Any:
        return MeasuredTransformer.build_dataset(self, split)  # type: ignore[arg-type]
