"""The order in which gradients are summed: pure functions of micro-batch numbers.

``exact`` sums along one binary tree over the micro-batches 0..P-1 (P the power of two at or above S), whose subtrees
are aligned: a subtree of size 2^k starts at a multiple of 2^k. A rank owns a range of micro-batches and sums the
largest complete subtrees inside it locally; the group computes the upper part of the same tree. The additions, and with
them the bits, are therefore the same for every number of ranks. A micro-batch missing in a short batch is absent from
every sum.

``allreduce`` adds a rank's micro-batches from left to right, then the ranks from left to right.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ReductionOrder = Literal["exact", "allreduce"]


@dataclass(frozen=True)
class Subtree:
    """A set of neighbouring micro-batches that one rank sums locally."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass(frozen=True)
class Accumulate:
    """The accumulation of one micro-batch's gradient.

    Attributes:
        buffer: index of the gradient buffer.
        fresh: whether the buffer starts from zero (else the gradient is added).
        merges: ``(into, other)`` pairs of buffers added afterwards, in order.
    """

    buffer: int
    fresh: bool
    merges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Combine:
    """The group's part of the sum, over all ranks' subtrees, numbered in micro-batch order.

    Attributes:
        additions: ``(into, other)`` pairs of subtree numbers, in order.
        root: the subtree with the total.
    """

    additions: tuple[tuple[int, int], ...]
    root: int


@dataclass(frozen=True)
class ReductionPlan:
    """The assignment of ``num_microbatches`` micro-batches to ``world_size`` ranks, and their sums.

    Attributes:
        work_split: number of micro-batches of each rank, 0 for a spare; equal by default. Ranges follow the order of
            the ranks.
        interleaved: assign micro-batch k to rank k % W instead, so that the micro-batches of a micro-step are
            neighbours.
    """

    num_microbatches: int
    world_size: int
    kind: ReductionOrder = "exact"
    work_split: tuple[int, ...] = ()
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.interleaved:
            assert not self.work_split
            counts = (len(range(r, self.num_microbatches, self.world_size)) for r in range(self.world_size))
            object.__setattr__(self, "work_split", tuple(counts))
        if not self.work_split:
            assert 1 <= self.world_size <= self.num_microbatches
            object.__setattr__(self, "work_split", equal_work_split(self.num_microbatches, self.world_size))
        assert len(self.work_split) == self.world_size
        assert min(self.work_split) >= 0
        assert sum(self.work_split) == self.num_microbatches

    def microbatches_of(self, rank: int) -> range:
        """Return the micro-batches of a rank."""
        if self.interleaved:
            return range(rank, self.num_microbatches, self.world_size)
        return range(self.first_microbatches[rank], self.first_microbatches[rank] + self.work_split[rank])

    @functools.cached_property
    def first_microbatches(self) -> tuple[int, ...]:
        """The start of each rank's range."""
        return (0, *itertools.accumulate(self.work_split[:-1]))

    @functools.cached_property
    def active(self) -> tuple[int, ...]:
        """The ranks that have micro-batches."""
        return tuple(rank for rank, share in enumerate(self.work_split) if share)

    @functools.cached_property
    def subtrees(self) -> tuple[tuple[Subtree, ...], ...]:
        """Each rank's subtrees; a subtree's position in this tuple is the index of its buffer."""
        ranges = (self.microbatches_of(rank) for rank in range(self.world_size))
        if self.interleaved:
            return tuple(tuple(Subtree(microbatch, 1) for microbatch in microbatches) for microbatches in ranges)
        if self.kind == "allreduce":
            return tuple(
                (Subtree(microbatches.start, len(microbatches)),) if microbatches else () for microbatches in ranges
            )
        return tuple(whole_subtrees(microbatches) for microbatches in ranges)

    @functools.cached_property
    def num_grad_buffers(self) -> tuple[int, ...]:
        """Maximum number of gradient buffers of each rank; a spare needs one, for the total."""
        return tuple(
            max((position + _depth(subtree, self.kind) for position, subtree in enumerate(subtrees)), default=1)
            for subtrees in self.subtrees
        )

    def accumulation(self, rank: int, present: Sequence[int]) -> tuple[Accumulate, ...]:
        """Return the accumulation of each of a rank's ``present`` micro-batches, in that order."""
        return _accumulation(self.subtrees[rank], tuple(present), self.kind)

    def combination(self, present: tuple[bool, ...]) -> Combine:
        """Return how the subtrees of all ranks are added, given which of them have a sum."""
        return _combination(tuple(n for subtrees in self.subtrees for n in subtrees), present, self.kind)


def equal_work_split(num_microbatches: int, ranks: int) -> tuple[int, ...]:
    """Split micro-batches over ranks such that the numbers differ by at most one."""
    bounds = [rank * num_microbatches // ranks for rank in range(ranks + 1)]
    return tuple(stop - start for start, stop in itertools.pairwise(bounds))


def whole_subtrees(microbatches: range) -> tuple[Subtree, ...]:
    """Split a range of micro-batches into the fewest aligned subtrees, from left to right."""
    subtrees = []
    start = microbatches.start
    while start < microbatches.stop:
        alignment = start & -start if start else 1 << microbatches.stop.bit_length()
        size = min(alignment, 1 << (microbatches.stop - start).bit_length() - 1)
        subtrees.append(Subtree(start, size))
        start += size
    return tuple(subtrees)


def _depth(subtree: Subtree, kind: ReductionOrder) -> int:
    # Two neighbouring leaves share a buffer, so a subtree of 2^k leaves holds at most k open buffers.
    return 1 if kind == "allreduce" else max(1, subtree.size.bit_length() - 1)


@functools.lru_cache(maxsize=1024)
def _accumulation(
    subtrees: tuple[Subtree, ...], present: tuple[int, ...], kind: ReductionOrder
) -> tuple[Accumulate, ...]:
    steps: list[Accumulate] = []
    for position, subtree in enumerate(subtrees):
        leaves = [microbatch for microbatch in present if subtree.start <= microbatch < subtree.stop]
        if kind == "allreduce":
            steps += [Accumulate(position, leaf == leaves[0], ()) for leaf in leaves]
        else:
            steps += _subtree_accumulation(position, leaves)
    return tuple(steps)


def _subtree_accumulation(first_buffer: int, leaves: list[int]) -> list[Accumulate]:
    """Sum one subtree's present leaves depth first, with open partial sums in a stack of buffers."""
    steps: list[Accumulate] = []
    stack: list[int] = []  # the micro-batch at which each open partial sum starts
    for index, leaf in enumerate(leaves):
        fresh = not (stack and leaf % 2 == 1 and stack[-1] == leaf - 1)
        if fresh:
            stack.append(leaf)
        buffer = first_buffer + len(stack) - 1
        following = leaves[index + 1] if index + 1 < len(leaves) else None
        merges = []
        # Two open sums are added once no later leaf falls into the subtree of their common parent.
        while len(stack) > 1:
            parent_bits = (stack[-2] ^ stack[-1]).bit_length()
            if following is not None and following >> (parent_bits - 1) == stack[-1] >> (parent_bits - 1):
                break
            stack.pop()
            merges.append((first_buffer + len(stack) - 1, first_buffer + len(stack)))
        steps.append(Accumulate(buffer, fresh, tuple(merges)))
    return steps


@functools.lru_cache(maxsize=1024)
def _combination(subtrees: tuple[Subtree, ...], present: tuple[bool, ...], kind: ReductionOrder) -> Combine:
    non_empty = [number for number, is_present in enumerate(present) if is_present]
    assert non_empty, "a step without a single sample"
    if kind == "allreduce":
        return Combine(tuple((non_empty[0], number) for number in non_empty[1:]), non_empty[0])
    additions: list[tuple[int, int]] = []

    def total(start: int, size: int, numbers: list[int]) -> int:
        if len(numbers) == 1:
            return numbers[0]
        half = size // 2
        middle = start + half
        left = [number for number in numbers if subtrees[number].start < middle]
        right = [number for number in numbers if subtrees[number].start >= middle]
        if not right:
            return total(start, half, left)
        if not left:
            return total(middle, half, right)
        into, other = total(start, half, left), total(middle, half, right)
        additions.append((into, other))
        return into

    root = total(0, 1 << (max(subtree.stop for subtree in subtrees) - 1).bit_length(), non_empty)
    return Combine(tuple(additions), root)
