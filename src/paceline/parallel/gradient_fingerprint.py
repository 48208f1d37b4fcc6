"""Fingerprints of one micro-batch's gradient, in a separate buffer, to compare two ranks' results."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

import torch

from paceline.parallel.grad_buffers import FlatLayout
from paceline.parallel.transports import GradBuffer

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**18  # elements; bounds the memory, and fits a cache
_BYTES = 6  # of the result, so that a float64 in a step's row represents it exactly
_MASK = 2**64 - 1


def fingerprint(flat_buffers: Iterable[torch.Tensor], *numbers: float) -> int:
    """Return a number in [1, 2**48] for the bits of some tensors and numbers.

    For each tensor's elements x_i, taken as integers, the sums of x_i and of (2 i + 1) x_i are computed modulo 2**64 on
    its device; a single wrong element always changes the first. Integers have no rounding, so the result does not
    depend on device or threads.

    Args:
        flat_buffers: 1-d, contiguous.
        numbers: further values to include.
    """
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}d", *numbers), digest_size=_BYTES)
    for flat_buffer in flat_buffers:
        bits = flat_buffer.view(_INTEGERS[flat_buffer.element_size()])
        odd = torch.arange(min(_CHUNK, bits.numel()), device=bits.device).mul_(2).add_(1)
        sums = []
        for chunk in torch.tensor_split(bits, list(range(_CHUNK, bits.numel(), _CHUNK))):
            wide = chunk.to(torch.int64)  # a view for 64-bit types, so do not change it
            sums += [wide.sum(), (wide * odd[: wide.numel()]).sum()]
        plain = weighted = 0
        for number, value in enumerate(torch.stack(sums).tolist()):
            if number % 2 == 0:
                plain += value
                weighted += 2 * _CHUNK * (number // 2) * value
            else:
                weighted += value
        digest.update(struct.pack("<QQ", plain & _MASK, weighted & _MASK))
    return int.from_bytes(digest.digest(), "little") + 1


class ScratchGradient:
    """A buffer for one micro-batch's gradient, separate from the sums; allocated on first use.

    Args:
        layout: offsets of the gradients.
        like: a gradient buffer on the same device.
    """

    def __init__(self, layout: FlatLayout, like: GradBuffer) -> None:
        self._layout = layout
        self._like = like
        self.flat_buffers: GradBuffer = {}

    def views(self) -> list[torch.Tensor]:
        """Allocate the buffer; return one view per parameter's gradient."""
        self.flat_buffers = {
            dtype: torch.empty_like(self._like[dtype][:numel]) for dtype, numel in self._layout.gradients.items()
        }
        return self._layout.gradient_views(self.flat_buffers)

    def zero(self) -> None:
        for flat_buffer in self.flat_buffers.values():
            flat_buffer.zero_()

    def add_to(self, grad_buffer: GradBuffer) -> None:
        """Add the gradient to a gradient buffer."""
        for dtype, flat_buffer in self.flat_buffers.items():
            grad_buffer[dtype][: flat_buffer.numel()].add_(flat_buffer)

    def fingerprint(self, loss_sum: torch.Tensor, weight: torch.Tensor | float, checksum: int) -> int:
        """Return the fingerprint of the gradient, the sums of the losses and weights, and the checksum."""
        return fingerprint(self.flat_buffers.values(), float(loss_sum.detach()), float(weight), float(checksum))

    def close(self) -> None:
        self.flat_buffers.clear()
        self._like = {}
