"""Whether a dataset is a function of sample number and epoch: some samples are read twice, in two orders.

Each process reads samples of its own, in its own order. A dataset that remembers what it read, or draws from a
generator of its own, then yields other samples on another number of processes, and after a restart.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

_BUDGET_S = 0.2  # then no further sample is read for the check
MOST_SAMPLES = 8
"""The samples that one check compares."""

ReadSample = Callable[[int, int], Any]
"""Reads, for an epoch, the sample in a row of the dataset, with the random keys of both."""


class SampleProblem(NamedTuple):
    """Why samples differ that should be the same.

    Attributes:
        kind: what they depend on: draws that no key seeds, draws that the dataset keeps, a stream's own order.
        what: which samples; "" for the first ones of a stream.
    """

    kind: Literal["unkeyed-randomness", "cached-randomness", "reshuffled-stream"]
    what: str


@dataclass(frozen=True)
class SampleCheck:
    """What a check of the dataset found.

    Attributes:
        reference: a number in [1, 2**48] for the bits of some samples that every process reads.
        num_samples: the samples that were compared; 0 if they could not be.
        problem: what differed; None if nothing did.
        seconds: how long it took.
    """

    reference: int
    num_samples: int = 0
    problem: SampleProblem | None = None
    seconds: float = 0.0


def check_samples(read: ReadSample, epoch: int, rows: Sequence[int], reference: Sequence[int]) -> SampleCheck:
    """Read samples in order, and then in reverse order, and compare them.

    Args:
        epoch: the epoch of the samples that are compared.
        reference: rows that every process reads, as in epoch 0, for :attr:`SampleCheck.reference`.
    """
    started = time.monotonic()
    first: dict[int, tuple[bytes, dict[str, bytes]]] = {}
    for row in dict.fromkeys(rows):
        if len(first) >= 2 and time.monotonic() - started > _BUDGET_S:
            break
        first[row] = _observe(read, epoch, row)
    problem = None
    for row in reversed(first):
        sample, generators = _observe(read, epoch, row)
        if sample != first[row][0]:
            what = f"sample {row} had other values when it was read again in another order"
            problem = SampleProblem("unkeyed-randomness", what)
        elif generators != first[row][1]:
            problem = SampleProblem("cached-randomness", f"sample {row}")
        if problem is not None:
            break
    number = reference_of(read(0, row) for row in reference)
    return SampleCheck(number, len(first), problem, time.monotonic() - started)


def reference_of(samples: Iterable[Any]) -> int:
    """Return the :attr:`SampleCheck.reference` of some samples."""
    digest = hashlib.blake2b(digest_size=6)
    for sample in samples:
        digest.update(digest_of(sample))
    return int.from_bytes(digest.digest(), "little") + 1


def _observe(read: ReadSample, epoch: int, row: int) -> tuple[bytes, dict[str, bytes]]:
    """Read a sample; return a digest of its values, and those of the random generators afterwards."""
    return digest_of(read(epoch, row)), generator_digests()


def generator_digests() -> dict[str, bytes]:
    """Return digests of the states of the global random generators, by name."""
    numpy_state = np.random.get_state(legacy=False)
    states = {"torch": torch.get_rng_state(), "random": repr(random.getstate()), "numpy": numpy_state}
    return {name: digest_of(state) for name, state in states.items()}


def digest_of(value: Any) -> bytes:
    """Return a digest of the bits in a sample or batch: tensors, arrays, images, numbers, text, and nested ones."""
    digest = hashlib.blake2b(digest_size=16)
    _update(digest, value)
    return digest.digest()


def _update(digest: Any, value: Any) -> None:
    digest.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            value = value.to_dense()
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        digest.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray | np.generic):
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes())
    elif isinstance(value, bool | int | float | complex | str | bytes | None):
        digest.update(repr(value).encode())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            digest.update(repr(key).encode())
            _update(digest, item)
    elif isinstance(value, list | tuple):
        for item in value:
            _update(digest, item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _update(digest, getattr(value, field.name, None))
    elif callable(getattr(value, "tobytes", None)):  # an image
        digest.update(value.tobytes())
