"""Tasks of which a step does not use all parameters."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tests.training.tasks import CLASSES, FEATURES, Points
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

import paceline
from paceline.core.task import BatchInfo, Callback, RunSchedule

_now = threading.local()  # --strategy dp computes micro-batches in threads


class Branch(nn.Module):
    """Parameters that no step uses, every second step, and one micro-batch or two of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.ones(FEATURES))
        self.never = nn.Parameter(torch.full((FEATURES,), 1.28))
        self.seldom = nn.Parameter(torch.ones(FEATURES, FEATURES) / FEATURES)
        self.once = nn.Parameter(torch.ones(FEATURES))
        self.uncalled = nn.Linear(FEATURES, FEATURES)
        self.late = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.always
        if _now.step % 2:
            x = x + x @ self.seldom
        if _now.number == 2:
            x = x * self.once
        if _now.number >= 2:
            x = x + self.late(x)
        return x


class GradientsSeen(Callback):
    """Records in which steps each parameter has a gradient."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: dict[str, list[bool]] = {}

    def on_before_optimizer_step(self) -> None:
        for name, parameter in self._model.named_parameters():
            self._seen.setdefault(name.split(".", 1)[-1], []).append(parameter.grad is not None)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen}

    def load_state_dict(self, state: Any) -> None:
        self._seen = state.get("seen", {})


@dataclass
class Branches(Points):
    """A model with a branch in its middle; both optimizers change a parameter whose gradient is zero."""

    num: int = 116
    adamw: bool = True
    watches: bool = False

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=24, microbatches=4, epochs=2)

    def build_model(self) -> nn.Module:
        first = [nn.Linear(FEATURES, 16), nn.GELU(), nn.Linear(16, FEATURES)]
        last = [nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)]
        return nn.Sequential(*first, Branch(), nn.LayerNorm(FEATURES), *last)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        if self.adamw:
            return AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
        return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    def build_callback(self, model: nn.Module, schedule: RunSchedule) -> Callback:
        return GradientsSeen(model) if self.watches else Callback()

    def on_batch_begin(self, info: BatchInfo) -> None:
        _now.step, _now.number = info.step, info.number


class TwoPasses(Branches):
    """A step of two passes, of which only the second uses all that a step uses, and an update after each."""

    def without_once(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        _now.number = 0
        return functional.cross_entropy(model(batch[0]), batch[1])

    def train_step(self, step: paceline.TrainStep) -> float:
        once = step.module.get_parameter("3.once")
        first = step.backward(self.without_once)
        assert once.grad is None
        step.update()
        step.backward(self.loss)
        assert once.grad is not None
        step.update()
        return first
