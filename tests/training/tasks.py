"""Small tasks that use what a task may use, and a place to interrupt them."""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Optimizer, SparseAdam
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau, StepLR
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import paceline
from paceline.core.callback import BatchInfo, Callback, RankInfo, RunSchedule
from paceline.training.tasks.transformer import Transformer, load_stdlib_text

CLASSES, FEATURES = 3, 12


class Interruption:
    """Sends this process a SIGTERM when a loss is computed for the ``at``-th time."""

    at = 0
    calls = 0

    def count(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


interruption = Interruption()


def points(num: int, seed: int = 0) -> TensorDataset:
    """Points around one centre a class, so near each other that no model is right about all."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num) % CLASSES
    noise = torch.randn(num, FEATURES, generator=generator)
    return TensorDataset(noise + 0.7 * functional.one_hot(labels, FEATURES), labels)


@dataclass
class Points(paceline.Task):
    """An MLP and SGD; what the other tasks change something of."""

    lr: float = 0.1
    num: int = 100
    num_val: int = 0
    num_test: int = 0

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=16, microbatches=4, epochs=2)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    def build_dataset(self, split: str) -> Any:
        number = {"train": self.num, "val": self.num_val, "test": self.num_test}[split]
        return points(number, seed=len(split)) if number else None

    def build_optimizer(self, model: nn.Module) -> Optimizer | Mapping[str, Optimizer]:
        return SGD(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor | paceline.Loss:
        if model.training:
            interruption.count()
        return functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, Any]:
        return {"accuracy": (model(batch[0]).argmax(dim=1) == batch[1]).float()}


@dataclass
class Tabular(Points):
    """As many features as one likes: rows of other lengths than kernels prefer."""

    width: int = 13

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=36, microbatches=12, epochs=2)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.width, 50), nn.ReLU(), nn.Linear(50, CLASSES))

    def build_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        generator = torch.Generator().manual_seed(7)
        features = torch.randn(216, self.width, generator=generator)
        return TensorDataset(features, torch.randint(CLASSES, (216,), generator=generator))


@dataclass
class SparseWords(Points):
    """Bags of words, in which some occur twice, with sparse gradients."""

    adam: bool = False

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(20, 8, mode="mean", sparse=True), nn.Linear(8, CLASSES))

    def build_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        generator = torch.Generator().manual_seed(3)
        words = torch.randint(20, (self.num, 6), generator=generator)
        return TensorDataset(words, torch.randint(CLASSES, (self.num,), generator=generator))

    def build_optimizer(self, model: nn.Module) -> Optimizer | Mapping[str, Optimizer]:
        if not self.adam:
            return SGD(model.parameters(), lr=self.lr)
        assert isinstance(model, nn.Sequential)
        return {"words": SparseAdam(model[0].parameters()), "head": SGD(model[1].parameters(), lr=self.lr)}


class Hashed(nn.Module):
    """A table that a plain function looks up, with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, 8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.embedding(words, self.table, sparse=True).mean(dim=1))


@dataclass
class HashedWords(SparseWords):
    """The same words, in a model without a layer that has sparse gradients."""

    def build_model(self) -> nn.Module:
        return Hashed()

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.lr)


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


@dataclass
class Annealed(Points):
    """A loss whose weight follows the progress of the run."""

    def on_batch_begin(self, info: BatchInfo) -> None:
        self.info = info

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor | paceline.Loss:
        interruption.count()
        mean = functional.cross_entropy(model(batch[0]), batch[1])
        return (
            mean * (1 - 0.9 * (self.info.progress or 0.0))
            + 0.01 * (self.info.epoch or 0) * model(batch[0]).square().mean()
        )


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
class Everything(Points):
    """Convolution, batch norm, dropout, AdamW, and a schedule that waits for the validation loss."""

    lr: float = 0.02
    num: int = 250

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=48, microbatches=12, epochs=40)

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, FEATURES)),
            nn.Conv1d(1, 6, kernel_size=3),
            nn.BatchNorm1d(6),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(6 * (FEATURES - 2), CLASSES),
        )

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=self.lr)

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> ReduceLROnPlateau:
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


@dataclass
class Layered(Points):
    """Pairs of linear layers that can be split, with a norm in between; AdamW.

    Attributes:
        double: compute in float64.
    """

    lr: float = 0.02
    num: int = 107
    num_val: int = 20
    double: bool = False

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=24, microbatches=4, epochs=2)

    def build_model(self) -> nn.Module:
        model = nn.Sequential(
            *(nn.Linear(FEATURES, 16), nn.GELU(), nn.Linear(16, FEATURES)),
            *(nn.LayerNorm(FEATURES), nn.Dropout(0.2)),
            *(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
        )
        return model.double() if self.double else model

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor | paceline.Loss:
        features = batch[0].double() if self.double else batch[0]
        return super().loss(model, [features, batch[1]])

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, Any]:
        features = batch[0].double() if self.double else batch[0]
        return super().metrics(model, [features, batch[1]])


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
class Text(Transformer):
    """The transformer, as small as it gets.

    Attributes:
        double: compute in float64.
    """

    layers: int = 1
    width: int = 16
    heads: int = 2
    context: int = 16
    held_out: int = 4
    dropout: float = 0.1
    double: bool = False

    def build_model(self) -> nn.Module:
        return super().build_model().double() if self.double else super().build_model()


@dataclass
class Lines(Text):
    """The transformer over lines of a text, whose lengths differ; a step is the mean over its bytes.

    Attributes:
        balanced: whether it says how long they are.
        num: lines.
    """

    dropout: float = 0.0
    context: int = 120
    balanced: bool = True
    num: int = 64

    def build_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        text = bytes(load_stdlib_text("train").tolist())
        lines = [line[: self.context] for line in text.split(b"\n") if len(line) > 1]
        return [torch.frombuffer(bytearray(line), dtype=torch.uint8) for line in lines[: self.num]]

    def sample_lengths(self, dataset: list[torch.Tensor]) -> list[int] | None:
        return [len(line) - 1 for line in dataset] if self.balanced else None

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        padded = torch.full((len(samples), max(map(len, samples))), -1)
        for row, line in zip(padded, samples, strict=True):
            row[: len(line)] = line
        return padded

    def loss(self, model: nn.Module, batch: torch.Tensor) -> paceline.Loss:
        logits, targets = model(batch[:, :-1].clamp(min=0)), batch[:, 1:]
        summed = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
        return paceline.Loss(summed, (targets >= 0).sum())


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(8, CLASSES)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.seen: torch.Tensor

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(self.counted(features))

    def counted(self, features: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return self.body(features)


@dataclass
class TwoOptimizers(Points):
    """Two optimizers with a schedule each, samples of different weights, sums with weights as metrics."""

    num: int = 107

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=24, microbatches=5, epochs=2)

    def build_model(self) -> nn.Module:
        return TwoParts()

    def build_optimizer(self, model: nn.Module) -> Mapping[str, Optimizer]:
        assert isinstance(model, TwoParts)
        return {
            "body": SGD(model.body.parameters(), lr=self.lr, momentum=0.9, nesterov=True),
            "head": AdamW(model.head.parameters(), lr=0.01),
        }

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: 1 - step / (total_steps + 1))

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> paceline.Loss:
        if model.training:
            interruption.count()
        weights = 1.0 + batch[1]
        losses = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return paceline.Loss((losses * weights).sum(), weights.sum())

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, Any]:
        right = model(batch[0]).argmax(dim=1) == batch[1]
        weights = 1.0 + batch[1]
        return {"accuracy": right.float(), "weighted": ((right * weights).sum(), weights.sum())}


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
class ManyMetrics(Points):
    """Metrics of every kind, on a validation split that three ranks cannot share evenly."""

    num: int = 32
    num_val: int = 37
    num_test: int = 3

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, Any]:
        scores = model(batch[0]).softmax(dim=1)
        positive = (batch[1] == 0).long()
        return {
            "accuracy": (scores.argmax(dim=1) == batch[1]).float(),
            "recall": (((scores[:, 0] > 0.4) * positive).sum(), positive.sum()),
            "auroc": (scores[:, 0], positive),
            "f1": (scores.argmax(dim=1), batch[1]),
            "mean": (scores[:, 0],),
        }

    def build_metrics(self) -> Mapping[str, Any]:
        from torchmetrics import MeanMetric
        from torchmetrics.classification import BinaryAUROC, MulticlassF1Score

        return {
            "auroc": BinaryAUROC(),
            "f1": MulticlassF1Score(num_classes=CLASSES, average="macro"),
            "mean": MeanMetric(),
        }


class PointStream(IterableDataset[Any]):
    def __init__(self, num: int) -> None:
        self._points = points(num)

    def __iter__(self) -> Iterator[Any]:
        for features, label in self._points:
            yield features + 0.01 * torch.rand(FEATURES), label


@dataclass
class Iterable(Points):
    """An ``IterableDataset``, with randomness of its own."""

    num: int = 75
    num_val: int = 20

    def build_dataset(self, split: str) -> Any:
        return PointStream(self.num) if split == "train" else super().build_dataset(split)


class Range:
    """The samples ``first``, ``first + 1``, ... ``stop - 1``; its position is one number."""

    def __init__(self, data: TensorDataset, first: int, stop: int) -> None:
        self._data, self._next, self._stop = data, first, stop

    def __next__(self) -> Any:
        if self._next >= self._stop:
            raise StopIteration
        self._next += 1
        return self._data[self._next - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


class UnevenStream:
    """Shard k holds k + 1 parts of the data, so micro-batches end at different steps."""

    def __init__(self, num: int) -> None:
        self._points = points(num)

    def open(self, microbatch: int, num_microbatches: int, epoch: int, seed: int) -> Range:
        part = len(self._points) // (num_microbatches * (num_microbatches + 1) // 2)
        first = part * (microbatch * (microbatch + 1) // 2)
        return Range(self._points, first, first + part * (microbatch + 1))


@dataclass
class Uneven(Points):
    """A ``ShardedStream`` whose micro-batches end at different steps; the short ones come first."""

    num: int = 100

    def build_dataset(self, split: str) -> Any:
        return UnevenStream(self.num) if split == "train" else super().build_dataset(split)


class Records(Dataset[Any]):
    """Reads one sample at a time, as from files: a dict with noise, a label and a name."""

    def __init__(self, num: int) -> None:
        self._points = points(num)

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> dict[str, Any]:
        features, label = self._points[index]
        return {"x": features + 0.1 * torch.randn(FEATURES), "y": label, "name": f"sample-{index}"}


@dataclass
class FromRecords(Points):
    """A map-style dataset that worker processes read."""

    num: int = 40

    def build_dataset(self, split: str) -> Any:
        return Records(self.num) if split == "train" else None

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        assert all(name.startswith("sample-") for name in batch["name"])
        return functional.cross_entropy(model(batch["x"]), batch["y"])


@dataclass
class WorseAndWorse(Points):
    """Its "score" is best at the first evaluation, after which it only falls."""

    num_val: int = 10
    num_test: int = 10

    def build_model(self) -> nn.Module:
        return TwoParts()

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, Any]:
        assert isinstance(model, TwoParts)
        return {"score": (-float(model.seen), 1.0), "undefined": (0.0, 0.0)}


@dataclass
class Lagging(Points):
    """Rank 1 needs 40 ms longer for a micro-batch than the others."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        if os.environ.get("RANK") == "1":
            time.sleep(0.04)
        return super().loss(model, batch)


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
        return PartsModel(self.scale).to(
            memory_format=torch.channels_last if self.channels_last else torch.contiguous_format
        )

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
            case "functional":
                out = torch.func.functional_call(model, {n: w * 2 for n, w in model.named_parameters()}, (x,))
            case _:
                out = model(x)
        return functional.cross_entropy(out, labels)
