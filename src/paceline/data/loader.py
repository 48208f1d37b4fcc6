"""Loaders for training and for evaluation."""

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

# --- The training loader of a dataset: batches as a function of (seed, epoch, step, micro-batch) ---
#
# Tensors are indexed a batch at a time, other map-style datasets are read sample by sample in worker processes; both
# in :mod:`paceline.data.samples`. Streams: :mod:`paceline.data.stream`.


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
    check: bool = False,
) -> Loader:
    """Build the loader for a map-style dataset.

    Args:
        dataset: a ``TensorDataset``, or anything with ``__len__`` and ``__getitem__``.
        order: the samples of each micro-batch; its ``num_samples`` is the split's length.
        seed: keys the randomness inside ``__getitem__``.
        device: the device of the batches.
        workers: worker processes; 0 loads in this one. Tensors need none.
        collate: turns a list of samples into a batch; ``task.collate``.
        index_map: the split's sample numbers in the dataset, if it was split off.
        split: its name, for messages.
        check: read some samples twice from time to time, and compare them.

    Raises:
        DataError: the dataset is not map-style, or its length is not the order's.
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
        check=check,
    )


def dataset_length(dataset: Any, split: str) -> int:
    """Return ``len(dataset)``.

    Raises:
        DataError: the dataset has no length or cannot be indexed.
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
    """Return the worker processes of a rank for this dataset: 0 for tensors, else :func:`auto_workers`."""
    return 0 if is_tensor_backed(dataset, collate) else auto_workers(requested, local_world_size)


def auto_workers(requested: int | Literal["auto"], local_world_size: int) -> int:
    """Return the worker processes of a rank: ``requested``, or for "auto" up to 4, within its share of the CPUs.

    Log a warning if the workers of all ranks on this node outnumber its CPUs.
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


# --- Evaluation batches: a split in its own order, divided over the ranks ---


class EvalBatches:
    """A split as evaluation batches of ``batch_size`` samples, the last one shorter.

    Rank r of W reads ``range(r * num_batches // W, (r + 1) * num_batches // W)``. Worker processes persist from one
    evaluation to the next. Randomness in ``__getitem__`` is keyed by sample alone, so each evaluation sees the same.
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
        """Wrap a dataset; the arguments are those of :func:`paceline.data.loader.build_loader`.

        Raises:
            DataError: the dataset is not map-style.
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

    def read(self, batches: Sequence[int]) -> Iterator[MicroBatch]:
        """Yield these batches in order.

        Raises:
            DataError: a sample cannot be read or does not fit its batch.
        """
        if self._source is not None:
            yield from self._read_samples(self._source, batches)
        if self._tensors is not None:
            for index in batches:
                numbers = self._numbers(index)
                batch = self._tensors.take(self._tensors.locate(numbers))
                yield MicroBatch(index, batch, len(numbers), checksum(numbers))

    def close(self) -> None:
        """End the workers; may be called twice."""
        if self._source is not None:
            self._source.close()

    def _read_samples(self, source: SampleSource, batches: Sequence[int]) -> Iterator[MicroBatch]:
        numbers_of = (self._numbers(index) for index in batches)
        source.start((ReadRequest(0, n, self._rows(n)) for n in numbers_of), ahead=2)
        for index in batches:
            request, batch = source.next()
            yield MicroBatch(index, batch, len(request.numbers), checksum(request.numbers))

    def _numbers(self, index: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        start = index * self._batch_size
        return np.arange(start, min(start + self._batch_size, self.num_samples), dtype=np.int64)
