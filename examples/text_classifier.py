"""A text classifier over `datasets`: a data set of the Hub, or a folder with train.csv and test.csv.

    paceline train examples/text_classifier.py:TextClassifier --set data=fancyzhx/ag_news --nproc 2
    paceline train examples/text_classifier.py:TextClassifier --set data=FOLDER

The columns are "text" and "label", whole numbers from 0. Micro-batches have about equal numbers of words. It needs
`pip install datasets`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from datasets import DatasetDict, load_dataset
from torch import nn
from torch.nn import functional

import paceline

PADDING = 0


class Encoder(nn.Module):
    """Takes ids of words, (B, L), padded; returns logits, (B, C)."""

    def __init__(self, words: int, length: int, width: int, classes: int) -> None:
        super().__init__()
        self.word = nn.Embedding(words, width, padding_idx=PADDING)
        self.position = nn.Parameter(torch.randn(length, width) / 50)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        padding = ids == PADDING
        hidden = self.layers(self.word(ids) + self.position[: ids.shape[1]], src_key_padding_mask=padding)
        words = (~padding).unsqueeze(2)
        logits: torch.Tensor = self.head((hidden * words).sum(dim=1) / words.sum(dim=1))
        return logits


@dataclass
class TextClassifier(paceline.Task):
    data: str = "fancyzhx/ag_news"
    length: int = 128
    width: int = 128
    lr: float = 5e-4

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=96, microbatches=12, epochs=2)

    @cached_property
    def splits(self) -> DatasetDict:
        return load_dataset(self.data)

    @cached_property
    def vocabulary(self) -> Any:
        return paceline.Vocabulary.observe(self.splits["train"]["text"], max_length=self.length, lowercase=True)

    def build_model(self) -> nn.Module:
        classes = 1 + max(self.splits["train"]["label"])
        return Encoder(self.vocabulary.size, self.length, self.width, classes)

    def build_dataset(self, split: str) -> Any:
        return self.splits.get(split)

    def sample_lengths(self, dataset: Any) -> list[int]:
        return [min(len(text.split()), self.length) for text in dataset["text"]]

    def collate(self, samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.from_numpy(self.vocabulary.encode([sample["text"] for sample in samples]))
        used = int((ids != PADDING).sum(dim=1).amax())
        return ids[:, :used], torch.tensor([sample["label"] for sample in samples])

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        ids, labels = batch
        return functional.cross_entropy(model(ids), labels)

    def metrics(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        ids, labels = batch
        return {"accuracy": (model(ids).argmax(dim=1) == labels).float()}


if __name__ == "__main__":
    paceline.fit(TextClassifier())
