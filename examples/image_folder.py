"""A folder of images, with augmentation in data workers: ROOT/train/CLASS/*.jpg and ROOT/test/CLASS/*.jpg.

    paceline train examples/image_folder.py:Images --set root=ROOT --num-workers 4
    paceline train examples/image_folder.py:Images --set root=ROOT --nproc auto --strategy fsdp

On a Slurm cluster, a node with 8 GPUs; --dry-run prints the batch script that this submits:

    paceline train examples/image_folder.py:Images --set root=ROOT --precision bf16 --num-workers 8 \
        --on slurm --gpus-per-node 8 --nproc 8 --cpus-per-task 9 --walltime 4h --run-dir runs/images

Every image is augmented alike whichever worker of whichever rank reads it, so all of these see the same pixels.
It needs Pillow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import paceline


class ImageFolder(Dataset[tuple[torch.Tensor, int]]):
    """The images of a folder, one folder a class: float32 (3, size, size) from -1 to 1, and the class."""

    def __init__(self, root: Path, size: int, *, augment: bool) -> None:
        self.classes = sorted(path.name for path in root.iterdir() if path.is_dir())
        self.files = [
            (path, label) for label, name in enumerate(self.classes) for path in sorted((root / name).iterdir())
        ]
        self.size = size
        self.augment = augment

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        with Image.open(path) as file:
            image = ImageOps.fit(file.convert("RGB"), (self.size + 4, self.size + 4))
        left, top, mirrored = 2, 2, 0
        if self.augment:  # Paceline seeds torch's generator for each epoch and sample
            left, top, mirrored = (int(torch.randint(number, ())) for number in (5, 5, 2))
        image = image.crop((left, top, left + self.size, top + self.size))
        pixels = np.array(ImageOps.mirror(image) if mirrored else image)
        return torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1, label


@dataclass
class Images(paceline.Task):
    root: str = "images"
    size: int = 64
    width: int = 32
    lr: float = 1e-3

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=256, microbatches=8, epochs=10)

    def build_model(self) -> nn.Module:
        def block(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU())

        width, classes = self.width, len(list((Path(self.root) / "train").iterdir()))
        blocks = block(3, width), block(width, 2 * width), block(2 * width, 4 * width)
        return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))

    def build_dataset(self, split: str) -> ImageFolder | None:
        folder = Path(self.root) / split  # without a folder "val", --val-fraction takes it from "train"
        return ImageFolder(folder, self.size, augment=split == "train") if folder.is_dir() else None

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def build_scheduler(self, optimizer: torch.optim.Optimizer, total_steps: int) -> object:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels, label_smoothing=0.1)

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        images, labels = batch
        return {"accuracy": (model(images).argmax(dim=1) == labels).float()}


if __name__ == "__main__":
    paceline.fit(Images())
