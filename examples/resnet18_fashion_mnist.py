"""ResNet-18 on Fashion-MNIST, written by hand: batch norm and shortcuts under every strategy.

    paceline train examples/resnet18_fashion_mnist.py:ResNet18 --nproc 2
    paceline train examples/resnet18_fashion_mnist.py:ResNet18 --nproc 2 --strategy fsdp

``--set width=16`` is sixteen times cheaper, for a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset

import paceline
from paceline_tasks.fashion_mnist import load_fashion_mnist


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, and a shortcut around them.

    He et al., "Deep Residual Learning for Image Recognition", 2016, with option B where sizes change.

    Args:
        channels: of the input.
        out: channels of the output.
        stride: of the first convolution; 2 halves height and width.
    """

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, channels, H, W) -> (B, out, H / stride, W / stride)."""
        hidden = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


def resnet18(width: int, classes: int) -> nn.Sequential:
    """Images (B, 1, 28, 28) -> logits (B, classes); 11.2 million parameters at a width of 64.

    The first convolution is 3x3 and nothing is pooled, as is usual for small images. A sequence, so that a
    pipeline can cut it anywhere.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    channels = width
    for group in range(4):
        out = width * 2**group
        layers += [BasicBlock(channels, out, stride=1 if group == 0 else 2), BasicBlock(out, out, stride=1)]
        channels = out
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers)


@dataclass
class ResNet18(paceline.Task):
    """Ten kinds of clothes, by SGD with momentum under a one-cycle schedule."""

    lr: float = 0.1
    width: int = 64
    momentum: float = 0.9
    weight_decay: float = 5e-4

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(
        global_batch_size=128, microbatches=4, epochs=3, best_metric="accuracy:max"
    )

    def build_model(self) -> nn.Module:
        return resnet18(self.width, classes=10)

    def build_dataset(self, split: str) -> TensorDataset | None:
        if split == "val":  # --val-fraction carves one out of "train"
            return None
        return TensorDataset(*load_fashion_mnist(split))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(
            model.parameters(),
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=True,
        )

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> OneCycleLR:
        return OneCycleLR(optimizer, max_lr=self.lr, total_steps=total_steps, cycle_momentum=False)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(model(scaled(images)), labels)

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        images, labels = batch
        logits = model(scaled(images))
        return {
            "accuracy": (logits.argmax(dim=1) == labels).float(),
            "loss": functional.cross_entropy(logits, labels, reduction="none"),
        }


def scaled(images: torch.Tensor) -> torch.Tensor:
    """uint8 pixels -> float32 of mean 0 and standard deviation 1 over the training images, same shape."""
    return (images.float() / 255 - 0.2860) / 0.3530


if __name__ == "__main__":
    paceline.fit(ResNet18())
