"""A small task, and one that fills its run's disk for some of its steps."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.core.task import BatchInfo
from paceline.training import checkpoint_manager

FEATURES, CLASSES = 8, 3


@dataclass
class Small(paceline.Task):
    lr: float = 0.02
    num: int = 96

    defaults = paceline.Defaults(global_batch_size=24, microbatches=4)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES))

    def build_dataset(self, split: str) -> Any:
        data = torch.Generator().manual_seed(len(split))
        features = torch.randn(self.num, FEATURES, generator=data)
        return TensorDataset(features, torch.randint(0, CLASSES, (self.num,), generator=data))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


@dataclass
class Filling(Small):
    """Leaves no byte free on the disk that ``ballast`` is on, from step ``full`` to step ``free``."""

    ballast: str = ""
    full: int = 5
    free: int = 12
    delays_s: tuple[float, ...] = ()  # before another try of the last save; default: as always
    committed: str = ""  # what is there before the disk is filled: a checkpoint is written in the background

    def build_model(self) -> nn.Module:
        checkpoint_manager.LAST_TRIES_S = self.delays_s or checkpoint_manager.LAST_TRIES_S
        return super().build_model()

    def on_batch_begin(self, info: BatchInfo) -> None:
        self.info = info

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if model.training and os.environ.get("RANK", "0") == "0" and self.ballast:
            step = self.info.step
            print(f"a line that the log has no room for, {step} {self.info.number}" + "." * 200)
            if self.full <= step < self.free:
                while self.committed and not list(Path(self.ballast).parent.glob(self.committed)):
                    time.sleep(0.01)
                # Again and again: what is deleted meanwhile must not make room.
                with Path(self.ballast).open("ab", buffering=0) as file, suppress(OSError):
                    while file.write(bytes(4096)):
                        pass
            elif step >= self.free:
                Path(self.ballast).unlink(missing_ok=True)
        return super().loss(model, batch)
