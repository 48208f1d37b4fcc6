"""What ``paceline bench recovery`` trains while it kills workers: one small model, for all contenders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import TensorDataset

from paceline.core.task import Defaults, Task
from paceline.insight.bench.faults import FaultScript
from paceline.insight.bench.workload import GLOBAL_BATCH_SIZE, STEPS_PER_EPOCH


def build_model() -> nn.Module:
    """Vectors (B, 64) -> logits (B, 10), with dropout."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))


def build_dataset() -> TensorDataset:
    """Random vectors and labels, the same in every process; an epoch is ten steps."""
    generator = torch.Generator().manual_seed(0)
    samples = STEPS_PER_EPOCH * GLOBAL_BATCH_SIZE
    return TensorDataset(
        torch.randn(samples, 64, generator=generator), torch.randint(10, (samples,), generator=generator)
    )


def build_optimizer(model: nn.Module) -> Optimizer:
    """AdamW: it counts its steps, so whoever holds its state knows where the training stands."""
    return AdamW(model.parameters(), lr=1e-3)


@dataclass
class RecoveryWorkload(Task):
    """The same as a task of Paceline's.

    Attributes:
        script: the directory of a :class:`~paceline.insight.bench.faults.FaultScript`.
    """

    script: str = ""

    defaults: ClassVar[Defaults] = Defaults(global_batch_size=GLOBAL_BATCH_SIZE)

    def __post_init__(self) -> None:
        self._faults = FaultScript(Path(self.script))

    def build_model(self) -> nn.Module:
        """The model that all contenders train."""
        return build_model()

    def build_dataset(self, split: str) -> Any:
        """The data that all contenders see; nothing to evaluate on."""
        return build_dataset() if split == "train" else None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer of all contenders; each of its steps is recorded."""
        self._optimizer = build_optimizer(model)
        self._optimizer.register_step_post_hook(self._after_step)
        return self._optimizer

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The mean cross-entropy; a scripted kill comes before it."""
        self._faults.before_step(self._steps_done() + 1, *_place())
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels)

    def _after_step(self, *_: Any) -> None:
        self._faults.after_step(self._steps_done(), _place()[0])

    def _steps_done(self) -> int:
        return int(next((state["step"] for state in self._optimizer.state.values()), 0))


def _place() -> tuple[int, int]:
    """Rank and world size as they are now: worlds change."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
