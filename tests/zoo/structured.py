"""Data with a structure: graphs, tables, pictures with masks or boxes, and what users chose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adafactor, Adagrad, Adam, Adamax, Optimizer, SparseAdam
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, StepLR
from torch.utils.data import Dataset, TensorDataset

import paceline


class Graph(NamedTuple):
    """One graph, or several whose nodes are numbered through."""

    nodes: torch.Tensor
    edges: torch.Tensor
    graph_of: torch.Tensor
    targets: torch.Tensor


def random_graph() -> Graph:
    size = int(torch.randint(2, 12, ()))
    edges = torch.randint(size, (2, 3 * size))
    nodes = torch.randn(size, 6)
    return Graph(nodes, edges, torch.zeros(size, dtype=torch.int64), nodes[edges[0]].sum().view(1).tanh())


class MessagePassing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.messages = nn.ModuleList(nn.Linear(2 * width, 12) for width in (6, 12))
        self.updates = nn.ModuleList(nn.Linear(width + 24, 12) for width in (6, 12))
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(24, 1)

    def forward(self, graph: Graph) -> torch.Tensor:
        hidden, (sources, sinks) = graph.nodes, graph.edges
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = message(torch.cat([hidden[sources], hidden[sinks]], dim=1)).relu()
            total = torch.zeros(len(hidden), 12).index_add(0, sinks, sent)
            most = torch.zeros(len(hidden), 12).scatter_reduce(0, sinks.unsqueeze(1).expand_as(sent), sent, "amax")
            hidden = update(torch.cat([hidden, total, most], dim=1)).relu()
        hidden, number = self.norm(hidden), len(graph.targets)
        total = torch.zeros(number, 12).index_add(0, graph.graph_of, hidden)
        sizes = torch.bincount(graph.graph_of, minlength=number).unsqueeze(1)
        return self.head(torch.cat([total, total / sizes], dim=1)).squeeze(1)


@dataclass
class Graphs(paceline.Task):
    """Graphs of several sizes, which the collate function makes one graph of."""

    lr: float = 0.01

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=24, microbatches=6, epochs=2)

    def build_model(self) -> nn.Module:
        return MessagePassing()

    def build_dataset(self, split: str) -> Any:
        return [random_graph() for _ in range(77)] if split == "train" else None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), lr=self.lr)

    def collate(self, samples: list[Graph]) -> Graph:
        sizes = torch.tensor([len(graph.nodes) for graph in samples])
        first = sizes.cumsum(0) - sizes
        return Graph(
            torch.cat([graph.nodes for graph in samples]),
            torch.cat([graph.edges + offset for graph, offset in zip(samples, first, strict=True)], dim=1),
            torch.arange(len(samples)).repeat_interleave(sizes),
            torch.cat([graph.targets for graph in samples]),
        )

    def loss(self, model: nn.Module, batch: Graph) -> torch.Tensor:
        return functional.smooth_l1_loss(model(batch), batch.targets)


class Columns(nn.Module):
    def __init__(self, sizes: list[int], numbers: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size + 1, 4, max_norm=None) for size in sizes)
        self.missing = nn.Parameter(torch.zeros(numbers))
        self.norm = nn.BatchNorm1d(numbers)
        self.layers = nn.Sequential(
            nn.Linear(4 * len(sizes) + 2 * numbers, 20), nn.Mish(), nn.AlphaDropout(0.1), nn.Linear(20, 3)
        )

    def forward(self, categories: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        lacking = numbers.isnan()
        filled = self.norm(torch.where(lacking, self.missing, numbers))
        embedded = [each(column) for each, column in zip(self.embeddings, categories.T, strict=True)]
        return self.layers(torch.cat([*embedded, filled, lacking.float()], dim=1))


@dataclass
class Table(paceline.Task):
    """Categories, numbers of which some are missing, and rare classes that weigh more."""

    lr: float = 0.01

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=40, microbatches=12, epochs=2)

    def build_model(self) -> nn.Module:
        return Columns([3, 7, 11], 5)

    def build_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        numbers = np.random.lognormal(size=(170, 5)).astype(np.float32)
        labels = np.digitize(numbers.sum(axis=1), [6.0, 15.0])
        numbers[np.random.random(numbers.shape) < 0.1] = np.nan
        categories = np.stack([np.random.randint(size + 1, size=170) for size in (3, 7, 11)], axis=1)
        return TensorDataset(torch.from_numpy(categories), torch.from_numpy(numbers), torch.from_numpy(labels))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Adamax(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> paceline.Loss:
        categories, numbers, labels = batch
        weights = torch.tensor([1.0, 2.0, 5.5])
        total = functional.cross_entropy(model(categories, numbers), labels, weight=weights, reduction="sum")
        return paceline.Loss(total, weights[labels].sum())


def convolutions(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([convolutions(1, 4), convolutions(4, 8)])
        self.middle = nn.Sequential(convolutions(8, 8), nn.Dropout2d(0.2))
        self.up = nn.ModuleList([nn.ConvTranspose2d(8, 8, 2, stride=2), nn.ConvTranspose2d(8, 4, 2, stride=2)])
        self.after = nn.ModuleList([convolutions(16, 8), convolutions(8, 4)])
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        hidden, kept = pictures, []
        for block in self.down:
            kept.append(block(hidden))
            hidden = functional.max_pool2d(kept[-1], 2)
        hidden = self.middle(hidden)
        for up, after in zip(self.up, self.after, strict=True):
            hidden = after(torch.cat([up(hidden), kept.pop()], dim=1))
        return self.head(hidden)


class Discs(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pictures of a disc, and its mask; flipped at random."""

    def __init__(self, num: int) -> None:
        self.discs = torch.rand(num, 3)

    def __len__(self) -> int:
        return len(self.discs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y, radius = (self.discs[index] * torch.tensor([16.0, 16.0, 4.0])).tolist()
        rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        mask = ((rows - y).square() + (columns - x).square() < (radius + 2) ** 2).float().unsqueeze(0)
        picture = mask + 0.5 * torch.randn(mask.shape)
        return (picture.flip(2), mask.flip(2)) if torch.rand(()) < 0.5 else (picture, mask)


@dataclass
class Segmentation(paceline.Task):
    """A U-Net in the memory format of convolutions; cross-entropy and overlap."""

    lr: float = 0.05

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=16, microbatches=6, epochs=1)

    def build_model(self) -> nn.Module:
        return UNet().to(memory_format=torch.channels_last)

    def build_dataset(self, split: str) -> Any:
        return {"train": Discs(68), "val": Discs(13), "test": None}[split]

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.lr, momentum=0.9, nesterov=True)

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        return CyclicLR(optimizer, base_lr=self.lr / 5, max_lr=self.lr, step_size_up=2, mode="triangular2")

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        pictures, masks = batch
        logits = model(pictures.contiguous(memory_format=torch.channels_last))
        share = logits.sigmoid()
        overlap = 2 * (share * masks).sum(dim=(1, 2, 3)) / (share + masks).sum(dim=(1, 2, 3))
        return functional.binary_cross_entropy_with_logits(logits, masks) + (1 - overlap).mean()

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, Any]:
        found, wanted = model(batch[0]) > 0, batch[1] > 0
        return {"overlap": ((found & wanted).sum(), (found | wanted).sum())}


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.SiLU()),
            *(nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.SiLU()),
        )
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(pictures)).permute(0, 2, 3, 1)


@dataclass
class Boxes(paceline.Task):
    """Any number of boxes in a picture, also none: some micro-batches have no weight."""

    lr: float = 0.02

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=14, microbatches=6, epochs=2)

    def build_model(self) -> nn.Module:
        return Detector()

    def build_dataset(self, split: str) -> Any:
        # Of the boxes, which are (x, y, width, height) from 0 to 1, most pictures have none.
        counts = [max(0, int(torch.randint(-4, 4, ()))) for _ in range(60 if split == "train" else 9)]
        return [{"picture": torch.rand(3, 16, 16), "boxes": 0.9 * torch.rand(count, 4)} for count in counts]

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Adafactor(model.parameters(), lr=self.lr)

    def collate(self, samples: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return torch.stack([sample["picture"] for sample in samples]), [sample["boxes"] for sample in samples]

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, list[torch.Tensor]]) -> paceline.Loss:
        pictures, boxes = batch
        found = model(pictures)
        total = 0.0 * found.sum()
        for cells, wanted in zip(found, boxes, strict=True):
            x, y = (4 * wanted[:, :2]).long().unbind(1)
            guessed = cells[y, x]
            total = total + functional.l1_loss(guessed[:, 1:].sigmoid(), wanted, reduction="sum")
            total = total + functional.softplus(-guessed[:, 0]).sum()
        return paceline.Loss(total, sum(map(len, boxes)))

    def metrics(self, model: nn.Module, batch: tuple[torch.Tensor, list[torch.Tensor]]) -> Mapping[str, Any]:
        found = (model(batch[0])[..., 0] > 0).sum(dim=(1, 2))
        return {"right_number": torch.stack([n == len(b) for n, b in zip(found, batch[1], strict=True)]).float()}


class Towers(nn.Module):
    def __init__(self, items: int, users: int) -> None:
        super().__init__()
        self.items = nn.Embedding(items, 8, sparse=True)
        self.histories = nn.EmbeddingBag(items, 8, mode="sum", sparse=True, include_last_offset=True)
        self.users = nn.Embedding(users, 8, sparse=True)
        self.mix = nn.Linear(16, 8)

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        bags = self.histories(batch["seen"], batch["offsets"], per_sample_weights=batch["weights"])
        return self.mix(torch.cat([bags, self.users(batch["users"])], dim=1))


@dataclass
class Recommender(paceline.Task):
    """Sparse embeddings of users, items and histories; others' items are drawn in the loss."""

    lr: float = 0.02
    items: int = 40
    users: int = 15

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=30, microbatches=6, epochs=2)

    def build_model(self) -> nn.Module:
        return Towers(self.items, self.users)

    def build_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        return [
            {
                "user": number % self.users,
                "seen": torch.randint(self.items, (number % 5,)),  # some saw nothing, some an item twice
                "next": (7 * number) % self.items,
            }
            for number in range(98)
        ]

    def build_optimizer(self, model: nn.Module) -> Mapping[str, Optimizer]:
        assert isinstance(model, Towers)
        return {
            "sparse": SparseAdam([model.items.weight, model.histories.weight], lr=self.lr),
            "users": SGD(model.users.parameters(), lr=10 * self.lr),
            "dense": Adam(model.mix.parameters(), lr=self.lr),
        }

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler | None:
        return None if isinstance(optimizer, SparseAdam) else StepLR(optimizer, step_size=3, gamma=0.5)

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        lengths = torch.tensor([0, *(len(sample["seen"]) for sample in samples)])
        seen = torch.cat([sample["seen"] for sample in samples])
        return {
            "users": torch.tensor([sample["user"] for sample in samples]),
            "seen": seen,
            "weights": 1.0 / (1.0 + seen),
            "offsets": lengths.cumsum(0),
            "next": torch.tensor([sample["next"] for sample in samples]),
        }

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        assert isinstance(model, Towers)
        taste = model(batch)
        wanted, other = model.items(batch["next"]), model.items(torch.randint(self.items, batch["next"].shape))
        return -functional.logsigmoid((taste * (wanted - other)).sum(dim=1)).mean()


class PointNet(nn.Module):
    """A set of points: the largest feature over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Conv1d(3, 16, 1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv1d(16, 16, 1))
        self.all = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, clouds: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.all(self.each(clouds.transpose(1, 2)).amax(dim=2))
        return scores


@dataclass
class PointClouds(paceline.Task):
    """Rotated, jittered and thinned in ``collate``."""

    lr: float = 0.01

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=24, microbatches=6, epochs=1)

    def build_model(self) -> nn.Module:
        return PointNet()

    def build_dataset(self, split: str) -> Any:
        kind = torch.randint(3, (100 if split == "train" else 23,))
        clouds = torch.randn(len(kind), 40, 3) * torch.eye(3).add(0.2)[kind].unsqueeze(1)
        return list(zip(clouds, kind, strict=True)) if split != "test" else None

    def collate(self, samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        clouds = torch.stack([cloud[:32] for cloud, _ in samples])
        return clouds, torch.stack([kind for _, kind in samples])

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Adamax(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        clouds, kind = batch
        jittered = clouds + 0.02 * torch.randn_like(clouds)
        return functional.cross_entropy(model(jittered[:, torch.randperm(32)]), kind, label_smoothing=0.1)


@dataclass
class Ranking(paceline.Task):
    """Queries with up to eight documents each: the better of every pair shall have the higher score."""

    lr: float = 0.02

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=20, microbatches=5, epochs=2)

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 12), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(12, 1))

    def build_dataset(self, split: str) -> Any:
        if split == "test":
            return None
        documents = torch.randn(90 if split == "train" else 21, 8, 6)
        grades = documents[..., :2].sum(dim=2).round().clamp(0, 3)
        return TensorDataset(documents, grades, torch.arange(8) < torch.randint(2, 9, (len(documents), 1)))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Adagrad(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> paceline.Loss:
        documents, grades, present = batch
        scores = model(documents).squeeze(2)
        better = grades.unsqueeze(2) > grades.unsqueeze(1)
        pairs = better & present.unsqueeze(2) & present.unsqueeze(1)
        margins = functional.softplus(scores.unsqueeze(1) - scores.unsqueeze(2))
        return paceline.Loss((margins * pairs).sum(), pairs.sum() + 1e-6 * len(grades))
