"""A reversible block: its input is computed from its output, so that no activation is kept for backward.

Gomez et al., "The Reversible Residual Network: Backpropagation Without Storing Activations", 2017. An
alternative to activation checkpointing, which keeps a block's input and runs its forward again: here nothing
is kept but the last block's output, however deep the stack is.

    paceline train examples/reversible_block.py:Reversible --max-steps 100

``--set invert=false`` computes the same with activations kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.utils.data import TensorDataset

import paceline
from paceline_tasks.fashion_mnist import load_fashion_mnist


class ReversibleBlock(nn.Module):
    """(x1, x2) -> (y1, y2) with y1 = x1 + f(x2) and y2 = x2 + g(y1); f and g keep the shape.

    They must be functions of their input alone: no dropout, and no batch norm, whose statistics a second
    run would count twice.

    Args:
        f: shape-preserving.
        g: shape-preserving.
    """

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f, self.g = f, g

    def forward(self, x1: torch.Tensor, x2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two tensors of one shape -> two of that shape."""
        y1 = x1 + self.f(x2)
        return y1, x2 + self.g(y1)

    def inverse(self, y1: torch.Tensor, y2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What :meth:`forward` was called with, but for rounding."""
        x2 = y2 - self.g(y1)
        return y1 - self.f(x2), x2


class _Inverting(torch.autograd.Function):
    """A stack of blocks, whose backward goes from each block's output to its input and gradients."""

    @staticmethod
    def forward(ctx: Any, blocks: Sequence[ReversibleBlock], *tensors: torch.Tensor) -> Any:
        x1, x2 = tensors[:2]
        for block in blocks:
            x1, x2 = block(x1, x2)
        ctx.blocks = blocks
        ctx.save_for_backward(x1, x2)
        return x1, x2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        y1, y2 = ctx.saved_tensors
        grad1, grad2 = gradients
        of_blocks: list[tuple[torch.Tensor | None, ...]] = []
        for block in reversed(ctx.blocks):
            with torch.no_grad():
                x1, x2 = block.inverse(y1, y2)
            with torch.enable_grad():
                x1, x2 = x1.detach().requires_grad_(), x2.detach().requires_grad_()
                outputs = block(x1, x2)
            wanted = [x1, x2, *block.parameters()]
            grad1, grad2, *of_parameters = torch.autograd.grad(outputs, wanted, (grad1, grad2), allow_unused=True)
            of_blocks.append(tuple(of_parameters))
            y1, y2 = x1.detach(), x2.detach()
        return None, grad1, grad2, *(g for of_block in reversed(of_blocks) for g in of_block)


class ReversibleStack(nn.Module):
    """Reversible blocks, one after the other.

    Args:
        blocks: the blocks.
        invert: keep no activations.
    """

    def __init__(self, blocks: Sequence[ReversibleBlock], *, invert: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.invert = invert

    def forward(self, x1: torch.Tensor, x2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two tensors of one shape -> two of that shape."""
        if not self.invert:
            for block in self.blocks:
                x1, x2 = block(x1, x2)
            return x1, x2
        # The parameters are arguments, so that autograd gives each its gradient in the usual way.
        parameters = [parameter for block in self.blocks for parameter in block.parameters()]
        y1, y2 = _Inverting.apply(list(self.blocks), x1, x2, *parameters)  # type: ignore[no-untyped-call]
        return y1, y2


class Classifier(nn.Module):
    """Images (B, 1, 28, 28) -> logits (B, 10), through a reversible stack of MLPs.

    Args:
        width: of each half.
        depth: blocks.
        invert: keep no activations in the stack.
    """

    def __init__(self, width: int, depth: int, *, invert: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(784, 2 * width)
        self.stack = ReversibleStack([ReversibleBlock(_mlp(width), _mlp(width)) for _ in range(depth)], invert=invert)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 (B, 1, 28, 28) -> float32 (B, 10)."""
        x1, x2 = self.stem(images.flatten(1) / 255).chunk(2, dim=1)
        logits: torch.Tensor = self.head(torch.cat(self.stack(x1, x2), dim=1))
        return logits


def _mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


@dataclass
class Reversible(paceline.Task):
    """Ten kinds of clothes, by AdamW."""

    width: int = 64
    depth: int = 6
    invert: bool = True
    lr: float = 1e-3

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=128, microbatches=4, epochs=1)

    def build_model(self) -> nn.Module:
        return Classifier(self.width, self.depth, invert=self.invert)

    def build_dataset(self, split: str) -> TensorDataset | None:
        if split == "val":
            return None
        return TensorDataset(*load_fashion_mnist(split))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        images, labels = batch
        return {"accuracy": (model(images).argmax(dim=1) == labels).float()}


if __name__ == "__main__":
    paceline.fit(Reversible())
