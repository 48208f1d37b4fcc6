"""Ways to train: contrast, distillation, reinforcement, mixtures, curricula, several tasks, learning to learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical
from torch.func import functional_call
from torch.nn import functional
from torch.optim import ASGD, SGD, Adam, AdamW, Optimizer, Rprop
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, LRScheduler, MultiStepLR, PolynomialLR
from torch.utils.data import Dataset, TensorDataset

import paceline
from paceline.core.task import BatchInfo


class TwoViews(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Each picture twice, cropped, mirrored and made brighter at random."""

    def __init__(self, num: int) -> None:
        self.pictures = torch.rand(num, 1, 12, 12)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.augmented(self.pictures[index]), self.augmented(self.pictures[index])

    def augmented(self, picture: torch.Tensor) -> torch.Tensor:
        top, left = np.random.randint(5, size=2)
        cropped = picture[:, top : top + 8, left : left + 8]
        return (cropped.flip(2) if torch.rand(()) < 0.5 else cropped) * float(np.random.uniform(0.6, 1.4))


@dataclass
class Contrast(paceline.Task):
    """Two views of a picture against all others of the micro-batch (SimCLR)."""

    lr: float = 0.1
    temperature: float = 0.3

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=36, microbatches=6, epochs=1)

    def build_model(self) -> nn.Module:
        encoder = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        projector = nn.Sequential(nn.Linear(24, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        return nn.Sequential(encoder, projector)

    def build_dataset(self, split: str) -> Any:
        return TwoViews(160) if split == "train" else None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.lr, momentum=0.9, weight_decay=1e-4)

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        return PolynomialLR(optimizer, total_iters=total_steps, power=2.0)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        vectors = functional.normalize(model(torch.cat(batch)), dim=1)
        number = len(batch[0])
        likeness = (vectors @ vectors.T / self.temperature).fill_diagonal_(float("-inf"))
        return functional.cross_entropy(likeness, torch.arange(2 * number).roll(number))


def classifier(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(10, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 4))


@dataclass
class Distillation(paceline.Task):
    """A small model that learns from a greater one, which the task keeps beside it."""

    lr: float = 0.02
    temperature: float = 3.0

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=28, microbatches=12, epochs=2)

    def build_model(self) -> nn.Module:
        self.teacher = classifier(40).requires_grad_(False).eval()
        return classifier(8)

    def build_dataset(self, split: str) -> Any:
        return TensorDataset(torch.randn(118, 10), torch.randint(4, (118,))) if split == "train" else None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=self.lr)

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        return CosineAnnealingWarmRestarts(optimizer, T_0=2, T_mult=2)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        features, labels = batch
        with torch.no_grad():
            # Of the inputs' type, so that verify can compare in float64.
            wanted = (self.teacher.to(features.dtype)(features) / self.temperature).softmax(dim=1)
        logits = model(features)
        soft = functional.kl_div((logits / self.temperature).log_softmax(dim=1), wanted, reduction="batchmean")
        return 0.7 * self.temperature**2 * soft + 0.3 * functional.cross_entropy(logits, labels)


class Pole:
    """A pole on a cart, roughly; it falls sooner or later, and gusts of wind push it."""

    def __init__(self, angle: float, seed: int) -> None:
        self.state = np.array([angle, 0.0])
        self.wind = np.random.default_rng(seed)

    def step(self, push: int) -> bool:
        angle, speed = self.state
        speed += 0.1 * np.sin(angle) + 0.05 * (2 * push - 1) + 0.02 * self.wind.normal()
        self.state = np.array([angle + 0.3 * speed, speed])
        return bool(abs(self.state[0]) < 0.5)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
        self.register_buffer("usual_return", torch.zeros(()))
        self.usual_return: torch.Tensor

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return self.layers(state)


@dataclass
class Reinforcement(paceline.Task):
    """REINFORCE: the data are starts and seeds of games, which the loss plays."""

    lr: float = 0.05
    horizon: int = 15

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=14, microbatches=6, epochs=1)

    def build_model(self) -> nn.Module:
        return Policy()

    def build_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        return [(float(np.random.uniform(-0.2, 0.2)), int(np.random.randint(2**31))) for _ in range(59)]

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), lr=self.lr, maximize=True)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> paceline.Loss:
        assert isinstance(model, Policy)
        gains, returns = [], []
        for angle, seed in zip(*(part.tolist() for part in batch), strict=True):
            game, likelihoods, entropies = Pole(angle, seed), [], []
            for _ in range(self.horizon):
                choice = Categorical(logits=model(torch.from_numpy(game.state).float()))
                push = choice.sample()
                likelihoods.append(choice.log_prob(push))
                entropies.append(choice.entropy())
                if not game.step(int(push)):
                    break
            returns.append(float(len(likelihoods)))
            advantage = returns[-1] - model.usual_return.item()
            gains.append(advantage * torch.stack(likelihoods).sum() + 0.01 * torch.stack(entropies).sum())
        model.usual_return.lerp_(torch.tensor(returns).mean(), 0.2)
        return paceline.Loss(torch.stack(gains).sum(), sum(returns))


@dataclass
class Mixup(paceline.Task):
    """Pairs of samples of a micro-batch, mixed in the loss by shares from a beta distribution."""

    lr: float = 0.01

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=42, microbatches=12, epochs=2)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, 24), nn.LayerNorm(24), nn.Hardswish(), nn.Linear(24, 4))

    def build_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        labels = torch.randint(4, (170,))
        return TensorDataset(torch.randn(170, 10) + functional.one_hot(labels, 10), labels)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return ASGD(model.parameters(), lr=self.lr, t0=2)

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        return MultiStepLR(optimizer, milestones=[3, 5], gamma=0.3)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        features, labels = batch
        wanted, other = functional.one_hot(labels, 4).float(), torch.randperm(len(labels))
        share = torch.from_numpy(np.random.beta(0.4, 0.4, size=(len(labels), 1))).float()
        mixed = share * features + (1 - share) * features[other]
        return functional.cross_entropy(model(mixed), share * wanted + (1 - share) * wanted[other])


@dataclass
class Curriculum(paceline.Task):
    """Trains on easy samples first and adds harder ones later; a micro-batch may hold none that counts."""

    lr: float = 0.02

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=24, microbatches=12, epochs=2)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.PReLU(), nn.Linear(16, 1))

    def build_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        features, noise = torch.randn(93, 8), torch.rand(93)
        return TensorDataset(features, features.sum(dim=1) + noise * torch.randn(93), noise)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Rprop(model.parameters(), lr=self.lr)

    def on_batch_begin(self, info: BatchInfo) -> None:
        self.hardest = 0.2 + 0.8 * (info.progress or 0.0)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> paceline.Loss:
        features, targets, noise = batch
        easy = noise < self.hardest
        errors = (model(features).squeeze(1) - targets).square()
        return paceline.Loss(errors[easy].sum(), easy.sum())


class SharedTrunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.BatchNorm1d(16))
        self.kind, self.size = nn.Linear(16, 3), nn.Linear(16, 1)
        self.log_noise = nn.ParameterDict(
            {"kind": nn.Parameter(torch.zeros(())), "size": nn.Parameter(torch.zeros(()))}
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(x)
        return self.kind(hidden), self.size(hidden).squeeze(1)


@dataclass
class SeveralTasks(paceline.Task):
    """Two heads on a trunk, with weights that are learned; one head joins after three steps."""

    lr: float = 0.02

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=30, microbatches=6, epochs=2)

    def build_model(self) -> nn.Module:
        return SharedTrunk()

    def build_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        features = torch.randn(100, 10)
        return TensorDataset(features, features[:, :3].argmax(dim=1), features.norm(dim=1))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        assert isinstance(model, SharedTrunk)
        groups: list[dict[str, Any]] = [
            {"params": [*model.trunk.parameters(), *model.kind.parameters()]},
            {"params": model.size.parameters(), "lr": 2 * self.lr},
            {"params": model.log_noise.parameters(), "weight_decay": 0.0},
        ]
        return AdamW(groups, lr=self.lr)

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        return LambdaLR(optimizer, [lambda _: 1.0, lambda step: float(step >= 3), lambda step: 0.9**step])

    def on_batch_begin(self, info: BatchInfo) -> None:
        self.joined = info.step >= 3

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        assert isinstance(model, SharedTrunk)
        features, kinds, sizes = batch
        guessed_kinds, guessed_sizes = model(features)
        losses = {"kind": functional.cross_entropy(guessed_kinds, kinds)}
        if self.joined:
            losses["size"] = functional.huber_loss(guessed_sizes, sizes)
        return sum(
            (loss * (-model.log_noise[name]).exp() + model.log_noise[name] for name, loss in losses.items()),
            start=torch.zeros(()),
        )


@dataclass
class LearningToLearn(paceline.Task):
    """Waves that a few steps of an inner gradient descent should fit (MAML)."""

    lr: float = 0.01
    inner_lr: float = 0.05
    inner_steps: int = 2

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=14, microbatches=6, epochs=1)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 16), nn.Softplus(), nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 1))

    def build_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        x, (height, shift) = 10 * torch.rand(60, 20, 1) - 5, torch.rand(2, 60, 1, 1)
        return TensorDataset(x, (0.5 + height) * torch.sin(x + 3 * shift))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        losses = []
        for x, y in zip(*batch, strict=True):
            weights: dict[str, torch.Tensor] = dict(model.named_parameters())
            for _ in range(self.inner_steps):
                inner = functional.mse_loss(functional_call(model, weights, (x[:10],)), y[:10])
                slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
                weights = {name: w - self.inner_lr * s for (name, w), s in zip(weights.items(), slopes, strict=True)}
            losses.append(functional.mse_loss(functional_call(model, weights, (x[10:],)), y[10:]))
        return torch.stack(losses).mean()


class Triplets(Dataset[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]):
    """A sample, another one of its class and one of another class, both drawn when the sample is read."""

    def __init__(self, num: int) -> None:
        self.kind = torch.arange(num) % 5
        self.points = torch.randn(5, 6)[self.kind] + 0.5 * torch.randn(num, 6)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        same = (self.kind == self.kind[index]).nonzero().squeeze(1)
        other = (self.kind != self.kind[index]).nonzero().squeeze(1)
        positive, negative = (int(choice[torch.randint(len(choice), ())]) for choice in (same, other))
        return self.points[index], self.points[positive], self.points[negative]


@dataclass
class MetricLearning(paceline.Task):
    """Triplets at a margin."""

    lr: float = 0.02

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=24, microbatches=6, epochs=1)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.PReLU(), nn.Linear(16, 4))

    def build_dataset(self, split: str) -> Any:
        return Triplets(100) if split == "train" else None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.lr, momentum=0.8, nesterov=True)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return functional.triplet_margin_loss(*(functional.normalize(model(part), dim=1) for part in batch), margin=0.5)
