"""The built-in task `transformer`: a small language model on the text of Python's own library."""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from paceline.core.errors import DataError, TaskError
from paceline.core.inference import InferenceSignature, TensorSpec
from paceline.core.task import Defaults, Task

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


# --- The sources of Python's standard library: a real text corpus that every machine has ---
#
# Other versions of Python hold other files, so a model's bits are promised for equal ones only.


_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_HELD_OUT = {0: "test", 1: "val"}
_PARTS = 50


def source_files(root: Path) -> list[Path]:
    """Return the library's own modules below ``root``, without its tests and installed packages.

    They are sorted by their relative path. Files that a build generates about its platform are left out.
    """
    files = (path for path in root.rglob("*.py") if path.is_file())
    kept = [
        path.relative_to(root)
        for path in files
        if not _LEFT_OUT & set(path.relative_to(root).parts)
        and not path.name.startswith(("_sysconfigdata", "sitecustomize"))
    ]
    return sorted(kept, key=lambda path: path.as_posix())


def split_of(path: Path) -> str:
    """Return the split of a file, by a hash of its relative path: 1/50 "test", 1/50 "val", the rest "train"."""
    digest = hashlib.sha256(path.as_posix().encode()).digest()
    return _HELD_OUT.get(int.from_bytes(digest[:8], "big") % _PARTS, "train")


def load_stdlib_text(split: str, root: Path | None = None) -> torch.Tensor:
    """Return the files of a split, one after the other, as bytes.

    Args:
        split: "train", "val" or "test".
        root: the library's directory; default: that of the Python that runs.

    Returns:
        uint8 (N,).
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    text = b"".join((root / path).read_bytes() for path in source_files(root) if split_of(path) == split)
    if not text:
        raise DataError(
            f"the {split} split of the standard library's sources is empty: {root} holds no such .py files. "
            "Use a Python that is installed with its sources."
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


# --- A decoder-only transformer over bytes, trained on the sources of Python's standard library ---


BYTES = 256


@dataclass
class Transformer(Task):
    """Predicts the next byte of Python's standard library; 3.3 million parameters by default.

    Pre-norm blocks as in GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners",
    2019), AdamW with a linear warm-up and a cosine to a tenth.

    Attributes:
        width: of the residual stream; the MLP's is four times that.
        heads: of the attention; they divide ``width``.
        context: bytes that a prediction may look back at; a sample is ``context + 1`` bytes.
        vocabulary: rows of the embedding, at least the 256 that occur.
        tied: the output layer is the embedding.
        dropout: in the residual branches.
        lr: the peak of the schedule.
        warmup: steps up to the peak.
        weight_decay: of matrices; biases, norms and embeddings have none.
        held_out: windows of "val" and "test" that are evaluated, evenly spaced.
    """

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 128
    vocabulary: int = BYTES
    tied: bool = False
    dropout: float = 0.0
    lr: float = 1e-3
    warmup: int = 20
    weight_decay: float = 0.1
    held_out: int = 128

    defaults: ClassVar[Defaults] = Defaults(
        global_batch_size=16,
        microbatches=4,
        best_metric="bits_per_byte:min",
        search=("lr=log:1e-4:1e-2", "warmup=log-int:1:200", "dropout=uniform:0:0.3", "weight_decay=log:1e-3:1"),
    )
    min_microbatch_size: ClassVar[int] = 1
    static_graph: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context", "held_out"):
            if getattr(self, name) < 1:
                raise TaskError(f"Transformer.{name} must be at least 1, but is {getattr(self, name)}.")
        if self.width % self.heads:
            fit = [h for h in range(1, self.width + 1) if self.width % h == 0]
            nearest = min(fit, key=lambda h: abs(h - self.heads))
            raise TaskError(
                f"Transformer.heads ({self.heads}) must divide width ({self.width}). The nearest: {nearest}."
            )
        if self.vocabulary < BYTES:
            raise TaskError(f"Transformer.vocabulary must be at least {BYTES}, one a byte, but is {self.vocabulary}.")

    def build_model(self) -> nn.Module:
        """Bytes (B, T) -> logits (B, T, vocabulary)."""
        return Decoder(self)

    def build_dataset(self, split: str) -> TensorDataset | None:
        """Windows of ``context + 1`` bytes, (N, context + 1) uint8; neighbours share one byte."""
        if split not in ("train", "val", "test"):
            return None
        text = load_stdlib_text(split)
        if len(text) <= self.context:
            raise TaskError(f"Transformer.context ({self.context}) must be below the {len(text)} bytes of {split!r}.")
        # A view: the windows take no memory of their own.
        windows = text.unfold(0, self.context + 1, self.context)
        if split != "train" and len(windows) > self.held_out:
            windows = windows[:: len(windows) // self.held_out][: self.held_out]
        return TensorDataset(windows)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW; only the blocks' matrices and an untied output layer decay."""
        named = list(model.named_parameters())
        decays = [p for name, p in named if p.dim() > 1 and "embedding" not in name]
        others = [p for name, p in named if p.dim() < 2 or "embedding" in name]
        groups: list[dict[str, Any]] = [{"params": decays}, {"params": others, "weight_decay": 0.0}]
        return AdamW(groups, lr=self.lr, betas=(0.9, 0.95), weight_decay=self.weight_decay)

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> LambdaLR:
        """Linear to ``lr`` in ``warmup`` steps, then a cosine down to a tenth of it."""

        def factor(step: int) -> float:
            if step < self.warmup:
                return (step + 1) / self.warmup
            done = min(1.0, (step - self.warmup) / max(1, total_steps - self.warmup))
            return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

        return LambdaLR(optimizer, factor)

    def sequence_parallel_plan(self, model: nn.Module) -> Mapping[str, ParallelStyle]:
        """Split the residual stream and the norms along the sequence, attention and MLP by heads and features."""
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            SequenceParallel,
        )

        whole, sequence = Replicate(), Shard(1)
        return {
            "token_embedding": RowwiseParallel(input_layouts=whole, output_layouts=sequence),
            "position_embedding": RowwiseParallel(input_layouts=whole, output_layouts=Shard(0)),
            "*norm": SequenceParallel(),
            "blocks.*.attention": PrepareModuleInput(input_layouts=sequence, desired_input_layouts=whole),
            **{f"blocks.*.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
            "blocks.*.attention.out": RowwiseParallel(output_layouts=sequence),
            "blocks.*.up": ColwiseParallel(input_layouts=sequence),
            "blocks.*.down": RowwiseParallel(output_layouts=sequence),
            "head": ColwiseParallel(input_layouts=sequence, output_layouts=whole),
        }

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        """Mean cross-entropy over all bytes; windows are equally long, so it is the mean over samples."""
        logits, targets = _predict(model, batch)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, Any]:
        """Bits per byte and next-byte accuracy, each the mean over a window."""
        logits, targets = _predict(model, batch)
        nats = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return {
            "bits_per_byte": nats.mean(dim=1) / math.log(2),
            "accuracy": (logits.argmax(dim=2) == targets).float().mean(dim=1),
        }

    def inference_signature(self, model: nn.Module) -> InferenceSignature:
        """Bytes, int64 (B, T) with T at most ``context``, -> the next one's probabilities, (B, V)."""
        return InferenceSignature(
            module=NextByte(model),
            inputs={
                "bytes": TensorSpec(
                    dtype="int64", shape=(None,), minimum=0, maximum=self.vocabulary - 1, max_size=self.context
                )
            },
            outputs={
                "probabilities": TensorSpec(dtype="float32", shape=(self.vocabulary,)),
                "byte": TensorSpec(dtype="int64"),
            },
            probabilities="probabilities",
            label="byte",
        )

    def inference_batch(self, batch: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        (windows,) = batch
        tokens = windows.long()
        return [tokens[:, :-1]], tokens[:, -1]


class NextByte(nn.Module):
    """What comes after a text."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: torch.Tensor) -> dict[str, torch.Tensor]:
        """Bytes, int64 (B, T) -> the next one's probabilities, (B, vocabulary), and the likeliest, (B,)."""
        logits = self.model(tokens_BT)[:, -1]
        return {"probabilities": logits.softmax(dim=1), "byte": logits.argmax(dim=1)}


class Decoder(nn.Module):
    """Embeddings, blocks, a last norm and the output layer."""

    def __init__(self, task: Transformer) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(task.vocabulary, task.width)
        self.position_embedding = nn.Embedding(task.context, task.width)
        self.blocks = nn.ModuleList(Block(task.width, task.heads, task.dropout) for _ in range(task.layers))
        self.norm = nn.LayerNorm(task.width)
        self.head = nn.Linear(task.width, task.vocabulary, bias=False)
        # GPT-2's initialization: the weights of additions to the residual stream are smaller in deeper models.
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * task.layers))
            elif parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if task.tied:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Tokens, int64 (B, T) with T at most the context, -> logits (B, T, vocabulary)."""
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.token_embedding(tokens_BT) + self.position_embedding(positions_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits: torch.Tensor = self.head(self.norm(x_BTD))
        return logits


class Block(nn.Module):
    """Attention and an MLP, each after a norm and added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """(B, T, width) -> (B, T, width)."""
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        hidden_BTF = functional.gelu(self.up(self.mlp_norm(x_BTD)))
        added: torch.Tensor = x_BTD + self.dropout(self.down(hidden_BTF))
        return added


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """(B, T, width) -> (B, T, width); a position attends to itself and earlier ones."""
        # The number of heads follows from the width of the layer, which may hold only a part of the heads.
        q_BHTK, k_BHTK, v_BHTK = (
            layer(x_BTD).unflatten(2, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed_BHTK = functional.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        out_BTD: torch.Tensor = self.out(mixed_BHTK.transpose(1, 2).flatten(2))
        return out_BTD


def _predict(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits (B, T, V) and the target bytes, int64 (B, T)."""
    (windows,) = batch
    tokens = windows.long()
    return model(tokens[:, :-1]), tokens[:, 1:]
