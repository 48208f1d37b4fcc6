"""Loaders for training and for evaluation."""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch

from paceline.core.errors import DataError
from paceline.core.task_loading import name_in_session
from paceline.data.order import DeterministicSampler
from paceline.data.samples import (
    MOST_SAMPLES,
    CheckRequest,
    Collate,
    Indices,
    Loader,
    MicroBatch,
    ReadRequest,
    RowNumbers,
    SampleCheck,
    SampleSource,
    TensorGather,
    checksum,
    is_tensor_backed,
    reference_of,
    without_subsets,
)
from paceline.data.train_val_split import Split

# --- Loaders of map-style datasets: batches as a function of (seed, epoch, step, micro-batch) ---
#
# Tensors are indexed a batch at a time; other datasets are read sample by sample, in worker processes. The loader of
# streams is in :mod:`paceline.data.stream`.


AUTO_WORKERS = 4

_log = logging.getLogger(__name__)
_CHECK_EVERY_S = 60.0
_CHECK_SHARE = 400  # a check of the samples is followed by this many times its own time without one


class TensorLoader:
    """Loads from tensors, and computes the order of many steps at once.

    A step of a small model takes less than a millisecond, so computing the order per step would cost too much.
    """

    _CHUNK = 16_384  # positions; 1 to 2 ms of index arithmetic

    def __init__(
        self,
        dataset: Any,
        order: DeterministicSampler,
        *,
        device: torch.device,
        index_map: Split | None = None,
    ) -> None:
        self._order = order
        self._gather = TensorGather(dataset, device=device, index_map=index_map)
        # Indexing tensors cannot go wrong, but the tensors may be others than another process has.
        reference = self._gather.locate(_reference_numbers(order))
        self.checked: SampleCheck | None = SampleCheck(reference_of([self._gather.take(reference)]), len(reference))
        self._epoch = -1
        self._start = 0
        self._stop = 0
        self._numbers: Indices = np.empty(0, np.int64)
        self._rows = torch.empty(0, dtype=torch.int64)

    def fetch(self, epoch: int, step: int, microbatches: range) -> list[MicroBatch]:
        """See :class:`Loader`; the micro-batches come from one gather."""
        bounds = self._order.microbatch_bounds(step)[microbatches.start : microbatches.stop : microbatches.step]
        if not bounds:
            return []
        start, stop = bounds[0][0], bounds[-1][1]
        if epoch != self._epoch or start < self._start or stop > self._stop:
            self._compute(epoch, start, stop)
        offset = self._start
        rows = self._rows[start - offset : stop - offset]
        if microbatches.step != 1:
            rows = torch.cat([self._rows[a - offset : b - offset] for a, b in bounds])
        batches = zip(*self._gather.take_each(rows, [b - a for a, b in bounds]), strict=True)
        return [
            MicroBatch(microbatch, list(batch), b - a, checksum(self._numbers[a - offset : b - offset]))
            for microbatch, (a, b), batch in zip(microbatches, bounds, batches, strict=False)
        ]

    def close(self) -> None:
        """Do nothing: there are no workers."""

    def _compute(self, epoch: int, start: int, stop: int) -> None:
        """Compute the order of a chunk of positions, or of just this range if it is nearly as large."""
        if stop - start < self._CHUNK // 8:
            stop = max(stop, min(start + self._CHUNK, self._order.num_samples))
        self._numbers = self._order.indices(epoch, start, stop)
        self._rows = self._gather.locate(self._numbers)
        self._epoch = epoch
        self._start = start
        self._stop = stop


class SampleLoader:
    """Loads any map-style dataset, a micro-batch at a time."""

    def __init__(
        self,
        dataset: Any,
        order: DeterministicSampler,
        *,
        seed: int,
        device: torch.device,
        workers: int,
        collate: Collate,
        index_map: Split | None,
        split: str,
        check: bool = False,
    ) -> None:
        inner, subset = without_subsets(dataset)
        self._order = order
        self._rows = RowNumbers(index_map, subset)
        self.checked: SampleCheck | None = None
        self._next_check = 0.0 if check else math.inf
        self._checking = False
        self._source = SampleSource(inner, seed=seed, device=device, workers=workers, collate=collate, split=split)
        self._due: tuple[int, int, range] | None = None

    def fetch(self, epoch: int, step: int, microbatches: range) -> list[MicroBatch]:
        """See :class:`Loader`; a step or micro-batches out of sequence restart the prefetching."""
        if not microbatches:
            return []  # a spare has no micro-batches
        if (epoch, step, microbatches) != self._due:
            self._checking = False
            self._source.start(self._requests_from(epoch, step, microbatches), ahead=2 * len(microbatches))
        # Unknown until all of it has been read.
        self._due = None
        micro_batches = []
        for microbatch in microbatches[
            : len(self._order.microbatch_bounds(step)[microbatches.start : microbatches.stop : microbatches.step])
        ]:
            request, batch = self._source.next()
            while isinstance(batch, SampleCheck):
                self._take_check(batch)
                request, batch = self._source.next()
            micro_batches.append(MicroBatch(microbatch, batch, len(request.numbers), checksum(request.numbers)))
        last = step + 1 == self._order.steps_per_epoch
        self._due = (epoch + 1, 0, microbatches) if last else (epoch, step + 1, microbatches)
        return micro_batches

    def close(self) -> None:
        """End the workers; may be called twice."""
        self._source.close()

    def _requests_from(self, epoch: int, step: int, microbatches: range) -> Iterator[ReadRequest]:
        """Yield these micro-batches of every step from this one on, endlessly."""
        for e in itertools.count(epoch):
            for t in range(step if e == epoch else 0, self._order.steps_per_epoch):
                for start, stop in self._order.microbatch_bounds(t)[
                    microbatches.start : microbatches.stop : microbatches.step
                ]:
                    numbers = self._order.indices(e, start, stop)
                    rows = self._rows(numbers)
                    if not self._checking and time.monotonic() >= self._next_check:
                        self._checking = True
                        reference = self._rows(_reference_numbers(self._order))
                        yield CheckRequest(e, numbers[:MOST_SAMPLES], rows[:MOST_SAMPLES], None, reference)
                    draws = np.arange(start, stop, dtype=np.int64) if self._order.is_weighted else None
                    yield ReadRequest(e, numbers, rows, draws)

    def _take_check(self, check: SampleCheck) -> None:
        self.checked = check
        self._checking = False
        self._next_check = time.monotonic() + max(_CHECK_EVERY_S, _CHECK_SHARE * check.seconds)


def _reference_numbers(order: DeterministicSampler) -> Indices:
    return np.array(sorted({0, order.dataset_size // 2}), dtype=np.int64)


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
        order: the samples of each micro-batch; its ``dataset_size`` is the split's length.
        seed: keys the randomness inside ``__getitem__``.
        workers: worker processes; 0 loads in this one. Tensors need none.
        collate: turns a list of samples into a batch; ``task.collate``.
        index_map: the split's sample numbers in the dataset, if it was split off.
        check: read some samples twice from time to time, and compare them.

    Raises:
        DataError: the dataset is not map-style, or its length is not the order's.
    """
    num_samples = dataset_length(dataset, split) if index_map is None else len(index_map)
    if num_samples != order.dataset_size:
        raise DataError(
            f"the {split} dataset has {num_samples} samples, but this run was created with "
            f"{order.dataset_size}. Restore the dataset, or start a new run with another --run-dir DIR."
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
    rule = "build_dataset must return a map-style dataset (__len__ and __getitem__) or a stream."
    if not callable(getattr(type(dataset), "__getitem__", None)):
        raise DataError(f"{what} __getitem__; {rule}")
    try:
        return len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise DataError(f"{what} length ({error}); {rule}") from error


def resolve_workers(dataset: Any, collate: Collate, requested: int | Literal["auto"], local_world_size: int) -> int:
    """Return the worker processes of a rank for this dataset: 0 for tensors, else :func:`auto_workers`.

    For "auto" a list in memory needs none, because starting them takes longer than reading from it; and a dataset whose
    class or ``collate`` is defined in a notebook's cell can have none.
    """
    inner = without_subsets(dataset)[0]
    has_none = isinstance(inner, list | tuple) or name_in_session(inner, collate) is not None
    if is_tensor_backed(dataset, collate) or (requested == "auto" and has_none):
        return 0
    return auto_workers(requested, local_world_size)


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
        source.start((ReadRequest(0, n, self._rows(n), None) for n in numbers_of), ahead=2)
        for index in batches:
            request, batch = source.next()
            yield MicroBatch(index, batch, len(request.numbers), checksum(request.numbers))

    def _numbers(self, index: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        start = index * self._batch_size
        return np.arange(start, min(start + self._batch_size, self.num_samples), dtype=np.int64)
