"""Tasks whose optimizers or gradients are not those of SGD: noise, overflows, states of other forms."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from tests.training.tasks import CLASSES, FEATURES, Layered, Points, TwoParts
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import paceline
from paceline.core.task import Callback, RankInfo, RunSchedule


class Langevin(SGD):
    """SGD that adds noise to each step (SGLD)."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter += 0.01 * torch.randn_like(parameter) + 0.001 * random.random() * float(np.random.rand())
        return loss


class GradientNoise(Callback):
    """Noise on the reduced gradients, as DP-SGD adds it, and draws at all other times."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.drawn = 0.0

    def on_before_optimizer_step(self) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad += 0.01 * torch.randn_like(parameter.grad) * (1 + self.drawn)

    def on_step_begin(self, step: int, step_in_epoch: int) -> None:
        self.drawn = float(torch.rand(()))

    def on_epoch_end(self, epoch: int) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.01 * torch.randn_like(parameter)


@dataclass
class Random(Points):
    """Draws wherever user code runs, from generators that it does not seed."""

    def build_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        features = torch.randn(self.num, FEATURES) + random.random() + float(np.random.rand())
        return TensorDataset(features, torch.randint(CLASSES, (self.num,)))

    def build_optimizer(self, model: nn.Module) -> Optimizer | Mapping[str, Optimizer]:
        return Langevin(model.parameters(), lr=self.lr * (1 + random.random()))

    def build_callback(self, model: nn.Module, schedule: RunSchedule) -> Callback:
        return GradientNoise(model)


@dataclass
class Overflowing(Points):
    """Its gradients, times the scale that fp16 begins with, are more than a half can hold."""

    num: int = 40
    num_val: int = 9

    # The last batch, of 8 samples, has four micro-batches: at four ranks and eight micro-batches, two have none.
    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=32, microbatches=8, epochs=3)

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> StepLR:
        return StepLR(optimizer, step_size=1, gamma=0.5)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        super().loss(model, batch)
        return functional.cross_entropy(model(batch[0]), batch[1]) * 100


@dataclass
class OverflowingOnce(Overflowing):
    """The same with one call of the model, as a pipeline needs it."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1]) * 100


class Shift(nn.Module):
    """Adds a row of parameters, of which the second of two ranks holds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.zeros(1, FEATURES))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features + self.row


@dataclass
class OverflowingFirst(Overflowing):
    """Only the first class's gradients are too large, and with them those of the first parameter."""

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=32, microbatches=8, epochs=6)

    def build_model(self) -> nn.Module:
        return nn.Sequential(Shift(), nn.Linear(FEATURES, CLASSES))

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        scores = model(batch[0])
        return functional.cross_entropy(scores, batch[1]) / 10 + 30 * scores[:, 0].mean()


@dataclass
class NaNGradient(Overflowing):
    """A finite loss whose gradient is NaN, at whatever scale."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        scores = model(batch[0])
        return functional.cross_entropy(scores, batch[1]) + (scores - scores).mean().sqrt()


@dataclass
class OverflowingLayers(Layered):
    """Layers that can be split and cut into stages, whose first gradients are more than a half can hold."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1]) * 300


@dataclass
class Normed(Points):
    """Batch norm, a counter and momentum, and no randomness."""

    def build_model(self) -> nn.Module:
        parts = TwoParts()
        parts.body[3] = nn.Identity()
        return parts

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.lr, momentum=0.9)


@dataclass
class Factored(Points):
    """Adafactor, which keeps rows and columns of a matrix's squares."""

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Adafactor(model.parameters(), lr=self.lr)


class Noted(SGD):
    """An optimizer whose state is more than tensors and numbers."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["notes"] = {}


class CountsState(Callback):
    """Writes how many numbers this rank's optimizer holds when the training ends."""

    def __init__(self, task: Told) -> None:
        self._task = task

    def attach(self, group: RankInfo, *, step: int, epoch: int) -> None:
        self._path = group.directory / f"numbers-{group.rank}.json"

    def on_fit_end(self) -> None:
        states = self._task.built.state.values()
        numbers = sum(v.numel() for s in states for v in s.values() if v.numel() > 1)
        self._path.write_text(json.dumps(numbers))


@dataclass
class Told(Points):
    """Tells how much of the optimizer's state each rank holds."""

    optimizer: str = "AdamW"

    def build_callback(self, model: nn.Module, schedule: RunSchedule) -> Callback:
        return CountsState(self)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        kind: Any = {"AdamW": AdamW, "Adagrad": Adagrad, "Noted": Noted}[self.optimizer]
        self.built: Optimizer = kind(model.parameters(), lr=0.01)
        return self.built


class PartsModel(nn.Module):
    """A convolution, a head, and a factor, which may be a single number."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 2, 2), nn.Linear(2, CLASSES)
        self.scale = nn.Parameter(torch.ones((1,) * dims))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x.view(-1, 3, 2, 2)).flatten(1)) * self.scale


class Indexing(SGD):
    """Writes to some elements of a parameter, which torch does not do for sharded ones."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter[parameter.grad < 0] = 0.0


class OwnState(SGD):
    """A state of another form than torch's."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.steps = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.steps += 1
        if self.steps % 3 == 0:
            for group in self.param_groups:
                torch._foreach_mul_(group["params"], 0.9)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict["inner"])
        self.steps = state_dict["steps"]


@dataclass
class Parts(Points):
    """What one process trains, and ``fully_shard`` does not."""

    scale: int = 1
    channels_last: bool = False
    optimizer: str = "SGD"
    use: str = "model"

    def build_model(self) -> nn.Module:
        model = PartsModel(self.scale)
        match self.use:
            case "hook":
                model.head.weight.register_hook(lambda gradient: 2 * gradient)
            case "pixel":
                model.conv = nn.Conv2d(3, 2, 1)
            case "types":
                model.head.double()
            case "alias":
                model.scale = nn.Parameter(model.head.bias.detach()[:1])
            case "scripted":
                model.head = torch.jit.script(model.head)
        return model.to(memory_format=torch.channels_last if self.channels_last else torch.contiguous_format)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        kind = {"Indexing": Indexing, "OwnState": OwnState}.get(self.optimizer) or getattr(torch.optim, self.optimizer)
        parameters = [p for p in model.parameters() if p.dim() == 2] if self.optimizer == "Muon" else model.parameters()
        return kind(parameters, lr=self.lr)  # type: ignore[no-any-return]

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        x, labels = batch
        match self.use:
            case "part":
                out = model.head(x[:, :2])  # type: ignore[operator]
            case "direct":
                out = model.head.weight.square().sum() + model(x)  # type: ignore[operator,union-attr]
            case "derivative":
                x = x.clone().requires_grad_()
                (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
                out = model(x + slope)
            case "meta":
                weights = dict(model.named_parameters())
                inner = torch.func.functional_call(model, weights, (x,)).sum()
                slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
                stepped = {name: w - s for (name, w), s in zip(weights.items(), slopes, strict=True)}
                out = torch.func.functional_call(model, stepped, (x,))
            case "uncalled":
                return (model(x).sum() if x[0, 0] > 0 else torch.zeros((), requires_grad=True)) * 1.0
            case "functional":
                out = torch.func.functional_call(model, {n: w * 2 for n, w in model.named_parameters()}, (x,))
            case _:
                out = model(x)
        return functional.cross_entropy(out, labels)
