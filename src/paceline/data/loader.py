"""The loader that fits a dataset: what a rank trains on, as a function of (seed, epoch, step, shard).

Tensors are indexed a batch at a time (:mod:`paceline.data.tensors`); other map-style datasets are read
sample by sample, by worker processes (:mod:`paceline.data.workers`). Streams: :mod:`paceline.data.stream`.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Literal

import torch

from paceline.data.microbatch import Collate, Loader, MicroBatch
from paceline.data.order import DataOrder, Split
from paceline.data.tensors import TensorLoader, is_tensor_backed
from paceline.data.workers import SampleLoader
from paceline.errors import DataError

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
    order: DataOrder,
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
        order: which samples each shard gets; its ``num_samples`` are the split's.
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
            f"{order.num_samples}. Restore the dataset, or start a new run with another --run DIR."
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


def resolve_workers(
    dataset: Any, collate: Collate, requested: int | Literal["auto"], local_world_size: int
) -> int:
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
            "--workers %d starts %d processes on %d CPUs, which may slow loading down; auto would use %d.",
            requested,
            requested * local_world_size,
            cpus,
            auto,
        )
    return requested
