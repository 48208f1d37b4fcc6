"""An order of the data whose shards weigh about the same: sentences by tokens, images by pixels.

A step has the same samples as without, and its shards have the same numbers of them. Only who of a step's
samples is in which shard follows from their sizes, by a rule that everybody can compute: the heaviest
first, each into the shard that is lightest so far and has room. (Graham, "Bounds on multiprocessing timing
anomalies", 1969: longest processing time first.)
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

from paceline.data.order import DataOrder
from paceline.errors import DataError, RunDirectoryError
from paceline.run_directory import write_atomically


@dataclass(frozen=True, eq=False)
class BalancedOrder(DataOrder):
    """The order of ``DataOrder``, with each step's samples dealt to its shards by size.

    Attributes:
        sizes: of each sample, by its number, int64 (num_samples,).
    """

    sizes: NDArray[np.int64] = field(kw_only=True, repr=False)
    _dealt: dict[tuple[int, int], NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False)

    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        if not 0 <= start <= stop <= self.num_samples:
            return super().indices(epoch, start, stop)  # which says what is wrong
        last = self.steps_per_epoch - 1
        parts, at = [], start
        while at < stop:
            step = min(at // self.global_batch_size, last)
            low, high = self.batch_range(step)
            until = min(high, stop)
            parts.append(self._batch(epoch, step)[at - low : until - low])
            at = until
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _batch(self, epoch: int, step: int) -> NDArray[np.int64]:
        """A step's sample numbers, shard by shard; those of the step asked for last are kept."""
        kept = self._dealt.get((epoch, step))
        if kept is None:
            start, stop = self.batch_range(step)
            numbers = super().indices(epoch, start, stop)
            rooms = [high - low for low, high in self.shard_bounds(step)]
            kept = numbers[deal(self.sizes[numbers], rooms)]
            self._dealt.clear()
            self._dealt[epoch, step] = kept
        return kept


def deal(sizes: NDArray[np.int64], rooms: list[int]) -> NDArray[np.int64]:
    """The places of samples, shard by shard, such that shards' sums of sizes are about equal.

    Args:
        sizes: of the samples, (n,).
        rooms: how many samples each shard takes; n in all.

    Returns:
        A permutation of range(n): the first shard's places in their order, then the second's, and so on.
    """
    dealt: list[list[int]] = [[] for _ in rooms]
    lightest = [(0, shard) for shard, room in enumerate(rooms) if room]
    for place in np.argsort(-sizes, kind="stable").tolist():
        load, shard = heapq.heappop(lightest)
        dealt[shard].append(place)
        if len(dealt[shard]) < rooms[shard]:
            heapq.heappush(lightest, (load + int(sizes[place]), shard))
    return np.concatenate([np.sort(np.asarray(shard, dtype=np.int64)) for shard in dealt])


def balanced(order: DataOrder, sizes: NDArray[np.int64]) -> BalancedOrder:
    """The same order, balanced by these sizes."""
    return BalancedOrder(**{f.name: getattr(order, f.name) for f in fields(DataOrder)}, sizes=sizes)


def checked_sizes(values: Iterable[Any], num_samples: int, task: str) -> NDArray[np.int64]:
    """What a task says of its samples, as an array.

    Raises:
        DataError: they are not whole numbers of at least 0, one a sample.
    """
    try:
        given = np.asarray(values if isinstance(values, np.ndarray) else list(values))
    except (TypeError, ValueError) as error:
        raise DataError(f"{task}.sample_sizes must return a number for each sample: {error}") from error
    if given.shape != (num_samples,) or given.dtype.kind not in "iu" or (given.size and given.min() < 0):
        raise DataError(
            f"{task}.sample_sizes must return a whole number of at least 0 for each of the {num_samples} "
            f"samples, but returned {given.dtype} of shape {given.shape}. Count tokens, pixels or points."
        )
    return given.astype(np.int64)


def save_sizes(path: Path, order: DataOrder | None) -> None:
    """Keep what a balanced order is balanced by, for whoever recomputes it; of another there is no file."""
    if not isinstance(order, BalancedOrder):
        path.unlink(missing_ok=True)
        return
    content = io.BytesIO()
    np.save(content, order.sizes, allow_pickle=False)
    write_atomically(path, content.getvalue())


def with_saved_sizes(order: DataOrder | None, path: Path) -> DataOrder | None:
    """The order that a run had, whose sizes may be in a file.

    Raises:
        RunDirectoryError: the file is not theirs.
    """
    if order is None or not path.exists():
        return order
    try:
        sizes = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}") from error
    if sizes.shape != (order.num_samples,) or sizes.dtype != np.int64:
        raise RunDirectoryError(
            f"{path} must hold the sizes of {order.num_samples} samples, int64, but holds {sizes.dtype} of "
            f"shape {sizes.shape}."
        )
    return balanced(order, sizes)


def require_same_sizes(order: DataOrder | None, path: Path) -> None:
    """Refuse to go on with a run whose shards were dealt by other sizes.

    Raises:
        RunDirectoryError: they were.
    """
    before = with_saved_sizes(order, path)
    sizes = order.sizes if isinstance(order, BalancedOrder) else None
    saved = before.sizes if isinstance(before, BalancedOrder) and path.exists() else None
    if sizes is None or saved is None:
        same = sizes is saved
    else:
        same = np.array_equal(sizes, saved)
    if not same:
        raise RunDirectoryError(
            f"the task's sample_sizes are not those of {path}, with which the run was created, so its shards "
            "would have other samples. Restore the task, or start a new run with another --run DIR."
        )
