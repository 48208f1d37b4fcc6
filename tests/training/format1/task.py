"""The task of the runs in this directory, which must stay as it is: their checkpoints belong to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import TensorDataset

import paceline
from paceline.core.inference import InferenceSignature, TensorSpec

WIDTH = 4


@dataclass
class Square(paceline.Task):
    """A small network whose parameters have two shapes only, so that a confusion of them raises no error.

    Attributes:
        optimizer: ``adamw``, ``adafactor``, ``groups`` (two, with and without weight decay) or ``two`` of them.
        order: of the parameters in the optimizer: ``model`` or ``reversed``.
        tied: whether the first and the last layer share their weight.
        scheduled: whether the learning rate falls.
        factor: of the loss.
    """

    optimizer: str = "adamw"
    order: str = "model"
    tied: bool = False
    scheduled: bool = False
    factor: float = 1.0

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=12, microbatches=6)

    def build_model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
        )
        if self.tied:
            model[4].weight = model[0].weight
        return model

    def build_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        features = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(1))
        return TensorDataset(features, features.argsort(dim=1)[:, 0])

    def build_optimizer(self, model: nn.Module) -> Optimizer | Mapping[str, Optimizer]:
        parameters = self.parameters(model)
        matrices = [p for p in parameters if p.dim() > 1]
        rows = [p for p in parameters if p.dim() == 1]
        if self.optimizer == "two":
            return {"matrices": SGD(matrices, lr=0.1, momentum=0.9), "rows": AdamW(rows, lr=0.02)}
        if self.optimizer == "groups":
            return AdamW([{"params": matrices, "weight_decay": 0.3}, {"params": rows, "lr": 0.05}], lr=0.02)
        if self.optimizer == "adafactor":
            return Adafactor(parameters, lr=0.05)
        return AdamW(parameters, lr=0.02)

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the model's parameters in the order in which the optimizer gets them."""
        parameters = [*model.parameters()]
        return parameters[::-1] if self.order == "reversed" else parameters

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler | None:
        return StepLR(optimizer, step_size=2, gamma=0.5) if self.scheduled else None

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1]) * self.factor


class Scores(nn.Module):
    """The model's outputs by name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": self.model(features)}


@dataclass
class Exportable(Square):
    """The same with what an export needs."""

    def build_dataset(self, split: str) -> Any:
        return super().build_dataset("train" if split == "test" else split)

    def inference_signature(self, model: nn.Module) -> InferenceSignature:
        spec = TensorSpec(dtype="float32", shape=(WIDTH,))
        return InferenceSignature(module=Scores(model), inputs={"features": spec}, outputs={"scores": spec})

    def inference_batch(self, batch: list[torch.Tensor]) -> tuple[Sequence[torch.Tensor], None]:
        return [batch[0]], None
