"""Fashion-MNIST: a small ConvNet that reaches 90.5 % in three epochs, and an MLP for benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset

from paceline.data.fashion_mnist import FILES, load_fashion_mnist
from paceline.inference import Inference, TensorSpec
from paceline.task import Defaults, Task

PIXEL_MEAN, PIXEL_STD = 0.2860, 0.3530
"""Of the 60,000 training images, on a scale of 0 to 1."""

LABELS = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
"""The classes, by number."""


@dataclass
class FashionMNIST(Task):
    """Two convolutions with batch norm and one linear layer, by SGD under a one-cycle schedule.

    The schedule is Smith & Topin's "Super-Convergence" (https://arxiv.org/abs/1708.07120).

    Attributes:
        lr: the peak of the one-cycle schedule.
        momentum: of SGD, constant over the cycle.
        weight_decay: of SGD.
    """

    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0

    defaults: ClassVar[Defaults] = Defaults(global_batch_size=128, shards=4, epochs=3, best="accuracy:max")

    def build_model(self) -> nn.Module:
        """A ConvNet: images (B, 1, 28, 28) -> logits (B, 10); 29,000 parameters."""
        return nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5, padding=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=5, padding=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(7 * 7 * 32, 10),
        )

    def build_dataset(self, split: str) -> TensorDataset | None:
        """The published splits, "train" (60,000) and "test" (10,000); ``--val-fraction`` carves a "val"."""
        return TensorDataset(*load_fashion_mnist(split)) if split in FILES else None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """SGD with momentum."""
        return SGD(model.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> OneCycleLR:
        """Up to ``lr`` in the first 30 % of the steps, then down to almost nothing."""
        return OneCycleLR(
            optimizer, max_lr=self.lr, total_steps=total_steps, pct_start=0.3, cycle_momentum=False
        )

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        """Mean cross-entropy."""
        images, labels = batch
        return functional.cross_entropy(model(normalise(images)), labels)

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, Any]:
        """Accuracy (0 or 1) and cross-entropy of each sample."""
        images, labels = batch
        logits = model(normalise(images))
        return {
            "accuracy": (logits.argmax(dim=1) == labels).float(),
            "loss": functional.cross_entropy(logits, labels, reduction="none"),
        }

    def build_inference(self, model: nn.Module) -> Inference:
        """Images as the dataset has them, uint8 (B, 1, 28, 28), -> probabilities (B, 10) and labels (B,)."""
        return Inference(
            module=Classifier(model),
            inputs={"image": TensorSpec(dtype="uint8", shape=(1, 28, 28))},
            outputs={
                "probabilities": TensorSpec(dtype="float32", shape=(len(LABELS),)),
                "label": TensorSpec(dtype="int64"),
            },
            labels=LABELS,
            probabilities="probabilities",
            label="label",
        )

    def inference_batch(self, batch: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The images; their labels."""
        images, labels = batch
        return [images], labels


class Classifier(nn.Module):
    """From pixels to classes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """Images, uint8 (B, 1, 28, 28) -> probabilities, float32 (B, 10), and labels, int64 (B,)."""
        logits = self.model(normalise(image))
        return {"probabilities": logits.softmax(dim=1), "label": logits.argmax(dim=1)}


@dataclass
class FashionMNISTMLP(FashionMNIST):
    """784-32-10, so small that the step is nearly all framework: for benchmarks of the framework."""

    def build_model(self) -> nn.Module:
        """An MLP: images (B, 1, 28, 28) -> logits (B, 10); 25,450 parameters."""
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))


def normalise(images: torch.Tensor) -> torch.Tensor:
    """uint8 pixels -> float32 of mean 0 and standard deviation 1, same shape."""
    return (images.float() - 255 * PIXEL_MEAN) * (1 / (255 * PIXEL_STD))
