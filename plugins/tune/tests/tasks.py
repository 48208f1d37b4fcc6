"""A task that trains in a second, and whose fields have every kind of type."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

from paceline.core.task import Callback, Defaults, RunSchedule, Task


class _Killed(Callback):
    """Kills its process at a step, once."""

    def __init__(self, step: int, mark: Path) -> None:
        self._step, self._mark = step, mark

    def on_step_end(self, step: int, loss: float) -> None:
        if step != self._step:
            return
        with suppress(FileExistsError):
            self._mark.open("x").close()  # one rank, where there are several
            os.kill(os.getpid(), signal.SIGKILL)


class _Waiting(Callback):
    """Says at a step on which machine it is, and waits there for a file "go"."""

    def __init__(self, step: int, directory: Path) -> None:
        self._step, self._directory = step, directory

    def on_step_end(self, step: int, loss: float) -> None:
        if step == self._step:
            (self._directory / f"here-{os.uname().nodename}").touch()
            while not (self._directory / "go").exists():
                time.sleep(0.01)


@dataclass
class Line(Task):
    """Fits a plane to 96 points by SGD."""

    lr: float = 0.1
    width: int = 4
    kind: Literal["tanh", "relu"] = "tanh"
    fail_above: float = 1e40
    killed_at: int = 0
    waits_at: int = 0
    mark: str = ""
    with_val: bool = True

    def build_model(self) -> nn.Module:
        if self.lr > self.fail_above:
            raise RuntimeError(f"no model for lr {self.lr}")
        activation = nn.Tanh() if self.kind == "tanh" else nn.ReLU()
        return nn.Sequential(nn.Linear(3, self.width), activation, nn.Linear(self.width, 1))

    def build_dataset(self, split: str) -> TensorDataset | None:
        if split == "test" or (split == "val" and not self.with_val):
            return None
        generator = torch.Generator().manual_seed(1 if split == "train" else 2)
        inputs = torch.randn(96, 3, generator=generator)
        return TensorDataset(inputs, inputs @ torch.tensor([[1.0], [-2.0], [0.5]]))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.lr)

    def build_callback(self, model: nn.Module, schedule: RunSchedule) -> Callback:
        if self.waits_at:
            return _Waiting(self.waits_at, Path(self.mark))
        return _Killed(self.killed_at, Path(self.mark)) if self.killed_at else Callback()

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs), targets)

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, Any]:
        inputs, targets = batch
        return {"near": ((model(inputs) - targets).abs() < 0.5).float().flatten()}


@dataclass
class Even(Line):
    """Declares a search space, and refuses odd widths."""

    defaults: ClassVar[Defaults] = Defaults(search=("width=int:2:8", "lr=log:1e-3:1"))

    def __post_init__(self) -> None:
        if self.width % 2:
            raise ValueError(f"width {self.width} is odd")
