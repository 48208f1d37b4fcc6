"""Layers of unusual kinds: experts, parametrizations, solvers, derivatives and quantised weights."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.optim import SGD, Adadelta, Adam, AdamW, Muon, Optimizer
from torch.utils.data import TensorDataset

import paceline


class Experts(nn.Module):
    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, number, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(number)
        )
        self.register_buffer("routed", torch.zeros(number, dtype=torch.int64))
        self.routed: torch.Tensor

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares = (self.router(x) + 0.1 * torch.randn(len(x), len(self.experts))).softmax(dim=1)
        share, chosen = shares.max(dim=1)
        counts = torch.bincount(chosen, minlength=len(self.experts))
        self.routed += counts
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().squeeze(1)
            out = out.index_add(0, rows, share[rows].unsqueeze(1) * self.experts[number](x[rows]))
        balance = len(self.experts) * (counts / len(x) * shares.mean(dim=0)).sum()
        return x + out, balance


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts(10, 5) for _ in range(2))
        self.head = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.zeros(())
        for block in self.blocks:
            x, balance = block(x)
            total = total + balance
        return self.head(x), total


@dataclass
class Mixture(paceline.Task):
    """A mixture of experts, of which a micro-batch uses some, and no micro-batch others."""

    lr: float = 0.01

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=24, microbatches=12, epochs=2)

    def build_model(self) -> nn.Module:
        return Routed()

    def build_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        labels = torch.randint(3, (91,))
        return TensorDataset(torch.randn(91, 10) + 2 * functional.one_hot(labels, 10), labels)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=self.lr, weight_decay=0.1)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        logits, balance = model(batch[0])
        return functional.cross_entropy(logits, batch[1]) + 0.05 * balance


@dataclass
class Physics(paceline.Task):
    """The heat equation, by derivatives of the network in float64; its edges are drawn in the loss."""

    lr: float = 0.01

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=50, microbatches=6, epochs=1)

    def build_model(self) -> nn.Module:
        layers = [nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)]
        return nn.Sequential(*layers).double()

    def build_dataset(self, split: str) -> Any:
        return TensorDataset(torch.rand(260, 2, dtype=torch.float64)) if split == "train" else None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        points = batch[0].requires_grad_()
        heat = model(points)
        (slope,) = torch.autograd.grad(heat.sum(), points, create_graph=True)
        (curvature,) = torch.autograd.grad(slope[:, 0].sum(), points, create_graph=True)
        residual = slope[:, 1] - 0.1 * curvature[:, 0]
        x = torch.rand(len(points), 1, dtype=torch.float64)
        start = model(torch.cat([x, torch.zeros_like(x)], dim=1)) - torch.sin(math.pi * x)
        edges = torch.cat([torch.randint(2, x.shape).double(), x], dim=1)
        return residual.square().mean() + start.square().mean() + model(edges).square().mean()


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
        self.log_time = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        h = self.log_time.exp() / steps
        for number in range(steps):
            first = self.at(x, number * h)
            second = self.at(x + 0.5 * h * first, (number + 0.5) * h)
            third = self.at(x + 0.5 * h * second, (number + 0.5) * h)
            fourth = self.at(x + h * third, (number + 1) * h)
            x = x + h / 6 * (first + 2 * second + 2 * third + fourth)
        return x

    def at(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.slope(torch.cat([x, time.expand(len(x), 1)], dim=1))


@dataclass
class Ordinary(paceline.Task):
    """A differential equation, solved in a number of steps that Python draws."""

    lr: float = 1.0

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=26, microbatches=6, epochs=1)

    def build_model(self) -> nn.Module:
        return Flow()

    def build_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        points, turn = torch.randn(110, 2), torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
        return TensorDataset(points, points @ torch.matrix_exp(turn))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Adadelta(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return functional.mse_loss(model(batch[0], random.randint(1, 5)), batch[1])


class Constrained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = spectral_norm(nn.Conv1d(1, 4, 3), n_power_iterations=2)
        self.second = weight_norm(nn.Linear(24, 12))
        self.third = orthogonal(nn.Linear(12, 12), orthogonal_map="cayley")
        self.last = spectral_norm(nn.Linear(12, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x.unsqueeze(1)).flatten(1).relu()
        return self.last(self.third(self.second(hidden).relu()).relu()).squeeze(1)


@dataclass
class Parametrized(paceline.Task):
    """Weights with a spectral norm of one, with a length of their own, and orthogonal ones."""

    lr: float = 0.05

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=24, microbatches=12, epochs=2)

    def build_model(self) -> nn.Module:
        return Constrained()

    def build_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        features = torch.randn(77, 8)
        return TensorDataset(features, features.norm(dim=1))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.lr, momentum=0.5)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])


class FixedPoint(Function):
    """z = tanh(z W + x), with as many iterations as it takes, there and back."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        z = FixedPoint.iterated(lambda z: torch.tanh(z @ weight + x), torch.zeros_like(x))
        ctx.save_for_backward(z, weight)
        return z

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        z, weight = ctx.saved_tensors
        slope = 1 - z.square()
        inner = FixedPoint.iterated(lambda u: (u @ weight.T + grad) * slope, torch.zeros_like(grad))
        return inner, z.T @ inner

    @staticmethod
    def iterated(step: Any, start: torch.Tensor) -> torch.Tensor:
        now = start
        for _ in range(100):
            before, now = now, step(now)
            if (now - before).abs().max() < 1e-6:
                break
        return now


class Equilibrium(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(6, 12), nn.Linear(12, 3)
        self.weight = nn.Parameter(0.1 * torch.randn(12, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z: torch.Tensor = FixedPoint.apply(self.into(x), self.weight)  # type: ignore[no-untyped-call]
        return self.head(z)


@dataclass
class Implicit(paceline.Task):
    """A layer that is a fixed point, with a backward of its own; Muon for its matrices."""

    lr: float = 0.02

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=20, microbatches=6, epochs=2)

    def build_model(self) -> nn.Module:
        return Equilibrium()

    def build_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        features = torch.randn(66, 6)
        return TensorDataset(features, features[:, :3].argmax(dim=1))

    def build_optimizer(self, model: nn.Module) -> dict[str, Optimizer]:
        return {
            "matrices": Muon([p for p in model.parameters() if p.ndim == 2], lr=self.lr),
            "others": Adam([p for p in model.parameters() if p.ndim != 2], lr=self.lr),
        }

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])


class Rounded(Function):
    """Rounds, and hands the gradient straight through."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        return grad


class QuantizedLinear(nn.Linear):
    """Weights of eight bits for each row, inputs by the greatest value that was seen lately."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("greatest", torch.zeros(()))
        self.register_buffer("ready", torch.zeros((), dtype=torch.bool))
        self.greatest: torch.Tensor
        self.ready: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            seen = x.detach().abs().max()
            self.greatest.copy_(torch.where(self.ready, 0.9 * self.greatest + 0.1 * seen, seen))
            self.ready.fill_(True)
        scale = self.greatest / 127
        rounded: torch.Tensor = Rounded.apply((x / scale).clamp(-127, 127))  # type: ignore[no-untyped-call]
        scales = self.weight.detach().abs().amax(dim=1) / 127
        weight = torch.fake_quantize_per_channel_affine(
            self.weight, scales, torch.zeros(len(scales), dtype=torch.int32), 0, -127, 127
        )
        return functional.linear(rounded * scale, weight, self.bias)


@dataclass
class Quantized(paceline.Task):
    """Training that knows of the rounding to come; ranges and flags are buffers."""

    lr: float = 0.02

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=32, microbatches=6, epochs=2)

    def build_model(self) -> nn.Module:
        return nn.Sequential(QuantizedLinear(9, 16), nn.BatchNorm1d(16), nn.ReLU6(), QuantizedLinear(16, 3))

    def build_dataset(self, split: str) -> Any:
        return TensorDataset(torch.randn(102, 9), torch.randint(3, (102,))) if split == "train" else None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])
