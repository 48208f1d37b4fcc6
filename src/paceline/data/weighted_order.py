"""An order that draws samples by their weights: rare classes more often, uncertain labels less.

The sample at a position follows from (seed, epoch, position), by integers and by floating-point operations that
IEEE 754 rounds correctly. No function of a platform's C library takes part, so the order is equal on every node.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import ConfigError, DataError
from paceline.data.order import DeterministicSampler, Permutation, derive_key, splitmix64, splitmix64_of

_DRAW, _PLACE = 4, 5  # domains of keys; data/order.py has 1 and 2, data/train_val_split.py 3
_LOG_TERMS = 23  # of the series of log; |s| < 0.172, so the rest is below 2**-60


@dataclass(frozen=True, eq=False)
class WeightedOrder(DeterministicSampler):
    """A ``DeterministicSampler`` whose epoch is ``num_samples`` draws, each of a sample with its share of the weights.

    With replacement, a position is hashed to a number below the sum of the weights, in integers of 62 bits. Without,
    the samples of an epoch are those with the smallest ``-log(u) / weight`` (Efraimidis and Spirakis 2006, "Weighted
    random sampling with a reservoir"), in an order that is random again.

    Attributes:
        weights: the weight of each sample, by its number, float64 (N,).
        replacement: whether a sample may occur more than once in an epoch.

    Raises:
        ConfigError: the options ask for another order.
        DataError: the weights cannot be drawn by.
    """

    weights: NDArray[np.float64] = field(kw_only=True, repr=False)
    replacement: bool = field(kw_only=True)
    _drawn: dict[int, NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shuffle.window != 1:
            raise ConfigError("a task with sample_weights draws its samples at random; leave --shuffle out.")
        possible = np.count_nonzero(self.weights)
        if not possible:
            raise DataError("sample_weights are all 0, so no sample can be drawn.")
        if not self.replacement and self.num_samples > possible:
            raise DataError(
                f"sample_weights without replacement: an epoch of {self.num_samples} samples cannot be drawn from "
                f"{possible} with a weight above 0. Give a smaller num_samples."
            )

    @property
    def dataset_size(self) -> int:
        return len(self.weights)

    @property
    def is_weighted(self) -> bool:
        return True

    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        if not 0 <= start <= stop <= self.num_samples:
            return super().indices(epoch, start, stop)  # raises the error
        key = derive_key(self.seed, _DRAW, epoch)
        positions = np.arange(start, stop, dtype=np.int64)
        if self.replacement:
            sums = self._cumulative
            values = _scale(_hashes(key, positions), int(sums[-1]))
            drawn: NDArray[np.int64] = np.searchsorted(sums, values, side="right").astype(np.int64, copy=False)
            return drawn
        if epoch not in self._drawn:
            self._drawn.clear()
            self._drawn[epoch] = self._draw_once(key)
        places = Permutation(self.num_samples, derive_key(key, _PLACE))(positions)
        return np.take(self._drawn[epoch], places)

    @functools.cached_property
    def _cumulative(self) -> NDArray[np.int64]:
        """Running sums of the weights as integers, in proportion, below 2**62; a weight above 0 is at least 1."""
        bits = min(53, 61 - len(self.weights).bit_length())
        exponent = math.frexp(float(self.weights.max()))[1]
        scaled = np.rint(np.ldexp(self.weights, bits - exponent)).astype(np.int64)
        sums: NDArray[np.int64] = np.cumsum(np.maximum(scaled, self.weights > 0), dtype=np.int64)
        return sums

    def _draw_once(self, key: int) -> NDArray[np.int64]:
        possible = np.flatnonzero(self.weights)
        with np.errstate(over="ignore"):
            times = _exponential(_hashes(key, possible)) / self.weights[possible]
        return np.take(possible, np.argsort(times, kind="stable")[: self.num_samples])


def _hashes(key: int, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return ``derive_key(key, number)`` of each number."""
    return splitmix64_of(np.uint64(splitmix64(key)) ^ numbers.view(np.uint64))


def _scale(values: NDArray[np.uint64], size: int) -> NDArray[np.int64]:
    """Return floor(value * size / 2**64) of each value, from products of 32 bits."""
    half, mask = np.uint64(32), np.uint64(2**32 - 1)
    high, low = values >> half, values & mask
    size_high, size_low = np.uint64(size >> 32), np.uint64(size & (2**32 - 1))
    middle = high * size_low + (low * size_low >> half)
    carry = low * size_high + (middle & mask)
    product: NDArray[np.uint64] = high * size_high + (middle >> half) + (carry >> half)
    return product.view(np.int64)


def _exponential(hashes: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return -log(u) of uniform numbers u in (0, 1).

    ``np.log`` differs between platforms in its last bit. This sum consists of additions, products and divisions alone,
    one array at a time, so that no compiler fuses two of them.
    """
    uniform = ((hashes >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    mantissa, exponent = np.frexp(uniform)
    is_small = mantissa < 0.7071
    mantissa = np.where(is_small, mantissa * 2, mantissa)
    s = (mantissa - 1) / (mantissa + 1)  # log(m) = 2 (s + s**3 / 3 + s**5 / 5 + ...)
    square, series = s * s, np.zeros_like(s)
    for power in range(_LOG_TERMS, 0, -2):
        series = series * square + 1 / power
    result: NDArray[np.float64] = -((exponent - is_small) * 0.6931471805599453 + 2 * s * series)
    return result


def weigh_order(
    order: DeterministicSampler, weights: NDArray[np.float64], *, replacement: bool, num_samples: int
) -> WeightedOrder:
    """Return the order that draws by these weights, with the batches of another."""
    values = {f.name: getattr(order, f.name) for f in fields(DeterministicSampler)}
    return WeightedOrder(**{**values, "num_samples": num_samples}, weights=weights, replacement=replacement)


def check_weights(values: Any, num_samples: int, task: str) -> NDArray[np.float64]:
    """Return a task's sample weights as an array.

    Raises:
        DataError: they are not finite numbers of at least 0, one per sample.
    """
    try:
        weights = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{task}.sample_weights must return a number for each sample: {error}") from error
    if weights.shape != (num_samples,) or not np.all(np.isfinite(weights) & (weights >= 0)):
        raise DataError(
            f"{task}.sample_weights must return a finite number of at least 0 for each of the {num_samples} samples, "
            f"but returned {'others' if weights.shape == (num_samples,) else f'shape {weights.shape}'}."
        )
    return weights + 0.0  # -0.0 is 0.0
