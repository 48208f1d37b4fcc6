"""Steps that are more than one loss and one update: the tasks define ``train_step``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler
from torch.utils.data import TensorDataset

import paceline


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1))


@dataclass
class AlternatingGan(paceline.Task):
    """The critic learns twice, then the generator from the critic as it is then."""

    lr: float = 0.005

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=30, microbatches=6, epochs=2)

    def build_model(self) -> nn.Module:
        return Adversaries()

    def build_dataset(self, split: str) -> Any:
        return TensorDataset(torch.randn(100, 2).mul(0.2).add(1.0)) if split == "train" else None

    def build_optimizer(self, model: nn.Module) -> Mapping[str, Optimizer]:
        assert isinstance(model, Adversaries)
        return {
            "critic": Adam(model.critic.parameters(), lr=self.lr, betas=(0.5, 0.999)),
            "generator": Adam(model.generator.parameters(), lr=self.lr, betas=(0.5, 0.999)),
        }

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        return ExponentialLR(optimizer, gamma=0.9)

    def critic_loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        assert isinstance(model, Adversaries)
        (real,) = batch
        fake = model.generator(torch.randn(len(real), 4)).detach()
        scores = model.critic(torch.cat([real, fake])).squeeze(1)
        return functional.binary_cross_entropy_with_logits(scores, (torch.arange(len(scores)) < len(real)).float())

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        assert isinstance(model, Adversaries)
        return functional.softplus(-model.critic(model.generator(torch.randn(len(batch[0]), 4)))).mean()

    def train_step(self, step: paceline.TrainStep) -> float:
        for _ in range(2):
            critic = step.backward(self.critic_loss)
            step.update("critic")
        generator = step.backward(self.loss)
        step.update("generator")
        step.log(critic=critic, generator=generator)
        return critic + generator


@dataclass
class Classes(paceline.Task):
    """Points of three classes, and a step of the usual kind."""

    lr: float = 0.02

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=36, microbatches=6, epochs=1)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 3))

    def build_dataset(self, split: str) -> Any:
        if split == "test":
            return None
        points = torch.randn(160 if split == "train" else 31, 5)
        return TensorDataset(points, (points @ torch.randn(5, 3)).argmax(dim=1))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])


class Sharpness(Classes):
    """The gradient at a worse point nearby (SAM)."""

    def train_step(self, step: paceline.TrainStep) -> float:
        loss = step.backward(self.loss)
        parameters = list(step.module.parameters())
        with torch.no_grad():
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            away = [gradient * (0.05 / norm) for gradient in gradients]
            torch._foreach_add_(parameters, away)
        step.backward(self.loss)
        with torch.no_grad():
            torch._foreach_sub_(parameters, away)
        step.update()
        return loss


class Surgery(Classes):
    """Two losses, of whose gradients neither goes against the other (PCGrad)."""

    def smoothness(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return (model(batch[0]) - model(batch[0] + 0.1 * torch.randn_like(batch[0]))).square().mean()

    def train_step(self, step: paceline.TrainStep) -> float:
        parameters = list(step.module.parameters())
        losses, gradients = [], []
        for loss in (self.loss, self.smoothness):
            losses.append(step.backward(loss))
            gradients.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))
        first, second = gradients
        inner = torch.dot(first, second).clamp(max=0.0)
        total = first + second - inner / second.dot(second) * second - inner / first.dot(first) * first
        for parameter, part in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(part.view_as(parameter))
        step.update()
        return sum(losses)


class SecondOrder(Classes):
    """L-BFGS, which computes the loss several times within a step."""

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return LBFGS(model.parameters(), lr=0.3, max_iter=3, history_size=4)

    def train_step(self, step: paceline.TrainStep) -> None:
        step.update(closure=lambda: step.backward(self.loss))


class Lookahead(Classes):
    """Three fast updates within a step, of which the model goes half the way."""

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def train_step(self, step: paceline.TrainStep) -> None:
        before = [parameter.detach().clone() for parameter in step.module.parameters()]
        for _ in range(3):
            step.backward(self.loss)
            step.update()
        with torch.no_grad():
            torch._foreach_lerp_(list(step.module.parameters()), before, 0.5)


class WholeBatch(Classes):
    """Two noisy views of each point against those of all others of the batch."""

    def embed(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        views = batch[0].repeat(2, 1) + 0.1 * torch.randn(2 * len(batch[0]), 5)
        return functional.normalize(model(views), dim=1).view(2, len(batch[0]), -1).transpose(0, 1)

    def contrast(self, embeddings: torch.Tensor) -> torch.Tensor:
        first, second = embeddings.unbind(dim=1)
        return functional.cross_entropy(first @ second.T / 0.2, torch.arange(len(first)))

    def train_step(self, step: paceline.TrainStep) -> float:
        loss = step.backward_over_batch(self.embed, self.contrast)
        step.update()
        return loss
