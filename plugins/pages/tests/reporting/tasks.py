"""Tasks whose runs are reported on: pictures with classes whose names are markup, and a regression."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import TensorDataset

import paceline
from paceline import InferenceSignature, TensorSpec

SIZES = {"train": 240, "val": 64, "test": 150}
CLASSES = ("plain", "<script>alert(1)</script>", "a & b", '"quoted" $x^2$')


@dataclass
class Pictures(paceline.Task):
    """In which quarter of a noisy 8 x 8 picture is it bright?"""

    lr: float = 0.5
    note: str = "</script><script>document.title='owned'</script>"

    defaults = paceline.Defaults(global_batch_size=48, microbatches=2, epochs=2, best_metric="accuracy:max")

    def build_model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(sorted(SIZES).index(split))
        size = SIZES[split]
        labels = torch.randint(4, (size,), generator=generator)
        images = torch.randint(0, 160, (size, 1, 8, 8), generator=generator, dtype=torch.uint8)
        for image, label in zip(images, labels.tolist(), strict=True):
            row, column = 4 * (label // 2), 4 * (label % 2)
            image[0, row : row + 4, column : column + 4] += 40
        return TensorDataset(images, labels)

    def build_optimizer(self, model):
        return SGD(model.parameters(), lr=self.lr)

    def loss(self, model, batch):
        images, labels = batch
        return functional.cross_entropy(model(images / 255), labels)

    def metrics(self, model, batch):
        images, labels = batch
        logits = model(images / 255)
        losses = functional.cross_entropy(logits, labels, reduction="none")
        return {"accuracy": (logits.argmax(dim=1) == labels).float(), "loss": losses}

    def inference_signature(self, model):
        return InferenceSignature(
            module=Classifier(model),
            inputs={"image": TensorSpec(dtype="uint8", shape=(1, 8, 8))},
            outputs={"probabilities": TensorSpec(dtype="float32", shape=(4,))},
            labels=CLASSES,
            probabilities="probabilities",
        )

    def inference_batch(self, batch):
        images, labels = batch
        return [images], labels


class Classifier(nn.Module):
    """From pixels to probabilities."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, image):
        return {"probabilities": self.model(image / 255).softmax(dim=1)}


@dataclass
class Line(paceline.Task):
    """A regression without a test split, whose inputs are columns."""

    lr: float = 0.1

    defaults = paceline.Defaults(global_batch_size=16, microbatches=2, epochs=1)

    def build_model(self):
        return nn.Linear(3, 1)

    def build_dataset(self, split):
        if split == "test":
            return None
        generator = torch.Generator().manual_seed(len(split))
        points = torch.randn(96, 3, generator=generator)
        return TensorDataset(points, points.sum(dim=1, keepdim=True))

    def build_optimizer(self, model):
        return SGD(model.parameters(), lr=self.lr)

    def loss(self, model, batch):
        points, targets = batch
        return functional.mse_loss(model(points), targets)

    def metrics(self, model, batch):
        points, targets = batch
        errors = (model(points) - targets).abs().squeeze(1)
        return {
            "absolute_error": errors,
            "weighted": ((errors * targets[:, 0].abs()).sum(), targets.abs().sum()),
        }

    def inference_signature(self, model):
        return InferenceSignature(
            module=Sum(model),
            inputs={name: TensorSpec(dtype="float32") for name in ("age", "<b>income</b>", "height")},
            outputs={"total": TensorSpec(dtype="float32")},
        )

    def inference_batch(self, batch):
        points, targets = batch
        return list(points.T), targets


class Sum(nn.Module):
    """From columns to a value."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, age, income, height):
        return {"total": self.model(torch.stack([age, income, height], dim=1))[:, 0]}


if __name__ == "__main__":
    # All runs in one process: importing torch takes longer than they do.
    options = {"threads": 1, "quiet": True, "log_every": 2}
    paceline.fit(Pictures(), run_dir=f"{sys.argv[1]}/good", **options)
    paceline.fit(Pictures(lr=0.01), run_dir=f"{sys.argv[1]}/<img src=x onerror=alert(1)>", **options)
    paceline.fit(Pictures(lr=0.5), run_dir=f"{sys.argv[1]}/seed", seed=1, ema=0.5, **options)
    paceline.fit(Line(), run_dir=f"{sys.argv[1]}/line", **options)
    paceline.fit(Line(), run_dir=f"{sys.argv[1]}/small-batches", global_batch_size=4, **options)
