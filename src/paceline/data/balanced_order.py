"""An order whose micro-batches have about equal lengths: sentences by tokens, images by pixels.

Balancing changes neither a step's samples nor the sizes of its micro-batches, only the assignment: the longest sample
first, each to the shortest micro-batch that has capacity left. (Graham, "Bounds on multiprocessing timing anomalies",
1969: longest processing time first.)
"""

from __future__ import annotations

import heapq
import io
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DataError, RunDirectoryError
from paceline.core.files import write_atomically
from paceline.data.order import DeterministicSampler


@dataclass(frozen=True, eq=False)
class BalancedOrder(DeterministicSampler):
    """A ``DeterministicSampler`` that assigns each step's samples to its micro-batches by length.

    Attributes:
        lengths: the length of each sample, by its number, int64 (num_samples,).
    """

    lengths: NDArray[np.int64] = field(kw_only=True, repr=False)
    _assigned: dict[tuple[int, int], NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False)

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
            numbers = super().indices(epoch, start, stop)
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
    return BalancedOrder(**{f.name: getattr(order, f.name) for f in fields(DeterministicSampler)}, lengths=lengths)


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


def save_lengths(path: Path, order: DeterministicSampler | None) -> None:
    """Save the lengths of a balanced order, so that others can recompute it; remove the file for other orders."""
    if not isinstance(order, BalancedOrder):
        path.unlink(missing_ok=True)
        return
    content = io.BytesIO()
    np.save(content, order.lengths, allow_pickle=False)
    write_atomically(path, content.getvalue())


def with_saved_lengths(order: DeterministicSampler | None, path: Path) -> DeterministicSampler | None:
    """Return an order balanced by the saved lengths, if there are any.

    Raises:
        RunDirectoryError: the file does not fit the order.
    """
    if order is None or not path.exists():
        return order
    try:
        lengths = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}") from error
    if lengths.shape != (order.num_samples,) or lengths.dtype != np.int64:
        raise RunDirectoryError(
            f"{path} must contain the lengths of {order.num_samples} samples, int64, but contains {lengths.dtype} of "
            f"shape {lengths.shape}."
        )
    return balance_order(order, lengths)


def require_same_lengths(order: DeterministicSampler | None, path: Path) -> None:
    """Reject sample lengths other than those with which the run was created.

    Raises:
        RunDirectoryError: they differ.
    """
    saved_order = with_saved_lengths(order, path)
    lengths = order.lengths if isinstance(order, BalancedOrder) else None
    saved = saved_order.lengths if isinstance(saved_order, BalancedOrder) and path.exists() else None
    if lengths is None or saved is None:
        same = lengths is saved
    else:
        same = np.array_equal(lengths, saved)
    if not same:
        raise RunDirectoryError(
            f"the task's sample_lengths differ from those in {path}, with which the run was created, so its "
            "micro-batches would have other samples. Restore the task, or start a new run with another --run-dir DIR."
        )
