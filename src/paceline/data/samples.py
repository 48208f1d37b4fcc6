"""Reading and collating samples, with randomness keyed by sample: what a worker process does.

Before each ``__getitem__`` the generators of torch, ``random`` and numpy are seeded from
(seed, epoch, sample), so augmentation is the same for any number of workers, shards or processes.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.data.microbatch import Collate, Indices
from paceline.data.permutation import derive_key

_SAMPLE = 16
"""Domain of the keys, apart from those of ``paceline.data.order``."""


@dataclass(frozen=True, slots=True)
class Request:
    """One micro-batch to read.

    Attributes:
        epoch: keys the randomness.
        numbers: the samples' numbers within the split; what is recorded.
        rows: their numbers in the dataset; what is read.
    """

    epoch: int
    numbers: Indices
    rows: Indices


class ReadError(Exception):
    """The traceback of an error in a dataset, as text, for the log: it may come from another process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class Failure:
    """Why a micro-batch could not be read; travels back from a worker in its place."""

    message: str
    cause: ReadError | None = None


class SampleReader:
    """Turns requests into batches. Never raises an ``Exception``: it returns a :class:`Failure`.

    A dataset with ``__getitems__`` (PyTorch's convention for batched reading) is read a micro-batch at
    a time, and its randomness is keyed by the micro-batch's first sample.
    """

    def __init__(self, dataset: Any, *, collate: Collate, seed: int, split: str) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed
        self._split = split
        self._batched = callable(getattr(type(dataset), "__getitems__", None))

    def __getitem__(self, request: Request) -> Any:
        """The collated batch, or a :class:`Failure`."""
        rows = request.rows.tolist()
        samples: list[Any] = []
        try:
            if self._batched:
                seed_everything(derive_key(self._seed, _SAMPLE, request.epoch, rows[0]))
                samples = list(self._dataset.__getitems__(rows))
            else:
                for row in rows:
                    seed_everything(derive_key(self._seed, _SAMPLE, request.epoch, row))
                    samples.append(self._dataset[row])
        except Exception as error:
            which = _span(rows) if self._batched else f"sample {rows[len(samples)]}"
            return self._failure(f"{which} cannot be read", error)
        if len(samples) != len(rows):
            message = f"__getitems__ returned {len(samples)} samples for {len(rows)} numbers"
            return Failure(f"{self._split} dataset, {_span(rows)}: {message}.")
        try:
            return self._collate(samples)
        except Exception as error:
            ragged = describe_ragged(rows, samples)
            if ragged is not None:
                return self._failure(f"{ragged} Make them equal, or define collate() in the task", error)
            return self._failure(f"{_span(rows)} cannot be collated", error)

    def _failure(self, what: str, error: Exception) -> Failure:
        message = f"{self._split} dataset, {what}: {type(error).__name__}: {error}"
        return Failure(message, ReadError(traceback.format_exc()))


def describe_ragged(rows: Sequence[int], samples: Sequence[Any]) -> str | None:
    """Which samples are shaped unlike the others; None where all shapes are equal."""
    by_shape: dict[Any, list[int]] = {}
    for row, sample in zip(rows, samples, strict=True):
        by_shape.setdefault(_shape(sample), []).append(row)
    if len(by_shape) == 1:
        return None
    # The rarest shape first: that is where the mistake is.
    parts = [
        f"{_named(members)} {'has' if len(members) == 1 else 'have'} {shape}"
        for shape, members in sorted(by_shape.items(), key=lambda item: len(item[1]))[:4]
    ]
    return "samples of one batch have different shapes: " + "; ".join(parts) + "."


def _named(rows: list[int]) -> str:
    if len(rows) == 1:
        return f"sample {rows[0]}"
    return f"samples {', '.join(map(str, rows[:3]))}" + (
        f" and {len(rows) - 3} more" if len(rows) > 3 else ""
    )


def _span(rows: Sequence[int]) -> str:
    return (
        f"sample {rows[0]}" if len(rows) == 1 else f"samples {rows[0]} ... {rows[-1]} ({len(rows)} of them)"
    )


def _shape(sample: Any) -> str:
    """The shapes in a sample, as text: "((1, 28, 28), int)"."""
    if isinstance(sample, torch.Tensor | np.ndarray):
        return str(tuple(sample.shape))
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key}: {_shape(value)}" for key, value in sample.items()) + "}"
    if isinstance(sample, tuple | list):
        return "(" + ", ".join(_shape(value) for value in sample) + ")"
    return type(sample).__name__


def seed_everything(key: int) -> None:
    """Seed the CPU generators of torch, ``random`` and numpy with 64 bits (numpy takes 32)."""
    # Not torch.manual_seed: that also queues a CUDA seed, with a stack trace, for every sample.
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Read samples in the trainer's process as a worker would, and leave its state as it was.

    Workers run torch on one thread, and a sum over two threads can have other bits.
    """
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    threads = torch.get_num_threads()
    if threads != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads != 1:
            torch.set_num_threads(threads)
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
