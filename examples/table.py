"""A table: the numbers and categories of a CSV predict another column, and the trained model takes the same columns.

    paceline train examples/table.py:Table --set path=penguins.csv --set target=species --run-dir runs/penguins
    paceline export runs/penguins --name penguins
    paceline predict penguins new.csv --output predicted.csv

A column with numbers alone is a number, any other one a category. An empty cell is a missing value.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline


def is_number(cell: str) -> bool:
    return not cell or cell.removeprefix("-").replace(".", "", 1).isdigit()


class Network(nn.Module):
    """Takes numbers, NaN where one is missing, (B, N), and the codes of each category, (B,)."""

    def __init__(self, numbers: int, sizes: list[int], width: int, classes: int) -> None:
        super().__init__()
        self.scale = nn.BatchNorm1d(numbers)
        self.embeddings = nn.ModuleList(nn.Embedding(size, 4) for size in sizes)
        self.head = nn.Sequential(nn.Linear(2 * numbers + 4 * len(sizes), width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, numbers: torch.Tensor, *codes: torch.Tensor) -> torch.Tensor:
        parts = [self.scale(numbers.nan_to_num()), numbers.isnan().float()]
        parts += [embedding(code) for embedding, code in zip(self.embeddings, codes, strict=True)]
        logits: torch.Tensor = self.head(torch.cat(parts, dim=1))
        return logits


class Predictor(nn.Module):
    """What is exported."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, numbers: torch.Tensor, *codes: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.network(numbers, *codes)
        return {"probabilities": logits.softmax(dim=1), "label": logits.argmax(dim=1)}


@dataclass
class Table(paceline.Task):
    path: str = "table.csv"
    target: str = "label"
    width: int = 32
    lr: float = 1e-2

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=48, microbatches=6, epochs=20)

    def __post_init__(self) -> None:
        with Path(self.path).open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        self.labels = columns.pop(self.target)
        self.classes = sorted(set(self.labels))
        self.numbers = {name: cells for name, cells in columns.items() if all(map(is_number, cells))}
        self.categories = {name: cells for name, cells in columns.items() if name not in self.numbers}
        self.encodings = {
            name: paceline.Categories.observe(cells, unknown=True, missing=True)
            for name, cells in self.categories.items()
        }

    def build_model(self) -> nn.Module:
        sizes = [encoding.size for encoding in self.encodings.values()]
        return Network(len(self.numbers), sizes, self.width, len(self.classes))

    def build_dataset(self, split: str) -> TensorDataset | None:
        if split == "val":  # --val-fraction takes it from "train"
            return None
        test = torch.arange(len(self.labels)) % 5 == 0
        numbers = [[float(cell or "nan") for cell in row] for row in zip(*self.numbers.values(), strict=True)]
        codes = [torch.from_numpy(self.encodings[name].encode(cells)) for name, cells in self.categories.items()]
        columns = [torch.tensor(numbers), *codes, torch.tensor([self.classes.index(label) for label in self.labels])]
        return TensorDataset(*(column[test if split == "test" else ~test] for column in columns))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(*batch[:-1]), batch[-1])

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {"accuracy": (model(*batch[:-1]).argmax(dim=1) == batch[-1]).float()}

    def inference_signature(self, model: nn.Module) -> paceline.InferenceSignature:
        spec, units, classes = paceline.TensorSpec, dict.fromkeys(self.numbers, ""), len(self.classes)
        numbers = spec(dtype="float32", shape=(len(units),), columns=units, allow_missing=True)
        codes = {name: spec(dtype="int64", encoding=encoding) for name, encoding in self.encodings.items()}
        return paceline.InferenceSignature(
            module=Predictor(model),
            inputs={"numbers": numbers, **codes},
            outputs={"probabilities": spec(dtype="float32", shape=(classes,)), "label": spec(dtype="int64")},
            labels=tuple(self.classes),
            probabilities="probabilities",
            label="label",
        )

    def inference_batch(self, batch: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        return batch[:-1], batch[-1]


if __name__ == "__main__":
    paceline.fit(Table())
