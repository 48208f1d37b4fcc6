"""The tasks that are measured: Paceline's own recipes, with a probe in ``loss``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from paceline.core.task import Defaults, Task
from paceline.insight.bench.probe import Probe
from paceline.training.tasks.fashion_mnist import FashionMNIST, FashionMNISTMLP


@dataclass
class ConvNetAlone(FashionMNIST):
    """Fashion-MNIST by the two-layer ConvNet, without any evaluation."""

    defaults: ClassVar[Defaults] = Defaults()

    def build_dataset(self, split: str) -> Any:
        """The training split only."""
        return super().build_dataset(split) if split == "train" else None


@dataclass
class Timed(Task):
    """Mixed into a task, measures whoever trains it: see :class:`paceline.insight.bench.probe.Probe`.

    Attributes:
        warmup: steps before the clock starts.
        steps: steps that are measured; the run must go on for one step more.
        loss_calls: calls of ``loss`` a step on rank 0 (its micro-batches).
        report: the file that rank 0 writes.
    """

    warmup: int = 0
    steps: int = 1
    loss_calls: int = 1
    report: str = "report.json"

    defaults: ClassVar[Defaults] = Defaults()

    def __post_init__(self) -> None:
        self.probe = Probe(warmup=self.warmup, steps=self.steps, ticks_per_step=self.loss_calls)

    def note_imports(self) -> None:
        """Take the memory held so far for the imports': called first of all, later calls do nothing."""
        # The first optimizer imports torch's compiler, 80 MiB that have nothing to do with who trains.
        parameter = torch.zeros(1, requires_grad=True)
        parameter.grad = torch.zeros(1)
        torch.optim.SGD([parameter], lr=0.0).step()
        self.probe.note_imports()

    def build_model(self) -> nn.Module:
        """The recipe's model."""
        self.note_imports()
        return super().build_model()

    def build_dataset(self, split: str) -> Any:
        """The recipe's training split; no other, so that nobody evaluates."""
        self.note_imports()
        return super().build_dataset(split) if split == "train" else None

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The recipe's mean loss; the clock is read before it."""
        done = self.probe.tick()
        loss = super().loss(model, batch)
        assert isinstance(loss, torch.Tensor)
        if done and (not dist.is_initialized() or dist.get_rank() == 0):
            self.probe.write(Path(self.report), float(loss.detach()))
        return loss


@dataclass
class TimedConvNet(Timed, FashionMNIST):
    """Fashion-MNIST by the two-layer ConvNet."""


@dataclass
class TimedMLP(Timed, FashionMNISTMLP):
    """Fashion-MNIST by the 784-32-10 MLP."""


@dataclass
class WideMLP(FashionMNISTMLP):
    """20 million parameters and few samples: for the memory of parameters, gradients and momentum."""

    def build_model(self) -> nn.Module:
        """A 784-4096-4096-10 MLP: images (B, 1, 28, 28) -> logits (B, 10)."""
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 4096),
            nn.ReLU(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, 10),
        )

    def build_dataset(self, split: str) -> TensorDataset:
        """2,048 random images, the same in every process."""
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(256, (2048, 1, 28, 28), dtype=torch.uint8, generator=generator)
        return TensorDataset(images, torch.randint(10, (2048,), generator=generator))


@dataclass
class TimedWideMLP(Timed, WideMLP):
    """The 20-million-parameter MLP."""


@dataclass
class DeepMLP(FashionMNISTMLP):
    """7 million parameters in eight layers of equal work: what every strategy can split."""

    def build_model(self) -> nn.Module:
        """A 784-1024-...-1024-10 MLP: images (B, 1, 28, 28) -> logits (B, 10)."""
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(784, 1024), nn.ReLU()]
        for _ in range(6):
            layers += [nn.Linear(1024, 1024), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(1024, 10))

    def build_dataset(self, split: str) -> TensorDataset | None:
        """The training split only, so that nobody evaluates."""
        return super().build_dataset(split) if split == "train" else None


@dataclass
class TimedDeepMLP(Timed, DeepMLP):
    """The deep MLP."""


@dataclass
class GiantMLP(WideMLP):
    """102 million parameters in 26 layers: 1.2 GiB with gradients and momentum."""

    def build_model(self) -> nn.Module:
        """A 784-2048-...-2048-10 MLP: images (B, 1, 28, 28) -> logits (B, 10)."""
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(784, 2048), nn.ReLU()]
        for _ in range(24):
            layers += [nn.Linear(2048, 2048), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(2048, 10))


@dataclass
class TimedGiantMLP(Timed, GiantMLP):
    """The 102-million-parameter MLP."""
