"""A rank's header, sent with a step's gradients: first bad micro-batch, row, used parameters, subtrees' sums."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from paceline.parallel.reduction_tree import ReductionPlan

_NO_MICROBATCH = -1.0


@dataclass(frozen=True)
class MicrobatchSums:
    """One micro-batch's sums; the loss stays on its device until the step's end, to synchronise only once."""

    microbatch: int
    samples: int
    weight: torch.Tensor | float
    loss_sum: torch.Tensor
    checksum: int


class SubtreeSums(NamedTuple):
    """The sums over the micro-batches of one subtree of the tree; without a micro-batch, all are 0."""

    samples: float = 0.0
    weight: float = 0.0
    loss_sum: float = 0.0
    checksum: float = 0.0

    def plus(self, other: SubtreeSums) -> SubtreeSums:
        """Return the sums of both subtrees."""
        return SubtreeSums(
            self.samples + other.samples,
            self.weight + other.weight,
            self.loss_sum + other.loss_sum,
            self.checksum + other.checksum,
        )


_SUBTREE_LENGTH = len(SubtreeSums._fields)


# --- A set of parameters, as the bits of an integer, in float64 numbers ---


_BITS = 53  # of an integer that a float64 represents exactly


def set_length(size: int) -> int:
    """Return how many numbers a set of parameters takes that are numbered below ``size``."""
    return -(-size // _BITS)


def pack_set(bits: int, size: int) -> list[float]:
    """Return a set of parameters as numbers; bit i of ``bits`` is parameter i."""
    return [float(bits >> start & (1 << _BITS) - 1) for start in range(0, size, _BITS)]


def union(packed: Iterable[Sequence[float]]) -> int:
    """Return the parameters that are in any of the sets from :func:`pack_set`."""
    bits = 0
    for numbers in packed:
        for position, number in enumerate(numbers):
            bits |= int(number) << _BITS * position
    return bits


class StepHeader:
    """A rank's header: equally many float64 values on every rank.

    Args:
        plan: the work split and the tree.
        row_length: number of values in a rank's row.
        num_parameters: number of the model's trainable parameters.

    Attributes:
        length: number of values in a header.
    """

    def __init__(self, plan: ReductionPlan, rank: int, row_length: int, num_parameters: int) -> None:
        self._plan = plan
        self._rank = rank
        self._num_parameters = num_parameters
        self._row = slice(1, 1 + row_length)  # after the first bad micro-batch
        self._used = slice(self._row.stop, self._row.stop + set_length(num_parameters))  # the subtrees' sums follow
        self.length = self._used.stop + _SUBTREE_LENGTH * max(len(subtrees) for subtrees in plan.subtrees)

    def pack(self, row: Sequence[float], used: int, microbatches_sums: Sequence[MicrobatchSums]) -> list[float]:
        """Return the header of this rank, which has computed these micro-batches, in order.

        Args:
            row: the rank's values.
            used: the parameters that they used, as a set of bits.
            microbatches_sums: of each micro-batch.
        """
        assert len(row) == self._row.stop - self._row.start
        subtrees = self._plan.subtrees[self._rank]
        microbatches = [sums.microbatch for sums in microbatches_sums]
        numbers = read_numbers([number for sums in microbatches_sums for number in (sums.weight, sums.loss_sum)])
        weights, losses = numbers[::2], numbers[1::2]
        bad_microbatch = _NO_MICROBATCH
        subtree_sums = [SubtreeSums()] * self._plan.num_grad_buffers[self._rank]
        # The same additions in the same order as for the gradients, in float64.
        for step, sums, weight, loss in zip(
            self._plan.accumulation(self._rank, microbatches), microbatches_sums, weights, losses, strict=True
        ):
            values = SubtreeSums(sums.samples, weight, loss, sums.checksum)
            subtree_sums[step.buffer] = values if step.fresh else subtree_sums[step.buffer].plus(values)
            for into, other in step.merges:
                subtree_sums[into] = subtree_sums[into].plus(subtree_sums[other])
            if bad_microbatch == _NO_MICROBATCH and not (math.isfinite(loss) and math.isfinite(weight)):
                bad_microbatch = sums.microbatch
        header = [bad_microbatch, *row, *pack_set(used, self._num_parameters)]
        for subtree, of_subtree in zip(subtrees, subtree_sums, strict=False):
            has_microbatch = any(subtree.start <= microbatch < subtree.stop for microbatch in microbatches)
            header += of_subtree if has_microbatch else SubtreeSums()
        return header + [0.0] * (self.length - len(header))

    def rows(self, headers: Sequence[Sequence[float]]) -> list[Sequence[float]]:
        """Return each rank's row."""
        return [header[self._row] for header in headers]

    def used(self, headers: Sequence[Sequence[float]]) -> int:
        """Return the parameters that any rank has used, as a set of bits."""
        return union(header[self._used] for header in headers)

    def subtree_sums(self, headers: Sequence[Sequence[float]]) -> list[SubtreeSums]:
        """Return the sums of each subtree, in the order of the plan."""
        return [
            SubtreeSums(*headers[rank][self._used.stop + _SUBTREE_LENGTH * i :][:_SUBTREE_LENGTH])
            for rank, subtrees in enumerate(self._plan.subtrees)
            for i in range(len(subtrees))
        ]

    def bad_microbatch(self, headers: Sequence[Sequence[float]]) -> int | None:
        """Return the lowest micro-batch whose loss was NaN or infinite."""
        return min((int(header[0]) for header in headers if header[0] != _NO_MICROBATCH), default=None)


def read_numbers(values: Sequence[torch.Tensor | float]) -> list[float]:
    """Return the numbers in zero-dimensional tensors, with one wait for a GPU in total."""
    on_gpu = [value for value in values if isinstance(value, torch.Tensor) and value.is_cuda]
    numbers = iter(torch.stack([value.double() for value in on_gpu]).tolist() if on_gpu else ())
    return [next(numbers) if isinstance(value, torch.Tensor) and value.is_cuda else float(value) for value in values]
