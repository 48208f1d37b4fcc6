"""What each rank tells all others in a step: its first bad shard, its row of numbers, its nodes' sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.distributed.tree import ReductionPlan

_NODE_FIELDS = 4  # samples, weight, loss sum, checksum
_NO_SHARD = -1.0


@dataclass(frozen=True)
class ShardSums:
    """One shard's sums; the loss stays on its device until the step's end, to wait only once."""

    shard: int
    samples: int
    weight: torch.Tensor | float
    loss_sum: torch.Tensor
    checksum: int


class StepHeader:
    """A rank's header: float64 numbers, equally many on every rank.

    Args:
        plan: who sums what.
        rank: this one.
        row_length: numbers that each rank adds of its own.

    Attributes:
        length: of a header.
    """

    def __init__(self, plan: ReductionPlan, rank: int, row_length: int) -> None:
        self._plan, self._rank = plan, rank
        self._row_length = row_length
        self.length = 1 + row_length + _NODE_FIELDS * max(len(nodes) for nodes in plan.nodes)

    def pack(self, row: Sequence[float], shards_sums: Sequence[ShardSums]) -> list[float]:
        """The header of this rank, which has computed these shards, in order."""
        assert len(row) == self._row_length
        nodes = self._plan.nodes[self._rank]
        shards = [sums.shard for sums in shards_sums]
        weights = _to_host([sums.weight for sums in shards_sums])
        losses = _to_host([sums.loss_sum for sums in shards_sums])
        bad_shard = _NO_SHARD
        slots = [[0.0] * _NODE_FIELDS for _ in range(self._plan.slots[self._rank])]
        # The same additions in the same order as for the gradients, in float64.
        for step, sums, weight, loss in zip(
            self._plan.accumulation(self._rank, shards), shards_sums, weights, losses, strict=True
        ):
            values = [sums.samples, weight, loss, sums.checksum]
            slots[step.slot] = values if step.fresh else add_fields(slots[step.slot], values)
            for into, other in step.merges:
                slots[into] = add_fields(slots[into], slots[other])
            if bad_shard == _NO_SHARD and not (math.isfinite(loss) and math.isfinite(weight)):
                bad_shard = sums.shard
        header = [bad_shard, *row]
        for node, fields in zip(nodes, slots, strict=False):
            holds_any = any(node.start <= shard < node.stop for shard in shards)
            header += fields if holds_any else [0.0] * _NODE_FIELDS
        return header + [0.0] * (self.length - len(header))

    def rows(self, headers: Sequence[Sequence[float]]) -> list[Sequence[float]]:
        """Each rank's row."""
        return [header[1 : 1 + self._row_length] for header in headers]

    def node_sums(self, headers: Sequence[Sequence[float]]) -> list[list[float]]:
        """Samples, weight, loss and checksum of each node, in the order of the plan's."""
        first = 1 + self._row_length
        return [
            list(headers[rank][first + _NODE_FIELDS * i :][:_NODE_FIELDS])
            for rank, nodes in enumerate(self._plan.nodes)
            for i in range(len(nodes))
        ]

    def bad_shard(self, headers: Sequence[Sequence[float]]) -> int | None:
        """The lowest shard whose loss was NaN or infinite."""
        return min((int(header[0]) for header in headers if header[0] != _NO_SHARD), default=None)


def add_fields(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """Two nodes' sums, added."""
    return [a + b for a, b in zip(left, right, strict=True)]


def _to_host(values: Sequence[torch.Tensor | float]) -> list[float]:
    """Numbers of zero-dimensional tensors, waiting once for a GPU instead of once for each."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if len(tensors) == len(values) and any(tensor.is_cuda for tensor in tensors):
        return [float(number) for number in torch.stack(tensors).tolist()]
    return [float(value) for value in values]
