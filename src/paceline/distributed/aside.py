"""One shard's gradient by itself, so that it can be compared with what another rank computes."""

from __future__ import annotations

import torch

from paceline.distributed.fingerprint import fingerprint
from paceline.distributed.flat import FlatLayout
from paceline.distributed.transport import Slot


class Aside:
    """A buffer for one shard's gradient, beside the slots that sum several; made when it is first wanted.

    Args:
        layout: where each gradient lies.
        like: a slot, on whose device it is made.
    """

    def __init__(self, layout: FlatLayout, like: Slot) -> None:
        self._layout, self._like = layout, like
        self._lanes: Slot = {}

    def views(self) -> list[torch.Tensor]:
        """Make the buffer; one view for each parameter's gradient."""
        self._lanes = {
            dtype: torch.empty_like(self._like[dtype][:numel])
            for dtype, numel in self._layout.gradients.items()
        }
        return self._layout.gradient_views(self._lanes)

    def zero(self) -> None:
        """Begin a gradient."""
        for lane in self._lanes.values():
            lane.zero_()

    def add_to(self, slot: Slot) -> None:
        """Add the gradient to a slot's."""
        for dtype, lane in self._lanes.items():
            slot[dtype][: lane.numel()].add_(lane)

    def fingerprint(self, loss_sum: torch.Tensor, weight: torch.Tensor | float, checksum: int) -> int:
        """Of the gradient, the sums of the losses and of their weights, and the sample numbers' checksum."""
        return fingerprint(self._lanes.values(), float(loss_sum.detach()), float(weight), float(checksum))

    def close(self) -> None:
        """Let go of the memory."""
        self._lanes.clear()
        self._like = {}
