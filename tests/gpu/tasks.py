"""The task of the GPU tests: what is sensitive to numerics on a GPU, in a model that a pipeline can cut."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import TensorDataset

import paceline
from benchmarks.gpu.rows import IS_REAL
from paceline.core.inference import InferenceSignature, TensorSpec
from paceline.core.task import BatchInfo

TOKENS, FEATURES, WIDTH, CLASSES = 32, 16, 64, 5


class Attention(nn.Module):
    """Causal self-attention with two heads, of the backend that torch chooses; where the GPU is pretended, by sums."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))
        if not IS_REAL:
            with sdpa_kernel(SDPBackend.MATH):
                mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention, batch norm over the features, an MLP and dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.BatchNorm1d(WIDTH)
        self.up, self.down, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm((x + self.attention(x)).transpose(1, 2)).transpose(1, 2)
        out: torch.Tensor = x + self.dropout(self.down(functional.gelu(self.up(x))))
        return out


class Head(nn.Module):
    """The mean over the tokens, and a class's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x.mean(dim=1))
        return out


@dataclass
class Mixed(paceline.Task):
    """Classifies made-up sequences.

    Attributes:
        blocks: of the model.
        dropout: after each MLP.
        kill_rank: with ``kill_once``, the rank that dies.
        kill_once: a file: while there is one, ``kill_rank`` removes it in step 7 and kills itself.
        hold: a file: while there is one, rank 0 waits in step 4, beside a file ``hold + ".reached"``.
        hog_bytes: memory to take in step 3.
    """

    blocks: int = 2
    dropout: float = 0.1
    kill_rank: int = 0
    kill_once: str = ""
    hold: str = ""
    hog_bytes: int = 0

    _step = -1

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, WIDTH), *(Block(self.dropout) for _ in range(self.blocks)), Head())

    def build_dataset(self, split: str) -> Any:
        if split == "test":
            return None
        generator = torch.Generator().manual_seed(len(split))
        x = torch.randn(512 if split == "train" else 64, TOKENS, FEATURES, generator=generator)
        return TensorDataset(x, x.mean(dim=1)[:, :CLASSES].argmax(dim=1))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        if self._step == 3 and self.hog_bytes:
            torch.empty(self.hog_bytes, dtype=torch.uint8, device=x.device)
        return functional.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        x, y = batch
        return {"accuracy": (model(x).argmax(dim=1) == y).float()}

    def on_batch_begin(self, info: BatchInfo) -> None:
        self._step = info.step if info.split == "train" else -1
        rank = int(os.environ.get("RANK", "0"))
        if self.kill_once and self._step == 7 and rank == self.kill_rank and Path(self.kill_once).exists():
            Path(self.kill_once).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.hold and self._step == 4 and rank == 0:
            Path(self.hold + ".reached").touch()
            while Path(self.hold).exists():
                time.sleep(0.02)

    def inference_signature(self, model: nn.Module) -> InferenceSignature:
        return InferenceSignature(
            module=Scores(model),
            inputs={"x": TensorSpec(dtype="float32", shape=(TOKENS, FEATURES))},
            outputs={"scores": TensorSpec(dtype="float32", shape=(CLASSES,))},
        )

    def inference_batch(self, batch: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        return [batch[0]], batch[1]


class Scores(nn.Module):
    """The model's logits, by name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": self.model(x)}
