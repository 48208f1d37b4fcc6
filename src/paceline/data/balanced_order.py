"""An order whose micro-batches have about equal lengths: sentences by tokens, images by pixels.

Balancing changes neither a step's samples nor the sizes of its micro-batches, only the assignment: the longest sample
first, each to the shortest micro-batch that has capacity left. (Graham, "Bounds on multiprocessing timing anomalies",
1969: longest processing time first.)
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError
from paceline.data.order import DeterministicSampler


@dataclass(frozen=True, eq=False)
class BalancedOrder(DeterministicSampler):
    """A ``DeterministicSampler`` that assigns each step's samples to its micro-batches by length.

    Attributes:
        order: which samples a step has.
        lengths: the length of each sample, by its number, int64 (order.dataset_size,).
    """

    order: DeterministicSampler = field(kw_only=True, repr=False)
    lengths: NDArray[np.int64] = field(kw_only=True, repr=False)
    _assigned: dict[tuple[int, int], NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False)

    @property
    def dataset_size(self) -> int:
        return self.order.dataset_size

    @property
    def is_weighted(self) -> bool:
        return self.order.is_weighted

    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        if not 0 <= start <= stop <= self.num_samples:
            return super().indices(epoch, start, stop)  # raises the error
        last = self.steps_per_epoch - 1
        parts, position = [], start
        while position < stop:
            step = min(position // self.global_batch_size, last)
            low, high = self.batch_range(step)
            until = min(high, stop)
            parts.append(self._batch(epoch, step)[position - low : until - low])
            position = until
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _batch(self, epoch: int, step: int) -> NDArray[np.int64]:
        """Return a step's sample numbers, micro-batch by micro-batch; the last result is cached."""
        assigned = self._assigned.get((epoch, step))
        if assigned is None:
            start, stop = self.batch_range(step)
            numbers = self.order.indices(epoch, start, stop)
            capacities = [high - low for low, high in self.microbatch_bounds(step)]
            assigned = numbers[assign_by_length(self.lengths[numbers], capacities)]
            self._assigned.clear()
            self._assigned[epoch, step] = assigned
        return assigned


def assign_by_length(lengths: NDArray[np.int64], capacities: list[int]) -> NDArray[np.int64]:
    """Assign samples to micro-batches such that the micro-batches' total lengths are about equal.

    Args:
        lengths: the lengths of the samples, (n,).
        capacities: the number of samples of each micro-batch; n in total.

    Returns:
        A permutation of range(n): the first micro-batch's samples in their order, then the second's, and so on.
    """
    assigned: list[list[int]] = [[] for _ in capacities]
    lightest = [(0, microbatch) for microbatch, capacity in enumerate(capacities) if capacity]
    for place in np.argsort(-lengths, kind="stable").tolist():
        load, microbatch = heapq.heappop(lightest)
        assigned[microbatch].append(place)
        if len(assigned[microbatch]) < capacities[microbatch]:
            heapq.heappush(lightest, (load + int(lengths[place]), microbatch))
    return np.concatenate([np.sort(np.asarray(microbatch, dtype=np.int64)) for microbatch in assigned])


def balance_order(order: DeterministicSampler, lengths: NDArray[np.int64]) -> BalancedOrder:
    """Return the same order, balanced by these lengths."""
    values = {f.name: getattr(order, f.name) for f in fields(DeterministicSampler)}
    return BalancedOrder(**values, order=order, lengths=lengths)


def check_lengths(values: Iterable[Any], num_samples: int, task: str) -> NDArray[np.int64]:
    """Return a task's sample lengths as an array.

    Raises:
        DataError: they are not whole numbers of at least 0, one per sample.
    """
    try:
        lengths = np.asarray(values if isinstance(values, np.ndarray) else list(values))
    except (TypeError, ValueError) as error:
        raise DataError(f"{task}.sample_lengths must return a number for each sample: {error}") from error
    if lengths.shape != (num_samples,) or lengths.dtype.kind not in "iu" or (lengths.size and lengths.min() < 0):
        raise DataError(
            f"{task}.sample_lengths must return a whole number of at least 0 for each of the {num_samples} "
            f"samples, but returned {lengths.dtype} of shape {lengths.shape}. Count tokens, pixels or points."
        )
    return lengths.astype(np.int64)
