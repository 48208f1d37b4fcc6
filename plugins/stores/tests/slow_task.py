"""A small task that waits at a step for its test."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.core.task import BatchInfo

WAITS = (0, 10, 20)


@dataclass
class Slow(paceline.Task):
    """With ``STOP_AT`` it never does more steps; with ``WAIT_FOR=go`` it waits for a file ``go10`` after 10 steps."""

    defaults = paceline.Defaults(global_batch_size=24, microbatches=4)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))

    def build_dataset(self, split: str) -> Any:
        data = torch.Generator().manual_seed(len(split))
        return TensorDataset(torch.randn(96, 8, generator=data), torch.randint(0, 3, (96,), generator=data))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.02)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def on_batch_begin(self, info: BatchInfo) -> None:
        while str(info.step) == os.environ.get("STOP_AT"):
            time.sleep(0.1)
        if "WAIT_FOR" in os.environ and info.split == "train" and info.step in WAITS:
            while not Path(f"{os.environ['WAIT_FOR']}{info.step}").exists():
                time.sleep(0.05)
