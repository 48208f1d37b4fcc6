"""Models that draw samples: diffusion, adversarial networks and an autoencoder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call
from torch.nn import functional
from torch.optim import Adam, AdamW, Optimizer, RAdam
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler
from torch.utils.data import TensorDataset

import paceline
from paceline.core.task import BatchInfo


def rings(num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on two rings, and which one."""
    kind = torch.randint(2, (num,))
    angle = 2 * math.pi * torch.rand(num)
    points = (1.0 + kind).unsqueeze(1) * torch.stack([angle.cos(), angle.sin()], dim=1)
    return points + 0.05 * torch.randn(num, 2), kind


class Denoiser(nn.Module):
    def __init__(self, steps: int) -> None:
        super().__init__()
        noise = torch.linspace(1e-3, 0.2, steps)
        self.register_buffer("kept", torch.cumprod(1 - noise, dim=0))
        self.kept: torch.Tensor
        self.kinds = nn.Embedding(3, 8)
        self.first, self.last = nn.Linear(2 + 8 + 8, 32), nn.Linear(32, 2)

    def forward(self, x: torch.Tensor, t: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        phases = t.unsqueeze(1) * torch.exp(-torch.arange(4.0))
        inputs = torch.cat([x, phases.sin(), phases.cos(), self.kinds(kind)], dim=1)
        return self.last(functional.silu(self.first(inputs)))


@dataclass
class Diffusion(paceline.Task):
    """Noise of a random strength is predicted; one class in ten is dropped."""

    lr: float = 0.01
    steps: int = 50

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=36, microbatches=12, epochs=1)

    def build_model(self) -> nn.Module:
        return Denoiser(self.steps)

    def build_dataset(self, split: str) -> Any:
        return TensorDataset(*rings(200 if split == "train" else 35))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> paceline.Loss:
        assert isinstance(model, Denoiser)
        points, kind = batch
        kind = torch.where(torch.rand(kind.shape) < 0.1, 2, kind)
        t = torch.randint(self.steps, kind.shape)
        kept, noise = model.kept[t].unsqueeze(1), torch.randn_like(points)
        predicted = model(kept.sqrt() * points + (1 - kept).sqrt() * noise, t, kind)
        errors = (predicted - noise).square().mean(dim=1)
        weights = (kept / (1 - kept)).squeeze(1).clamp(max=5.0)
        return paceline.Loss((errors * weights).sum(), weights.sum())


class Adversaries(nn.Module):
    def __init__(self, normed: bool) -> None:
        super().__init__()
        norms = [nn.BatchNorm1d(16)] if normed else []
        self.generator = nn.Sequential(nn.Linear(4, 16), *norms, nn.ReLU(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def judge_alone(self, points: torch.Tensor) -> torch.Tensor:
        """The critic's scores, of which the critic gets no gradient."""
        frozen = {name: parameter.detach() for name, parameter in self.critic.named_parameters()}
        return functional_call(self.critic, frozen, points)


@dataclass
class Gan(paceline.Task):
    """A generator and a discriminator with an optimizer and a schedule each, from one loss."""

    lr: float = 0.005

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=30, microbatches=6, epochs=2)

    def build_model(self) -> nn.Module:
        return Adversaries(normed=True)

    def build_dataset(self, split: str) -> Any:
        return TensorDataset(rings(100)[0]) if split == "train" else None

    def build_optimizer(self, model: nn.Module) -> Mapping[str, Optimizer]:
        assert isinstance(model, Adversaries)
        return {
            "critic": Adam(model.critic.parameters(), lr=4 * self.lr, betas=(0.5, 0.999)),
            "generator": Adam(model.generator.parameters(), lr=self.lr, betas=(0.5, 0.999)),
        }

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        return ExponentialLR(optimizer, gamma=0.9)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        assert isinstance(model, Adversaries)
        (real,) = batch
        fake = model.generator(torch.randn(len(real), 4))
        scores = model.critic(torch.cat([real, fake.detach()])).squeeze(1)
        is_real = torch.arange(len(scores)) < len(real)
        critic_loss = functional.binary_cross_entropy_with_logits(scores, is_real.float())
        return critic_loss + functional.softplus(-model.judge_alone(fake)).mean()


@dataclass
class WassersteinGan(paceline.Task):
    """A critic with a gradient penalty, and a generator that learns in every second step."""

    lr: float = 0.005

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=24, microbatches=6, epochs=1)

    def build_model(self) -> nn.Module:
        return Adversaries(normed=False)

    def build_dataset(self, split: str) -> Any:
        return TensorDataset(rings(150)[0]) if split == "train" else None

    def build_optimizer(self, model: nn.Module) -> Mapping[str, Optimizer]:
        assert isinstance(model, Adversaries)
        return {
            "critic": Adam(model.critic.parameters(), lr=self.lr, betas=(0.0, 0.9)),
            "generator": Adam(model.generator.parameters(), lr=self.lr, betas=(0.0, 0.9)),
        }

    def on_batch_begin(self, info: BatchInfo) -> None:
        self.step = info.step

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        assert isinstance(model, Adversaries)
        (real,) = batch
        fake = model.generator(torch.randn(len(real), 4))
        share = torch.rand(len(real), 1)
        between = (share * real + (1 - share) * fake.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(model.critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        loss = model.critic(fake.detach()).mean() - model.critic(real).mean() + 10 * penalty
        if self.step % 2:
            loss = loss - model.judge_alone(fake).mean()
        return loss


class Autoencoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.ELU(), nn.Linear(16, 2 * width))
        self.decoder = nn.Sequential(nn.Linear(width, 16), nn.ELU(), nn.Linear(16, 12))
        self.log_noise = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_scale = self.encoder(x).chunk(2, dim=1)
        posterior = Normal(mean, log_scale.exp())
        decoded = Normal(self.decoder(posterior.rsample()), self.log_noise.exp())
        divergence = kl_divergence(posterior, Normal(torch.zeros_like(mean), torch.ones_like(mean)))
        return decoded.log_prob(x).sum(dim=1), divergence.sum(dim=1)


@dataclass
class Annealed(paceline.Task):
    """A variational autoencoder whose divergence counts more and more."""

    lr: float = 0.01

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=32, microbatches=12, epochs=2)

    def build_model(self) -> nn.Module:
        return Autoencoder(3)

    def build_dataset(self, split: str) -> Any:
        return TensorDataset(torch.randn(105, 3) @ torch.randn(3, 12)) if split == "train" else None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return RAdam(model.parameters(), lr=self.lr)

    def on_batch_begin(self, info: BatchInfo) -> None:
        self.info = info

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        likelihood, divergence = model(batch[0])
        return (min(1.0, 2 * (self.info.progress or 0.0)) * divergence - likelihood).mean()


class Codebook(nn.Module):
    """The nearest of some vectors in place of each one; gradients pass straight through."""

    def __init__(self, codes: int, width: int) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(codes, width))
        self.register_buffer("used", torch.zeros(codes))
        self.used: torch.Tensor

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nearest = torch.cdist(x.detach(), self.codes.detach()).argmin(dim=1)
        if self.training:
            self.used.lerp_(functional.one_hot(nearest, len(self.codes)).float().mean(dim=0), 0.1)
        chosen = self.codes[nearest]
        apart = (chosen - x.detach()).square().mean() + 0.25 * (chosen.detach() - x).square().mean()
        return x + (chosen - x).detach(), apart


@dataclass
class VectorQuantized(paceline.Task):
    """An autoencoder through a codebook, with a running count of the codes in a buffer."""

    lr: float = 0.01

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=32, microbatches=8, epochs=2)

    def build_model(self) -> nn.Module:
        return nn.ModuleDict({"encoder": nn.Linear(8, 3), "codes": Codebook(12, 3), "decoder": nn.Linear(3, 8)})

    def build_dataset(self, split: str) -> Any:
        return TensorDataset(torch.randn(110, 3) @ torch.randn(3, 8)) if split == "train" else None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=self.lr, amsgrad=True)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        assert isinstance(model, nn.ModuleDict)
        quantized, apart = model["codes"](model["encoder"](batch[0]))
        return (model["decoder"](quantized) - batch[0]).square().mean() + apart
