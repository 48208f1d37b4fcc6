"""How the ranks' partial sums meet: what every transport offers, and the one for a single process.

A transport owns the gradient buffers, because shared memory must be allocated by whoever shares
it. There is one flat buffer, a *lane*, for each dtype; a *slot* is one set of lanes, and holds
the sum of one node of the :class:`~paceline.distributed.tree.ReductionPlan`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.distributed.tree import Combine

Slot = dict[torch.dtype, torch.Tensor]


@dataclass(frozen=True)
class Bucket:
    """A stretch of one lane that is sent as soon as all its gradients are there."""

    dtype: torch.dtype
    start: int
    stop: int


class Transport(Protocol):
    """Adds up the slots of all ranks, step after step."""

    slots: list[Slot]
    """This rank's buffers; after :meth:`reduce` slot 0 holds the total."""
    overlaps: bool
    """Whether :meth:`launch` sends while backward still runs."""

    def launch(self, bucket: int) -> None:
        """Send one bucket; called in the same order on every rank, at most once a step."""

    def exchange(self, header: Sequence[float]) -> list[Sequence[float]]:
        """Give every rank every rank's header (float64); also says that the slots are complete."""

    def reduce(self, combine: Combine) -> None:
        """Add up all nodes as ``combine`` says; the total is in every rank's slot 0."""

    def close(self) -> None:
        """Free the buffers."""


class LocalTransport:
    """One process holds all nodes; nothing is sent."""

    overlaps = False

    def __init__(self, slots: int, lanes: Mapping[torch.dtype, int], device: torch.device) -> None:
        self.slots: list[Slot] = [
            {dtype: torch.zeros(numel, dtype=dtype, device=device) for dtype, numel in lanes.items()}
            for _ in range(slots)
        ]

    def launch(self, bucket: int) -> None:
        raise AssertionError("a single process has nobody to send to")

    def exchange(self, header: Sequence[float]) -> list[Sequence[float]]:
        return [header]

    def reduce(self, combine: Combine) -> None:
        for into, other in combine.additions:
            add_slot(self.slots[into], self.slots[other])
        if combine.root != 0:
            for dtype, lane in self.slots[0].items():
                lane.copy_(self.slots[combine.root][dtype])

    def close(self) -> None:
        self.slots.clear()


def add_slot(into: Slot, other: Slot) -> None:
    """Add every lane of ``other`` to ``into``."""
    for dtype, lane in into.items():
        lane.add_(other[dtype])
