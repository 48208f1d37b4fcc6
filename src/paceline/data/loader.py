"""From sample numbers to micro-batches on the device: loaders for training and for evaluation."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch

from paceline.core.errors import DataError
from paceline.data.order import DeterministicSampler, Split
from paceline.data.samples import (
    Collate,
    Loader,
    MicroBatch,
    ReadRequest,
    RowNumbers,
    SampleLoader,
    SampleSource,
    TensorGather,
    TensorLoader,
    checksum,
    is_tensor_backed,
    without_subsets,
)

# --- The loader that fits a dataset: what a rank trains on, as a function of (seed, epoch, step, micro-batch) ---
#
# Tensors are indexed a batch at a time (:mod:`paceline.data.samples`); other map-style datasets are read
# sample by sample, by worker processes (:mod:`paceline.data.samples`). Streams: :mod:`paceline.data.stream`.


__all__ = [
    "Loader",
    "MicroBatch",
    "auto_workers",
    "build_loader",
    "dataset_length",
    "is_tensor_backed",
    "resolve_workers",
]

AUTO_WORKERS = 4

_log = logging.getLogger(__name__)


def build_loader(
    dataset: Any,
    order: DeterministicSampler,
    *,
    seed: int,
    device: torch.device,
    workers: int,
    collate: Collate,
    index_map: Split | None = None,
    split: str = "train",
) -> Loader:
    """The loader for a map-style dataset.

    Args:
        dataset: a ``TensorDataset``, or anything with ``__len__`` and ``__getitem__``.
        order: which samples each micro-batch gets; its ``num_samples`` are the split's.
        seed: keys the randomness inside ``__getitem__``.
        device: where batches go.
        workers: worker processes; 0 loads in this one. Tensors need none.
        collate: a list of samples -> a batch; ``task.collate``.
        index_map: the split's place in the dataset where it was carved out of it.
        split: its name, for messages.

    Raises:
        DataError: this is no map-style dataset, or its length is not the order's.
    """
    num_samples = dataset_length(dataset, split) if index_map is None else len(index_map)
    if num_samples != order.num_samples:
        raise DataError(
            f"the {split} dataset has {num_samples} samples, but this run was created with "
            f"{order.num_samples}. Restore the dataset, or start a new run with another --run-dir DIR."
        )
    if is_tensor_backed(dataset, collate):
        return TensorLoader(dataset, order, device=device, index_map=index_map)
    return SampleLoader(
        dataset,
        order,
        seed=seed,
        device=device,
        workers=workers,
        collate=collate,
        index_map=index_map,
        split=split,
    )


def dataset_length(dataset: Any, split: str) -> int:
    """``len(dataset)``.

    Raises:
        DataError: it has no length or cannot be indexed.
    """
    what = f"the {split} dataset is a {type(dataset).__name__}, which has no"
    stream = " or a stream" if split == "train" else ""
    rule = f"build_dataset must return a map-style dataset (__len__ and __getitem__){stream}."
    if not callable(getattr(type(dataset), "__getitem__", None)):
        raise DataError(f"{what} __getitem__; {rule}")
    try:
        return len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise DataError(f"{what} length ({error}); {rule}") from error


def resolve_workers(dataset: Any, collate: Collate, requested: int | Literal["auto"], local_world_size: int) -> int:
    """Worker processes of a rank for this dataset: none for tensors, else :func:`auto_workers`."""
    return 0 if is_tensor_backed(dataset, collate) else auto_workers(requested, local_world_size)


def auto_workers(requested: int | Literal["auto"], local_world_size: int) -> int:
    """Worker processes of a rank: ``requested``, or for "auto" 4 but at most its share of the CPUs.

    Logs a warning where the workers of all ranks on this machine outnumber its CPUs.
    """
    cpus = len(os.sched_getaffinity(0))
    auto = max(1, min(AUTO_WORKERS, cpus // local_world_size))
    if requested == "auto":
        return auto
    if requested * local_world_size > cpus:
        _log.warning(
            "--num-workers %d starts %d processes on %d CPUs, which may slow loading down; auto would use %d.",
            requested,
            requested * local_world_size,
            cpus,
            auto,
        )
    return requested


# --- Evaluation batches: a split in its own order, in blocks that ranks share ---


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
        self.num_batches = -(-self.num_samples // batch_size)
        self._batch_size = batch_size
        self._tensors: TensorGather | None = None
        self._source: SampleSource | None = None
        if is_tensor_backed(dataset, collate):
            self._tensors = TensorGather(dataset, device=device, index_map=index_map)
        else:
            inner, subset = without_subsets(dataset)
            self._rows = RowNumbers(index_map, subset)
            self._source = SampleSource(inner, seed=seed, device=device, workers=workers, collate=collate, split=split)

    def read(self, blocks: Sequence[int]) -> Iterator[MicroBatch]:
        """These blocks in order; ``microbatch`` is the block's number.

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
        source.start((ReadRequest(0, n, self._rows(n)) for n in numbers_of), ahead=2)
        for block in blocks:
            request, batch = source.next()
            yield MicroBatch(block, batch, len(request.numbers), checksum(request.numbers))

    def _numbers(self, block: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        start = block * self._batch_size
        return np.arange(start, min(start + self._batch_size, self.num_samples), dtype=np.int64)
