"""Linear layers whose frozen weights have four bits each (NF4), by bitsandbytes.

Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023 (https://arxiv.org/abs/2305.14314).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.core.plugins import import_library
from paceline.runs.rank_log import silence_loggers

_BLOCK = 64
"""Weights that share a scale."""


@contextmanager
def hide_modules(*names: str) -> Iterator[None]:
    """Within the context, let imports of these modules fail."""
    imported = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(imported)


def require_bitsandbytes() -> None:
    """Import bitsandbytes."""
    # With the package kernels, it would download code from the Hub and run it.
    with silence_loggers("bitsandbytes"), hide_modules("kernels"):
        import_library("bitsandbytes", "--lora quantize=nf4", "qlora")


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a weight.

    Returns:
        Two numbers a byte, uint8 (N / 2, 1), and the scale of each block, fp32 (N / 64,), with N a multiple of 64.
    """
    from bitsandbytes.functional import quantize_4bit

    flat = weight.detach().reshape(-1)
    blocks = functional.pad(flat, (0, -flat.numel() % _BLOCK)).view(-1, _BLOCK)
    packed, state = quantize_4bit(blocks, blocksize=_BLOCK, quant_type="nf4")
    return packed, state.absmax


def dequantize(packed: Tensor, scales: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weight of this shape that two tensors of :func:`quantize` stand for."""
    from bitsandbytes.functional import QuantState, dequantize_4bit

    # On a CPU, bitsandbytes 0.50 confuses the blocks of a matrix whose rows are not whole blocks.
    rows = torch.Size([scales.numel(), _BLOCK])
    state = QuantState(scales, shape=rows, blocksize=_BLOCK, quant_type="nf4", dtype=dtype)  # type: ignore[no-untyped-call]
    weights: Tensor = dequantize_4bit(packed, state)
    return weights.reshape(-1)[: torch.Size(shape).numel()].view(*shape)


class QuantizedLinear(nn.Module):
    """A linear layer that computes with the dequantized weight, which no step keeps."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        packed, scales = quantize(layer.weight)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias: nn.Parameter | None = layer.bias

    def forward(self, inputs: Tensor) -> Tensor:
        if torch.is_autocast_enabled(inputs.device.type):
            inputs = inputs.to(torch.get_autocast_dtype(inputs.device.type))
        shape = (self.out_features, self.in_features)
        outputs: Tensor = _Product.apply(inputs, self.packed, self.scales, shape)  # type: ignore[no-untyped-call]
        return outputs if self.bias is None else outputs + self.bias.to(outputs.dtype)


class _Product(torch.autograd.Function):
    """The product with a frozen weight, which is dequantized again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, packed: Tensor, scales: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(packed, scales)
        ctx.shape = shape
        return functional.linear(inputs, dequantize(packed, scales, shape, inputs.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (of_outputs,) = gradients
        packed, scales = ctx.saved_tensors
        return of_outputs @ dequantize(packed, scales, ctx.shape, of_outputs.dtype), None, None, None
