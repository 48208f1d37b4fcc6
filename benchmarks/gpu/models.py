"""The measured tasks: ResNet-50 and a GPT of 125 million parameters, trained in turns with others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from benchmarks.gpu.turns import Turns
from paceline.core.task import Callback, Defaults, RankInfo, RunSchedule, Task
from paceline_tasks.transformer import Transformer


class TakesTurns(Callback):
    """Trains when it is this contender's turn."""

    def __init__(self, directory: str, name: str, rounds: int) -> None:
        self._turns = Turns(Path(directory), name, rounds, rank=0)

    def attach(self, group: RankInfo, *, step: int, epoch: int) -> None:
        """Take this rank's number."""
        self._turns.rank = group.rank

    def on_step_begin(self, step: int, step_in_epoch: int) -> None:
        """Wait, if a turn begins."""
        self._turns.before_step(step)


@dataclass
class InTurns(Task):
    """Mixed into a task, trains it in turns.

    Attributes:
        turns: the directory of :class:`benchmarks.gpu.turns.Turns`.
        contender: this one's name.
        rounds: measured turns.
    """

    turns: str = ""
    contender: str = ""
    rounds: int = 1

    defaults: ClassVar[Defaults] = Defaults()

    def build_callback(self, model: nn.Module, schedule: RunSchedule) -> Callback:
        """Build the callback that waits."""
        return TakesTurns(self.turns, self.contender, self.rounds)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, added to what came in (He et al., "Deep Residual Learning", 2015)."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = 4 * inner
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True)),
            *(nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True)),
            *(nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer)),
        )
        same = stride == 1 and channels == outer
        shortcut = (nn.Conv2d(channels, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
        self.shortcut = nn.Identity() if same else nn.Sequential(*shortcut)

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        """(N, C, H, W) -> (N, 4 * inner, H / stride, W / stride)."""
        return functional.relu(self.body(x_NCHW) + self.shortcut(x_NCHW), inplace=True)


def resnet50(classes: int = 1000) -> nn.Module:
    """Return ResNet-50, 25.6 million parameters: (N, 3, H, W) -> logits (N, classes)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 64
    for inner, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(channels, inner, stride if block == 0 else 1))
            channels = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


@dataclass
class ResNet50(InTurns):
    """ResNet-50 on made-up images.

    Attributes:
        size: height and width of an image.
        images: how many there are.
    """

    size: int = 224
    images: int = 1024

    def build_model(self) -> nn.Module:
        """Channels last, as convolutions in bf16 are fastest."""
        return resnet50().to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    def build_dataset(self, split: str) -> Any:
        """Images (N, 3, size, size) uint8, labels (N,)."""
        if split != "train":
            return None
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(256, (self.images, 3, self.size, self.size), dtype=torch.uint8, generator=generator)
        return TensorDataset(images, torch.randint(1000, (self.images,), generator=generator))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """SGD with momentum, and a rate with which noise does not diverge."""
        return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=1e-4)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Mean cross-entropy."""
        images, labels = batch
        pixels = images.to(memory_format=torch.channels_last).float().div_(255)
        return functional.cross_entropy(model(pixels), labels)


@dataclass
class GPT(InTurns, Transformer):
    """GPT-2's smallest size: 12 layers, width 768, 50,304 tokens, 124 million parameters; its text is bytes."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    context: int = 1024
    vocabulary: int = 50_304
    tied: bool = True
    lr: float = 1e-4

    defaults: ClassVar[Defaults] = Defaults()

    def build_dataset(self, split: str) -> TensorDataset | None:
        """The windows for training alone: nothing is evaluated."""
        return super().build_dataset(split) if split == "train" else None
