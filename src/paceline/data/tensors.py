"""Tensor-backed datasets, indexed a batch at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from paceline.data.microbatch import Collate, Indices, MicroBatch, checksum
from paceline.data.order import DataOrder, Split
from paceline.task import Task


def without_subsets(dataset: Any) -> tuple[Any, Indices | None]:
    """Unwrap torch's ``Subset``: the dataset inside, and each sample's number there (None: the same)."""
    numbers: Indices | None = None
    # Only Subset itself: a subclass may do more in __getitem__.
    while type(dataset) is Subset:
        outer = np.asarray(dataset.indices, dtype=np.int64)
        numbers = outer if numbers is None else outer[numbers]
        dataset = dataset.dataset
    return dataset, numbers


def is_tensor_backed(dataset: Any, collate: Collate) -> bool:
    """Whether batches are plain indexing: a ``TensorDataset`` (or a Subset of one), default collate."""
    if getattr(collate, "__func__", collate) not in (Task.collate, default_collate):
        return False
    inner = type(without_subsets(dataset)[0])
    return issubclass(inner, TensorDataset) and inner.__getitem__ is TensorDataset.__getitem__


class RowNumbers:
    """Numbers within a split -> numbers in the innermost dataset, through a carved split and Subsets."""

    def __init__(self, index_map: Split | None, subset: Indices | None) -> None:
        self._index_map = index_map
        self._subset = subset

    def __call__(self, numbers: Indices) -> Indices:
        """Map many numbers at once."""
        if self._index_map is not None:
            numbers = self._index_map(numbers)
        return numbers if self._subset is None else self._subset[numbers]


class TensorGather:
    """Rows of tensors by number: one ``index_select`` for each tensor, then onto the device.

    Tensors small enough live on the GPU. Bigger ones are gathered on the CPU into pinned memory and
    copied without waiting, so that a gather overlaps with the step before.
    """

    def __init__(self, dataset: Any, *, device: torch.device, index_map: Split | None) -> None:
        inner, subset = without_subsets(dataset)
        self._to_rows = RowNumbers(index_map, subset)
        self._tensors: tuple[torch.Tensor, ...] = inner.tensors
        self._device = device
        if device.type == "cuda":
            num_bytes = sum(t.numel() * t.element_size() for t in self._tensors)
            if num_bytes <= torch.cuda.mem_get_info(device)[0] // 8:
                self._tensors = tuple(t.to(device) for t in self._tensors)
        self._home = self._tensors[0].device

    def locate(self, numbers: Indices) -> torch.Tensor:
        """Numbers within the split -> row numbers, int64, where the tensors live."""
        return torch.from_numpy(self._to_rows(numbers)).to(self._home)

    def take(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The rows of each tensor, on the device; a list, as ``default_collate`` makes of tuples."""
        taken = [tensor.index_select(0, rows) for tensor in self._tensors]
        if self._home.type != self._device.type:
            taken = [t.pin_memory().to(self._device, non_blocking=True) for t in taken]
        return taken


class TensorLoader:
    """Loads from tensors.

    A step of a small model takes under a millisecond, so the order is computed for many steps at once.
    """

    _CHUNK = 16_384  # positions; 1 to 2 ms of index arithmetic

    def __init__(
        self, dataset: Any, order: DataOrder, *, device: torch.device, index_map: Split | None = None
    ) -> None:
        self._order = order
        self._gather = TensorGather(dataset, device=device, index_map=index_map)
        self._epoch = -1
        self._start = self._stop = 0
        self._numbers: Indices = np.empty(0, np.int64)
        self._rows = torch.empty(0, dtype=torch.int64)

    def fetch(self, epoch: int, step: int, shards: range) -> list[MicroBatch]:
        """See :class:`Loader`; the micro-batches are views of one gather."""
        bounds = self._order.shard_bounds(step)[shards.start : shards.stop : shards.step]
        if not bounds:
            return []
        start, stop = bounds[0][0], bounds[-1][1]
        if epoch != self._epoch or start < self._start or stop > self._stop:
            self._compute(epoch, start, stop)
        offset = self._start
        rows = self._rows[start - offset : stop - offset]
        if shards.step != 1:
            rows = torch.cat([self._rows[a - offset : b - offset] for a, b in bounds])
        tensors = self._gather.take(rows)
        sizes = [b - a for a, b in bounds]
        # One split a tensor, not one slice a shard: a slice costs 2 us.
        batches = zip(*(tensor.split_with_sizes(sizes) for tensor in tensors), strict=True)
        return [
            MicroBatch(shard, list(batch), b - a, checksum(self._numbers[a - offset : b - offset]))
            for shard, (a, b), batch in zip(shards, bounds, batches, strict=False)
        ]

    def close(self) -> None:
        """Nothing to end."""

    def _compute(self, epoch: int, start: int, stop: int) -> None:
        """Order a chunk of positions; where a rank's own share is nearly as big, just that."""
        if stop - start < self._CHUNK // 8:
            stop = max(stop, min(start + self._CHUNK, self._order.num_samples))
        self._numbers = self._order.indices(epoch, start, stop)
        self._rows = self._gather.locate(self._numbers)
        self._epoch, self._start, self._stop = epoch, start, stop
