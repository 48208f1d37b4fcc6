"""Tasks whose model depends on the number of processes, or on a restart, and some that only look like it."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tests.training.data_tasks import HuggingFace
from tests.training.tasks import CLASSES, FEATURES, Points, interruption, points
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import paceline
from paceline.core.task import BatchInfo, Callback, RankInfo, RunSchedule

# --- What forward changes ---


class Initialised(nn.Module):
    """Takes its scale from the first batch (ActNorm)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(FEATURES))
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            with torch.no_grad():
                self.scale.copy_(1 / x.std(dim=0))
            self.ready = True
        return self.linear(x * self.scale)


@dataclass
class DataDependentInit(Points):
    def build_model(self) -> nn.Module:
        return Initialised()


class Averaging(nn.Module):
    """Moves its slow copy in forward (MoCo)."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = nn.Linear(FEATURES, CLASSES)
        self.slow = copy.deepcopy(self.fast).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return self.fast(x) + self.slow(x)


@dataclass
class MomentumInForward(Points):
    def build_model(self) -> nn.Module:
        return Averaging()


class Centred(nn.Module):
    """Keeps a running mean in a plain attribute (DINO's centre)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.center = torch.zeros(CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) - self.center
        self.center = 0.9 * self.center + 0.1 * y.detach().mean(dim=0)
        return y


@dataclass
class RunningMean(Points):
    def build_model(self) -> nn.Module:
        return Centred()


@dataclass
class LeftInEvaluation(Points):
    """Predicts its own targets in evaluation mode, and stays there."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, CLASSES))

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor | paceline.Loss:
        predicted = model(batch[0])
        model.eval()
        with torch.no_grad():
            targets = model(batch[0]).softmax(dim=1)
        return functional.cross_entropy(predicted, targets)


@dataclass
class MonteCarlo(Points):
    """Turns dropout and batch norm on in its metrics, and leaves them on."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, CLASSES))

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, Any]:
        model.train()
        return {"mean": torch.stack([model(batch[0]).softmax(dim=1) for _ in range(3)]).mean(dim=(0, 2))}


# --- What the task counts, sets and removes ---


@dataclass
class RateByBatch(Points):
    """Sets the learning rate as a micro-batch begins, which a rank without one does not."""

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        self.optimizer = SGD(model.parameters(), lr=self.lr)
        return self.optimizer

    def on_batch_begin(self, info: BatchInfo) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * 0.8**info.step


@dataclass
class ZeroGrad(Points):
    """Removes the gradients, as loops of one's own do."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor | paceline.Loss:
        model.zero_grad()
        return functional.cross_entropy(model(batch[0]), batch[1])


@dataclass
class Annealing(Points):
    """A weight that rises with each call of ``loss``."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor | paceline.Loss:
        self.calls = getattr(self, "calls", 0) + 1
        return functional.cross_entropy(model(batch[0]), batch[1]) * min(1.0, self.calls / 100)


@dataclass
class Curriculum(Points):
    """Another loss after a thousand calls, of which the first steps show nothing."""

    def __post_init__(self) -> None:
        self.progress = Calls()

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor | paceline.Loss:
        self.progress.number += 1
        return functional.cross_entropy(model(batch[0]), batch[1]) * (1 if self.progress.number < 1000 else 2)


class Calls:
    """A counter of the task's own."""

    def __init__(self) -> None:
        self.number = 0


@dataclass
class Logging(Points):
    """Keeps its losses in a list, which nothing reads."""

    losses: list[float] = field(default_factory=list, init=False, repr=False)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor | paceline.Loss:
        mean = functional.cross_entropy(model(batch[0]), batch[1])
        self.losses.append(float(mean.detach()))
        return mean


@dataclass
class Entropy(Points):
    """Draws from the system's entropy."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor | paceline.Loss:
        return functional.cross_entropy(model(batch[0]), batch[1]) * (1 + random.SystemRandom().random())


# --- Datasets ---


class Rows(Dataset[Any]):
    """Samples that are read one by one."""

    def __init__(self, num: int) -> None:
        self.data = points(num)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + 0.1 * torch.randn(FEATURES) * random.random(), y


class OwnGenerator(Rows):
    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + 0.1 * torch.from_numpy(self.generator.standard_normal(FEATURES, dtype=np.float32)), y


class CachedAugmentation(Rows):
    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index)
        return self.cache[index]


class MixedWithPrevious(Rows):
    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.previous = torch.zeros(FEATURES)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        mixed, self.previous = (x + self.previous) / 2, x
        return mixed, y


@dataclass
class Read(Points):
    """One of the datasets above."""

    kind: str = "Rows"

    def build_dataset(self, split: str) -> Any:
        return globals()[self.kind](self.num) if split == "train" else None


@dataclass
class Unseeded(Points):
    """Data from a generator that nothing seeds."""

    def build_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        features = np.random.default_rng().standard_normal((self.num, FEATURES), dtype=np.float32)
        return TensorDataset(torch.from_numpy(features), torch.arange(self.num) % CLASSES)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor | paceline.Loss:
        interruption.count()
        return functional.cross_entropy(model(batch[0]), batch[1])


class Stream(IterableDataset[Any]):
    """Samples that can only be read in turn, all of them on each rank."""

    def __init__(self, num: int) -> None:
        self.data = points(num)

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in self.numbers())

    def numbers(self) -> list[int]:
        return list(range(len(self.data)))


class SplitByGroup(Stream):
    def numbers(self) -> list[int]:
        return super().numbers()[dist.get_rank() :: dist.get_world_size()]


class SplitByEnvironment(Stream):
    def numbers(self) -> list[int]:
        part = len(self.data) // int(os.environ["WORLD_SIZE"])
        return super().numbers()[part * int(os.environ["RANK"]) :][:part]


class ShuffledByClock(Stream):
    def numbers(self) -> list[int]:
        return random.SystemRandom().sample(super().numbers(), len(self.data))


class ShuffledByCounter(Stream):
    """Takes its own count of iterations for the epoch."""

    epoch = 0

    def numbers(self) -> list[int]:
        self.epoch += 1
        return random.Random(self.epoch).sample(super().numbers(), len(self.data))


class ShuffledByKey(Stream):
    def numbers(self) -> list[int]:
        return random.sample(super().numbers(), len(self.data))


@dataclass
class SplitByNode(HuggingFace):
    """Split as for a ``DataLoader``."""

    def build_dataset(self, split: str) -> Any:
        from datasets.distributed import split_dataset_by_node

        stream = super().build_dataset(split)
        return None if stream is None else split_dataset_by_node(stream, dist.get_rank(), dist.get_world_size())


# --- What each rank does by itself ---


class Drift(Callback):
    def __init__(self, model: nn.Module) -> None:
        self.model, self.rank = model, 0

    def attach(self, info: RankInfo, *, step: int, epoch: int) -> None:
        self.rank = info.rank

    @torch.no_grad()
    def on_step_end(self, step: int, loss: float) -> None:
        for parameter in self.model.parameters():
            parameter += 1e-4 * self.rank


@dataclass
class Drifting(Points):
    def build_callback(self, model: nn.Module, schedule: RunSchedule) -> Callback:
        return Drift(model)


class Normalised(SGD):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for parameter in parameters:
            parameter -= 0.1 * parameter.grad / norm


@dataclass
class Coupled(Points):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Normalised(model.parameters())


# --- What is pure, though it does not look like it ---


class Memo(nn.Module):
    """Keeps what it computed for each length, and the last result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.tables: dict[int, torch.Tensor] = {}
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.linspace(0.9, 1.1, x.shape[1])
        self.last = self.linear(x * self.tables[x.shape[1]])
        return self.last


@dataclass
class Lookalike(Points):
    """Takes the batch apart, and keeps what depends on nothing but the batch."""

    def build_model(self) -> nn.Module:
        return Memo()

    def build_dataset(self, split: str) -> Any:
        return Rows(self.num) if split == "train" else None

    def collate(self, samples: list[Any]) -> Any:
        return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor | paceline.Loss:
        labels = batch.pop("y")
        batch["x"] *= 2
        mean = functional.cross_entropy(model(batch["x"]), labels)
        self.last_loss = float(mean.detach())
        return mean

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        return {}
