"""Smaller weights: int8 or bfloat16 in the file, float32 where they are used.

Each weight matrix is kept in the small type and widened in the forward, by plain tensor operations. So every
format holds it, and every runtime computes it; activations and biases stay as they are.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from paceline.errors import ExportError

Quantization = Literal["int8", "bf16"]

_LARGEST = 127
_TINY = 1e-12  # a row of zeros has no scale
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ROWS_FIRST = (nn.Linear, nn.Embedding, *_CONVOLUTIONS)


class Int8(nn.Module):
    """Symmetric int8 with one scale for each output channel, or each row of an embedding.

    Args:
        channel: the dimension of the channels.
    """

    def __init__(self, channel: int) -> None:
        super().__init__()
        self._channel = channel

    def forward(self, integers: Tensor, scale: Tensor) -> Tensor:
        """int8 and a scale that broadcasts -> the weight, float."""
        return integers.to(scale.dtype) * scale

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """A weight -> integers from -127 to 127, and their scale."""
        others = [dim for dim in range(weight.dim()) if dim != self._channel]
        scale = weight.abs().amax(dim=others, keepdim=True).clamp_min(_TINY) / _LARGEST
        return (weight / scale).round().clamp(-_LARGEST, _LARGEST).to(torch.int8), scale


class Bfloat16(nn.Module):
    """The same number with 8 bits for its digits."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(self, short: Tensor) -> Tensor:
        """bfloat16 -> the weight's own type."""
        return short.to(self._dtype)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor]:
        """A weight, rounded to the nearest."""
        return (weight.to(torch.bfloat16),)  # alone, it would have to be of the weight's type


def quantize(model: nn.Module, quantization: Quantization) -> int:
    """Keep the weights of linear layers, convolutions and embeddings in the small type; returns how many.

    The model computes with the rounded weights from then on. It must not need gradients.

    Raises:
        ExportError: it has no such layer.
    """
    changed = 0
    for module in list(model.modules()):
        if not isinstance(module, (*_ROWS_FIRST, *_TRANSPOSED)) or not module.weight.is_floating_point():
            continue
        if parametrize.is_parametrized(module, "weight"):
            continue
        small = (
            Int8(1 if isinstance(module, _TRANSPOSED) else 0)
            if quantization == "int8"
            else Bfloat16(module.weight.dtype)
        )
        parametrize.register_parametrization(module, "weight", small, unsafe=True)
        changed += 1
    if not changed:
        raise ExportError(
            f"--quantize {quantization}: the model has no linear layer, convolution or embedding to "
            "make smaller. "
            "Leave --quantize out."
        )
    return changed
