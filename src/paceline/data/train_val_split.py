"""A validation split by index arithmetic, in constant memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import ConfigError, DataError
from paceline.data.order import derive_key, splitmix64, splitmix64_of

_KEY_DOMAIN = 3  # data/order.py has 1 and 2


class Split(Protocol):
    """A part of a dataset, as a function from index in the part to sample number in the whole."""

    def __len__(self) -> int: ...

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return sample numbers in the whole dataset, shape (k,) to shape (k,)."""


class TrainValSplit(NamedTuple):
    """Two disjoint splits that together are the whole dataset."""

    train: Split
    val: Split


def split_train_val(num_samples: int, fraction: float, seed: int) -> TrainValSplit:
    """Split off a validation set by index arithmetic.

    The dataset is divided into as many intervals as the validation split has samples, with lengths that differ by at
    most one, and a keyed choice takes one sample of each (stratified sampling). Both splits therefore keep the
    dataset's order, on which ``--shuffle none`` and ``window:N`` rely, and a dataset sorted by class contributes each
    class in proportion.

    Args:
        num_samples: samples in the dataset, 2 to 2**52.
        fraction: the validation part, in (0, 1); at least one sample is left on either side.

    Raises:
        ConfigError: the fraction is not between 0 and 1.
        DataError: the dataset cannot be split.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"--val-fraction must be between 0 and 1, but is {fraction}.")
    if not 2 <= num_samples <= 2**52:
        raise DataError(f"--val-fraction cannot split a dataset of {num_samples} samples; it must have 2 to 2**52.")
    num_val = min(num_samples - 1, max(1, round(num_samples * fraction)))
    strata = _Strata(num_samples, num_val, derive_key(seed, _KEY_DOMAIN))
    return TrainValSplit(train=_TrainSplit(strata), val=_ValSplit(strata))


def _scaled(x: NDArray[np.int64], numerator: int, denominator: int) -> NDArray[np.int64]:
    """Return floor(x * numerator / denominator), exact although the product may exceed 64 bits.

    The floating-point quotient is so near that its remainder, computed modulo 2**64, is exact.
    """
    quotient = (x * (numerator / denominator)).astype(np.int64)
    rest: NDArray[np.int64] = (x * np.int64(numerator) - quotient * np.int64(denominator)) // denominator
    return quotient + rest


@dataclass(frozen=True)
class _Strata:
    """``num_val`` intervals; interval j is [ceil(j N / V), ceil((j + 1) N / V))."""

    num_samples: int
    num_val: int
    key: int

    def starts(self, j: NDArray[np.int64]) -> NDArray[np.int64]:
        return -_scaled(-j, self.num_samples, self.num_val)

    def chosen(self, j: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample number that validation takes from interval j."""
        start = self.starts(j)
        length = (self.starts(j + 1) - start).view(np.uint64)
        hashed = splitmix64_of(np.uint64(splitmix64(self.key)) ^ j.view(np.uint64))
        return start + (hashed % length).view(np.int64)


@dataclass(frozen=True)
class _ValSplit:
    strata: _Strata

    def __len__(self) -> int:
        return self.strata.num_val

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        _check_indices(indices, len(self))
        return self.strata.chosen(indices)


@dataclass(frozen=True)
class _TrainSplit:
    strata: _Strata

    def __len__(self) -> int:
        return self.strata.num_samples - self.strata.num_val

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        _check_indices(indices, len(self))
        # ceil(j T / V) of the T training samples precede interval j, so i is in the last j
        # with j T / V <= i; j of the samples before it went to validation.
        j = _scaled(indices, self.strata.num_val, len(self))
        number = indices + j
        return number + (number >= self.strata.chosen(j))


def _check_indices(indices: NDArray[np.int64], size: int) -> None:
    if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= size):
        raise IndexError(f"indices must lie in [0, {size}).")
