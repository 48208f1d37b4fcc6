"""Lightning modules that use what a module may use, and the tasks made of them."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

import paceline
from paceline_lightning.task import LightningTask, task

CLASSES, FEATURES = 3, 12


def points(number: int, seed: int) -> TensorDataset:
    """Points around one centre a class, so near each other that no model is right about all."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(number) % CLASSES
    noise = torch.randn(number, FEATURES, generator=generator)
    return TensorDataset(noise + 0.7 * functional.one_hot(labels, FEATURES), labels)


class Points(pl.LightningDataModule):
    """Points in two splits and a test split."""

    def __init__(self, batch_size: int = 24, number: int = 107) -> None:
        super().__init__()
        self.batch_size, self.number = batch_size, number

    def setup(self, stage: str) -> None:
        self.splits = {
            "train": points(self.number, seed=5),
            "val": points(37, seed=3),
            "test": points(10, seed=4),
        }

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.splits["train"], batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.splits["val"], batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.splits["test"], batch_size=self.batch_size)


class Classifier(pl.LightningModule):
    """Batch norm, dropout, torchmetrics, and a schedule that waits for the validation loss."""

    def __init__(self, lr: float = 0.02, width: int = 8, noise: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            nn.Linear(FEATURES, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Dropout(noise),
            nn.Linear(width, CLASSES),
        )
        self.train_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.accuracy = MulticlassAccuracy(CLASSES, average="macro")
        self.auroc = BinaryAUROC()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return (x + self.hparams.noise * torch.randn_like(x) if self.training else x), y

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        loss = functional.cross_entropy(logits, y)
        self.train_accuracy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.accuracy.update(logits, y)
        self.auroc(logits.softmax(dim=1)[:, 0], (y == 0).long())
        self.log("val_loss", functional.cross_entropy(logits, y))
        self.log("val/accuracy", self.accuracy)

    def on_validation_epoch_end(self) -> None:
        self.log("val/auroc", self.auroc.compute())
        self.auroc.reset()

    def test_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return functional.cross_entropy(self(x), y)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        self.log("grad_norm", norm)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def csv(directory: Path) -> list[Any]:
    return [CSVLogger(directory, name="lightning")]


def monitor() -> list[Any]:
    return [EarlyStopping("val_loss", patience=2), LearningRateMonitor()]


Made = task(Classifier, Points, name="Made", callbacks=monitor, loggers=csv)


@dataclass
class Classified(LightningTask):
    """The same, and one rank of several may be made to die."""

    lr: float = 0.02
    kill_at: int = 0

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(microbatches=5, epochs=30, best_metric="val_loss:min")

    def build_module(self) -> pl.LightningModule:
        return Classifier(self.lr)

    def build_datamodule(self) -> pl.LightningDataModule:
        return Points()

    def build_callbacks(self) -> list[pl.Callback]:
        return [*monitor(), Kill(self.kill_at)]

    def build_loggers(self, directory: Path) -> list[Any]:
        return csv(directory)


class WithLoaders(Classifier):
    """The loaders are its own, and the schedule is one by steps, which counts the run's."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Records(points(60, seed=5)), batch_size=12, shuffle=True, collate_fn=as_batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=self.trainer.estimated_stepping_batches
        )
        by_epochs = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}, by_epochs]


class Records(Dataset[Any]):
    """Reads one sample at a time, with noise of its own."""

    def __init__(self, inner: TensorDataset) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = self.inner[index]
        return {"x": x + 0.1 * torch.randn(FEATURES), "y": y}


def as_batch(samples: list[dict[str, Any]]) -> Any:
    return torch.stack([s["x"] for s in samples]), torch.stack([s["y"] for s in samples])


@dataclass
class Loaded(LightningTask):
    """A module with loaders of its own, read by worker processes."""

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(microbatches=4, epochs=2)

    def build_module(self) -> pl.LightningModule:
        return WithLoaders()


class Kill(pl.Callback):
    """Has one rank of several die before a step, once."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.at > 0 and trainer.global_rank == trainer.world_size - 1 > 0:
            once = Path("died")
            if not once.exists():
                once.touch()
                os.kill(os.getpid(), signal.SIGKILL)
