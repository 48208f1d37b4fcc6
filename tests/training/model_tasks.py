"""Tasks whose models are not a plain sequence of layers."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from tests.training.tasks import CLASSES, FEATURES, Layered, Points, TwoOptimizers, TwoParts, interruption
from torch import nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

import paceline
from paceline.core.task import Callback, RunSchedule


class MomentumPair(nn.Module):
    """An encoder, and a slow copy of it whose output it predicts (BYOL)."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 4))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.predictor(self.online(x)), self.target(x + 0.1 * torch.randn_like(x))


class MomentumUpdate(Callback):
    """Moves the target towards the encoder once a step, after the optimizer."""

    def __init__(self, model: nn.Module) -> None:
        assert isinstance(model, MomentumPair)
        self.model = model

    def on_step_end(self, step: int, loss: float) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.model.target.parameters(), self.model.online.parameters(), strict=True):
                slow.lerp_(fast, 0.1)


@dataclass
class MomentumEncoder(Points):
    """A model of which one part follows another by a moving average."""

    def build_model(self) -> nn.Module:
        return MomentumPair()

    def build_callback(self, model: nn.Module, schedule: RunSchedule) -> Callback:
        return MomentumUpdate(model)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor | paceline.Loss:
        interruption.count()
        predicted, target = model(batch[0])
        return (predicted - target).square().mean()

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, Any]:
        return {}


class Spectral(nn.Module):
    """A complex filter of the features, and running statistics in buffers: complex, counting, and not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))
        self.filter = nn.Parameter(torch.ones(FEATURES // 2 + 1, dtype=torch.complex64))
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("spectrum", torch.zeros(FEATURES // 2 + 1, dtype=torch.complex64))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(FEATURES), persistent=False)
        self.register_buffer("mask", torch.ones(FEATURES), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.spectrum = 0.9 * self.spectrum + 0.1 * torch.fft.rfft(x).mean(dim=0)
                self.mean.lerp_(x.mean(dim=0), 0.1)
                self.batches += 1
        scale = 1 + torch.fft.irfft(self.spectrum, n=FEATURES)
        filtered = torch.fft.irfft(torch.fft.rfft(x - self.mean) * self.filter, n=FEATURES)
        return self.linear(filtered * scale * self.mask) + self.shift


@dataclass
class Spectrum(Points):
    """Complex parameters and buffers, and buffers that are not persistent."""

    def build_model(self) -> nn.Module:
        return Spectral()


class EmptyParameter(nn.Linear):
    """A layer with a parameter without elements, as an adapter of rank 0 has."""

    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return super().forward(features) + self.nothing.sum()


@dataclass
class WithEmptyParameter(Points):
    """A model with a parameter without elements."""

    def build_model(self) -> nn.Module:
        return EmptyParameter()


class Scale(nn.Module):
    """Multiplies by a parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features * self.factor


@dataclass
class Scaled(Layered):
    """The same, with a scale of its logits that is learned, and comes first."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(Scale(), super().build_model())


@dataclass
class TwoOptimizersInParts(TwoOptimizers):
    """It counts in its forward, which no tracing would see: the task names the parts."""

    def pipeline_blocks(self, model: nn.Module) -> list[Any]:
        assert isinstance(model, TwoParts)
        return [(model.counted, [model.body, model.seen]), (lambda hidden: (hidden,), []), model.head]


class Skips(nn.Module):
    """Values that go past a block: a residual, a number, and a mask of the arguments'."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(8))
        self.last = nn.Linear(8, CLASSES)

    def forward(self, features: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = start = self.first(features)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        hidden = hidden * self.scale + start / features.shape[1]
        return self.last(hidden if mask is None else hidden * mask)


@dataclass
class Skipping(Points):
    """A model whose forward is traced."""

    def build_model(self) -> nn.Module:
        return Skips()

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        mask = torch.rand(len(batch[0]), 1) > 0.1
        return functional.cross_entropy(model(batch[0], mask=mask), batch[1])

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, Any]:
        right = model(batch[0], mask=torch.ones(1)).argmax(dim=1) == batch[1]
        return {"accuracy": right.float()}


class Branches(nn.Module):
    """One part of a block whose input other parts use too, as attention beside a feed-forward layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second, third = (way(x) for way in self.ways)
        return (first * second).tanh() * scale + third.sin() * scale, scale


class SharedInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.blocks = nn.ModuleList(nn.ModuleList([Branches(), Branches()]) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        scale = x.mean(dim=0, keepdim=True).sigmoid()
        for left, right in self.blocks:
            from_left, scale = left(x, scale=scale)
            from_right, scale = right(x, scale=scale)
            x = x + from_left + from_right
        logits: torch.Tensor = self.head(x)
        return logits


@dataclass
class Sharing(Points):
    """Blocks of which several take one input, each more than once."""

    def build_model(self) -> nn.Module:
        return SharedInputs()


@dataclass
class Described:
    """What a model returns, in parts."""

    name: str
    kept: dict[str, Any]
    layers: list[torch.Tensor]


class Describing(nn.Module):
    """A model whose parts the task names, and whose result is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> Described:
        return self.describe(self.first(x))

    def describe(self, hidden: torch.Tensor) -> Described:
        out = self.last(hidden.relu())
        return Described("all", {"logits": out, "scale": 1.0, "cache": None}, [hidden] * 20)


@dataclass
class Describes(Points):
    """A model that returns a dict, a list, a text, a number and 21 tensors in a dataclass."""

    def build_model(self) -> nn.Module:
        return Describing()

    def pipeline_blocks(self, model: nn.Module) -> list[Any]:
        assert isinstance(model, Describing)
        return [model.first, (model.describe, [model.last])]

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        found = model(batch[0])
        return functional.cross_entropy(found.kept["logits"] * found.kept["scale"], batch[1])

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, Any]:
        found = model(batch[0])
        right = (found.kept["logits"].argmax(dim=1) == batch[1]).float()
        return {"accuracy": right * (found.name == "all"), "hidden": found.layers[19].mean(dim=1)}


@dataclass
class Deep(Points):
    """Eight layers, seven micro-batches."""

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=30, microbatches=7, epochs=2)

    def build_model(self) -> nn.Module:
        sizes = [FEATURES, 10, 9, 8, 7, 6, 5, CLASSES]
        layers = [[nn.Linear(a, b), nn.BatchNorm1d(b), nn.Tanh()] for a, b in itertools.pairwise(sizes)]
        return nn.Sequential(*(module for layer in layers for module in layer))


class NoisyBlock(nn.Module):
    """Everything that must not happen twice: batch statistics, counters, and three sources of randomness."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(()))
        self.seen: torch.Tensor

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.linear(self.norm(features)))
        if self.training:
            hidden = hidden * (1 + 0.1 * self.seen + 0.1 * random.random() + 0.1 * np.random.rand())
            self.seen += 1
        return features + self.dropout(hidden)


@dataclass
class Noisy(Points):
    """A list of blocks that backward may compute again."""

    num_val: int = 10

    def build_model(self) -> nn.Module:
        return nn.Sequential(NoisyBlock(), NoisyBlock(), nn.Linear(FEATURES, CLASSES))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.named_parameters(), lr=0.01)


class PartlyUsed(nn.Module):
    """Two blocks, of which one is frozen, a head, and a layer that no forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(NoisyBlock(), NoisyBlock())
        self.head = nn.Linear(FEATURES, CLASSES)
        self.unused = nn.Linear(FEATURES, 2)
        self.blocks[0].requires_grad_(False)
        self.head.bias.requires_grad_(False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(features))


@dataclass
class Frozen(Noisy):
    """Fine-tuning: a block and a bias need no gradient; weight decay shrinks what no forward uses."""

    def build_model(self) -> nn.Module:
        return PartlyUsed()
