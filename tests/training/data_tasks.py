"""Tasks whose data are not a few points: tables, words, text, streams, records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tests.training.tasks import CLASSES, FEATURES, Points, points
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Optimizer, SparseAdam
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import paceline
from paceline_tasks.transformer import Transformer, load_stdlib_text


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
        weighted: whether long lines are drawn more often.
        num: lines.
    """

    dropout: float = 0.0
    context: int = 120
    balanced: bool = True
    weighted: bool = False
    num: int = 64

    def build_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        text = bytes(load_stdlib_text("train").tolist())
        lines = [line[: self.context] for line in text.split(b"\n") if len(line) > 1]
        return [torch.frombuffer(bytearray(line), dtype=torch.uint8) for line in lines[: self.num]]

    def sample_lengths(self, dataset: list[torch.Tensor]) -> list[int] | None:
        return [len(line) - 1 for line in dataset] if self.balanced else None

    def sample_weights(self, dataset: list[torch.Tensor]) -> list[float] | None:
        return [len(line) ** 0.5 for line in dataset] if self.weighted else None

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        padded = torch.full((len(samples), max(map(len, samples))), -1)
        for row, line in zip(padded, samples, strict=True):
            row[: len(line)] = line
        return padded

    def loss(self, model: nn.Module, batch: torch.Tensor) -> tuple[paceline.Loss, dict[str, Any]]:
        logits, targets = model(batch[:, :-1].clamp(min=0)), batch[:, 1:]
        summed = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
        known = targets >= 0
        right = (logits.argmax(-1) == targets) & known
        loss = paceline.Loss(summed, known.sum())
        return loss, {"right": (right.sum(), known.sum()), "bytes": known.sum(1).float()}


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


def hugging_face_stream(num: int) -> Any:
    """Return a stream of Hugging Face, with the points as tensors, in the order of its shards."""
    import datasets

    features, labels = points(num).tensors
    table = datasets.Dataset.from_dict({"x": features.numpy(), "y": labels.numpy()})
    return table.to_iterable_dataset(num_shards=4).with_format("torch")


@dataclass
class HuggingFace(Points):
    """A stream of Hugging Face that shuffles its shards and a buffer, by its own seed and epoch."""

    def build_dataset(self, split: str) -> Any:
        return hugging_face_stream(self.num).shuffle(seed=3, buffer_size=20) if split == "train" else None

    def collate(self, samples: list[Any]) -> Any:
        return [torch.stack([sample[name] for sample in samples]) for name in ("x", "y")]


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
