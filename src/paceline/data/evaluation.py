"""Evaluation batches: a split in its own order, in blocks that ranks share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from paceline.data.loader import dataset_length
from paceline.data.microbatch import Collate, MicroBatch, checksum
from paceline.data.order import Split
from paceline.data.samples import Request
from paceline.data.tensors import RowNumbers, TensorGather, is_tensor_backed, without_subsets
from paceline.data.workers import SampleSource


class EvalBatches:
    """A split as blocks of ``batch_size`` samples, the last one shorter; block b starts at b * batch_size.

    Rank r of W takes ``range(r * num_blocks // W, (r + 1) * num_blocks // W)``. Worker processes, where
    there are some, are kept from one evaluation to the next. Randomness in ``__getitem__`` is keyed by
    sample alone, so each evaluation sees the same.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int,
        device: torch.device,
        workers: int,
        collate: Collate,
        index_map: Split | None = None,
        split: str = "val",
    ) -> None:
        """Take a dataset; the arguments are those of :func:`paceline.data.loader.build_loader`.

        Raises:
            DataError: this is no map-style dataset.
        """
        self.num_samples = dataset_length(dataset, split) if index_map is None else len(index_map)
        self.num_blocks = -(-self.num_samples // batch_size)
        self._batch_size = batch_size
        self._tensors: TensorGather | None = None
        self._source: SampleSource | None = None
        if is_tensor_backed(dataset, collate):
            self._tensors = TensorGather(dataset, device=device, index_map=index_map)
        else:
            inner, subset = without_subsets(dataset)
            self._rows = RowNumbers(index_map, subset)
            self._source = SampleSource(
                inner, seed=seed, device=device, workers=workers, collate=collate, split=split
            )

    def read(self, blocks: Sequence[int]) -> Iterator[MicroBatch]:
        """These blocks in order; ``shard`` is the block's number.

        Raises:
            DataError: a sample cannot be read or does not fit its batch.
        """
        if self._source is not None:
            yield from self._read_samples(self._source, blocks)
        if self._tensors is not None:
            for block in blocks:
                numbers = self._numbers(block)
                batch = self._tensors.take(self._tensors.locate(numbers))
                yield MicroBatch(block, batch, len(numbers), checksum(numbers))

    def close(self) -> None:
        """End the workers; may be called twice."""
        if self._source is not None:
            self._source.close()

    def _read_samples(self, source: SampleSource, blocks: Sequence[int]) -> Iterator[MicroBatch]:
        numbers_of = (self._numbers(block) for block in blocks)
        source.start((Request(0, n, self._rows(n)) for n in numbers_of), ahead=2)
        for block in blocks:
            request, batch = source.next()
            yield MicroBatch(block, batch, len(request.numbers), checksum(request.numbers))

    def _numbers(self, block: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        start = block * self._batch_size
        return np.arange(start, min(start + self._batch_size, self.num_samples), dtype=np.int64)
