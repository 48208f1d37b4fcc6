"""The order of the data: a permutation of each epoch, or draws by weights, split into batches and micro-batches."""

from __future__ import annotations

import functools
import heapq
import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import ConfigError, DataError, RunDirectoryError, UserError
from paceline.core.files import write_atomically
from paceline.core.options import Shuffle

if TYPE_CHECKING:
    from paceline.runs.directory import RunDirectory


# --- A keyed permutation of any range in constant memory, and the integer hash of its keys ---
#
# The values never change across versions: only integer arithmetic modulo 2**64, no random number generator.


MAX_SIZE = 2**62
"""The largest range that can be permuted."""

CHUNK = 8192
"""Positions computed at a time, so that the arrays stay in the L2 cache."""

# Domains of the keys, so that no two uses of one seed share a key; data/train_val_split.py has 3.
_EPOCH, _SHORT_WINDOW, _DRAW, _INDEX = 1, 2, 4, 5

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def splitmix64(value: int) -> int:
    """Return one output of the SplitMix64 generator (Steele, Lea and Flood 2014) in state ``value``."""
    z = (value + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def derive_key(first: int, *rest: int) -> int:
    """Derive a 64-bit key from words and their order: a chain of ``splitmix64``."""
    key = splitmix64(first)
    for word in rest:
        key = splitmix64(key ^ (word & _MASK))
    return key


def splitmix64_of(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return ``splitmix64`` of each value."""
    z = values + np.uint64(_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    return z ^ (z >> np.uint64(31))


class FeistelNetwork:
    """A generalised Feistel network on rows x cols >= n numbers, with cycle walking down to n.

    A number x is the pair (x // cols, x % cols). Rounds add a hash of one half to the other,
    modulo that half's size, in turn (Luby and Rackoff 1988; the domain of any size and the cycle
    walking are sections 4 and 5 of Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
    CT-RSA 2002). With rows and cols near sqrt(n), few numbers fall outside n and walk.

    ``rows`` is even because a round is then an odd permutation for some keys; with both sizes odd
    every round is even, and half of all permutations are impossible. Tiny domains need more
    rounds: the least at which chi-square tests over keys (whole permutations up to n = 7, order
    patterns of five positions above) detect no bias, plus a margin.
    """

    def __init__(self, n: int) -> None:
        root = math.isqrt(n - 1) + 1
        rows = root + root % 2
        self.n = np.uint64(n)
        self.rows = np.uint64(rows)
        self.cols = np.uint64(-(-n // rows))
        self.rounds = 24 if n < 32 else 12 if n < 256 else 8 if n < 4096 else 6

    def round_keys(self, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the round keys of K keys: shape (rounds, K)."""
        steps = np.arange(self.rounds, dtype=np.uint64)[:, None] * np.uint64(_GAMMA)
        return splitmix64_of(keys[None, :] + steps)

    def permute(self, x: NDArray[np.uint64], round_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Map numbers below n to numbers below n.

        ``round_keys`` has shape (rounds, 1), one key for all, or (rounds, len(x)), one for each.
        """
        y = self._encipher(x, round_keys)
        walking = np.flatnonzero(y >= self.n)
        while walking.size:
            keys = round_keys if round_keys.shape[1] == 1 else round_keys[:, walking]
            stepped = self._encipher(y[walking], keys)
            y[walking] = stepped
            walking = walking[stepped >= self.n]
        return y

    def _encipher(self, x: NDArray[np.uint64], round_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left = x // self.cols
        right = x - left * self.cols
        h, shifted = np.empty_like(x), np.empty_like(x)
        mix_1, mix_2, half = np.uint64(_MIX_1), np.uint64(_MIX_2), np.uint64(32)
        for number, key in enumerate(round_keys):
            target, source, size = (right, left, self.cols) if number % 2 else (left, right, self.rows)
            np.add(source, key, out=h)
            np.multiply(h, mix_1, out=h)
            np.right_shift(h, half, out=shifted)
            np.bitwise_xor(h, shifted, out=h)
            np.multiply(h, mix_2, out=h)
            np.right_shift(h, half, out=h)
            # 32 random bits to [0, size) without a division (Lemire 2019).
            np.multiply(h, size, out=h)
            np.right_shift(h, half, out=h)
            # target = (target + h) mod size: a negative difference wraps to a huge number.
            np.add(target, h, out=target)
            np.subtract(target, size, out=h)
            np.minimum(target, h, out=target)
        return left * self.cols + right


class Permutation:
    """A keyed permutation of range(n) in constant memory, equal on every node and in every version.

    It is for shuffling, not for secrecy. Construction takes some microseconds; a call about 15 ns per position on one
    core, and at least 40 us.

    Args:
        n: the size, 1 to 2**62.
        key: any integer; the low 64 bits count.
    """

    def __init__(self, n: int, key: int) -> None:
        if not 1 <= n <= MAX_SIZE:
            raise ValueError(f"n must be between 1 and 2**62, but is {n}.")
        self.n = n
        self._network = FeistelNetwork(n)
        self._round_keys = self._network.round_keys(np.array([key & _MASK], dtype=np.uint64))

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers at ``positions``, shape (k,) to shape (k,).

        Raises:
            IndexError: a position is not in range(n).
        """
        x = positions.astype(np.uint64)  # a copy; negative positions become huge
        if x.size and int(x.max()) >= self.n:
            raise IndexError(f"positions must lie in [0, {self.n}).")
        for start in range(0, x.size, CHUNK):
            part = slice(start, start + CHUNK)
            x[part] = self._network.permute(x[part], self._round_keys)
        return x.view(np.int64)


# --- Draws by weights: rare classes more often, uncertain labels less ---
#
# By integers and by floating-point operations that IEEE 754 rounds correctly. No function of a platform's C library
# takes part, so the draws are equal on every node.


_LOG_TERMS = 23  # of the series of log; |s| < 0.172, so the rest is below 2**-60


@dataclass(frozen=True, eq=False)
class WeightedDraws:
    """Draws of an epoch, each of a sample with its share of the weights.

    With replacement, a position is hashed to a number below the sum of the weights, in integers of 62 bits. Without,
    the samples of an epoch are those with the smallest ``-log(u) / weight`` (Efraimidis and Spirakis 2006, "Weighted
    random sampling with a reservoir"), in an order that is random again.

    Attributes:
        weights: the weight of each sample, by its number, float64 (N,).
        replacement: whether a sample may occur more than once in an epoch.
    """

    weights: NDArray[np.float64]
    replacement: bool

    def check(self, num_samples: int) -> None:
        """Reject weights by which an epoch of ``num_samples`` cannot be drawn.

        Raises:
            DataError: gives the reason.
        """
        possible = np.count_nonzero(self.weights)
        if not possible:
            raise DataError("sample_weights are all 0, so no sample can be drawn.")
        if not self.replacement and num_samples > possible:
            raise DataError(
                f"sample_weights without replacement: an epoch of {num_samples} samples cannot be drawn from "
                f"{possible} with a weight above 0. Give a smaller num_samples."
            )

    def draw(self, key: int, num_samples: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample numbers at positions of the epoch with this key and number of samples."""
        if self.replacement:
            sums = self._cumulative
            values = _scale(_hashes(key, positions), int(sums[-1]))
            drawn: NDArray[np.int64] = np.searchsorted(sums, values, side="right").astype(np.int64, copy=False)
            return drawn
        indices = Permutation(num_samples, derive_key(key, _INDEX))(positions)
        return np.take(self._once(key, num_samples), indices)

    @functools.cached_property
    def _cumulative(self) -> NDArray[np.int64]:
        """Running sums of the weights as integers, in proportion, below 2**62; a weight above 0 is at least 1."""
        bits = min(53, 61 - len(self.weights).bit_length())
        exponent = math.frexp(float(self.weights.max()))[1]
        scaled = np.rint(np.ldexp(self.weights, bits - exponent)).astype(np.int64)
        sums: NDArray[np.int64] = np.cumsum(np.maximum(scaled, self.weights > 0), dtype=np.int64)
        return sums

    @functools.cached_property
    def _once(self) -> Callable[[int, int], NDArray[np.int64]]:
        """Return an epoch's samples; those of the last call are cached."""
        return functools.lru_cache(maxsize=1)(self._draw_once)

    def _draw_once(self, key: int, num_samples: int) -> NDArray[np.int64]:
        possible = np.flatnonzero(self.weights)
        with np.errstate(over="ignore"):
            times = _exponential(_hashes(key, possible)) / self.weights[possible]
        return np.take(possible, np.argsort(times, kind="stable")[:num_samples])


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


# --- Micro-batches of about equal lengths: sentences by tokens, images by pixels ---


def assign_by_length(lengths: NDArray[np.int64], capacities: list[int]) -> NDArray[np.int64]:
    """Assign samples to micro-batches such that the micro-batches' total lengths are about equal.

    The longest sample first, each to the shortest micro-batch that has capacity left: longest processing time first
    (Graham, "Bounds on multiprocessing timing anomalies", 1969). The micro-batches keep their sizes.

    Args:
        lengths: the lengths of the samples, (n,).
        capacities: the number of samples of each micro-batch; n in total.

    Returns:
        A permutation of range(n): the first micro-batch's samples in their order, then the second's, and so on.
    """
    assigned: list[list[int]] = [[] for _ in capacities]
    lightest = [(0, microbatch) for microbatch, capacity in enumerate(capacities) if capacity]
    for index in np.argsort(-lengths, kind="stable").tolist():
        load, microbatch = heapq.heappop(lightest)
        assigned[microbatch].append(index)
        if len(assigned[microbatch]) < capacities[microbatch]:
            heapq.heappush(lightest, (load + int(lengths[index]), microbatch))
    return np.concatenate([np.sort(np.asarray(microbatch, dtype=np.int64)) for microbatch in assigned])


def check_lengths(values: Iterable[Any], num_samples: int, task: str) -> NDArray[np.int64]:
    """Return a task's sample lengths as an array.

    Raises:
        DataError: they are not whole numbers of at least 0, one per sample.
    """
    try:
        lengths = np.asarray(values if isinstance(values, np.ndarray) else list(values))
    except (TypeError, ValueError) as error:
        raise DataError(f"{task}.sample_lengths must return a number for each sample: {error}") from error
    if lengths.shape != (num_samples,) or lengths.dtype.kind not in "iu" or (lengths.size and lengths.min() < 0):
        raise DataError(
            f"{task}.sample_lengths must return a whole number of at least 0 for each of the {num_samples} "
            f"samples, but returned {lengths.dtype} of shape {lengths.shape}. Count tokens, pixels or points."
        )
    return lengths.astype(np.int64)


# --- The order of the data as index arithmetic: (seed, epoch, step, micro-batch) -> sample numbers ---
#
# Stateless, in memory independent of the dataset's size. An epoch is a keyed permutation of the sample numbers; a step
# is a range of positions in it; a micro-batch is a part of that range. The values never change across versions.


_BY_SAMPLE = Shuffle(window=1)

_permutation = functools.lru_cache(maxsize=8)(Permutation)
_SHOWN = 8  # sample numbers in a message


@functools.lru_cache(maxsize=16)
def _split(size: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Split range(size) into ranges whose lengths differ by at most one, the longer ones first."""
    length, longer = divmod(size, parts)
    cuts = [k * length + min(k, longer) for k in range(parts + 1)]
    return tuple(itertools.pairwise(cuts))


@dataclass(frozen=True)
class DeterministicSampler:
    """The samples of each micro-batch of each step: a pure function, equal for any number of ranks.

    A step is ``global_batch_size`` samples over ``num_microbatches`` micro-batches whose sizes differ by at
    most one. The remainder of an epoch is a shorter batch of as many micro-batches as
    get ``min_microbatch_size`` samples each; fewer samples than that join the previous batch. Weights and lengths of
    samples do not count when two orders are compared.

    Attributes:
        num_samples: N, the samples of an epoch.
        global_batch_size: G, the samples of a step; N need not be a multiple of it.
        num_microbatches: S, the micro-batches of a step; G need not be a multiple of it.
        seed: determines the order, together with the epoch.
        min_microbatch_size: the fewest samples that a micro-batch may hold.
        shuffle: by sample, by windows of neighbours, or not at all.
        draws: draws the samples by weights, instead of a permutation of all.
        lengths: the length of each sample, by its number, int64 (dataset_size,): a step's samples are assigned to its
            micro-batches such that these have about equal lengths.

    Raises:
        ConfigError: the numbers are inconsistent.
        DataError: there are too few samples for one micro-batch, or more than 2**62; the weights cannot be drawn by.
    """

    num_samples: int
    global_batch_size: int
    num_microbatches: int
    seed: int
    min_microbatch_size: int = 2
    shuffle: Shuffle = _BY_SAMPLE
    draws: WeightedDraws | None = field(default=None, repr=False, compare=False)
    lengths: NDArray[np.int64] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise ConfigError(f"--microbatches must be at least 1, but is {self.num_microbatches}.")
        if self.min_microbatch_size < 1:
            raise ConfigError(f"the task's min_microbatch_size must be at least 1, but is {self.min_microbatch_size}.")
        if self.shuffle.window < 0:
            raise ConfigError(f"--shuffle window:N needs N of at least 1, but N is {self.shuffle.window}.")
        if self.global_batch_size < self.num_microbatches * self.min_microbatch_size:
            least = self.num_microbatches * self.min_microbatch_size
            fewer = self.global_batch_size // self.min_microbatch_size
            raise ConfigError(
                f"--global-batch-size {self.global_batch_size} is too small for {self.num_microbatches} micro-batches "
                f"of at least {self.min_microbatch_size} samples. Use --global-batch-size {least} or more"
                + (f", or --microbatches {fewer} or fewer." if fewer else ".")
            )
        if self.num_samples < self.min_microbatch_size:
            raise DataError(
                f"the training data has {self.num_samples} samples, but a micro-batch needs at least "
                f"{self.min_microbatch_size}. Give more data, or lower min_microbatch_size in the task."
            )
        if self.num_samples > MAX_SIZE:
            raise DataError(f"the training data claims {self.num_samples} samples; the maximum is 2**62.")
        if self.draws is not None:
            if self.shuffle.window != 1:
                raise ConfigError("a task with sample_weights draws its samples at random; leave --shuffle out.")
            self.draws.check(self.num_samples)

    @property
    def dataset_size(self) -> int:
        """The samples of the dataset, of which :meth:`indices` gives the numbers."""
        return self.num_samples if self.draws is None else len(self.draws.weights)

    @property
    def is_weighted(self) -> bool:
        """Whether samples are drawn by weights, so that a sample may occur several times, or never."""
        return self.draws is not None

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        """The number of batches of an epoch, including a short last one."""
        full, rest = divmod(self.num_samples, self.global_batch_size)
        return full + 1 if rest >= self.min_microbatch_size or full == 0 else full

    def batch_range(self, step: int) -> tuple[int, int]:
        """Return the positions [start, stop) of the step in its epoch.

        Raises:
            IndexError: the epoch has no such step.
        """
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"step {step} is not in [0, {self.steps_per_epoch}).")
        start = step * self.global_batch_size
        last = step == self.steps_per_epoch - 1
        return start, self.num_samples if last else start + self.global_batch_size

    def microbatch_bounds(self, step: int) -> tuple[tuple[int, int], ...]:
        """Return the positions [start, stop) of each present micro-batch; entry k is micro-batch k.

        Raises:
            IndexError: the epoch has no such step.
        """
        start, stop = self.batch_range(step)
        present = max(1, min(self.num_microbatches, (stop - start) // self.min_microbatch_size))
        return tuple((start + low, start + high) for low, high in _split(stop - start, present))

    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the sample numbers at the positions [start, stop) of an epoch, shape (stop - start,).

        Raises:
            IndexError: the range is not within [0, num_samples].
        """
        if not 0 <= start <= stop <= self.num_samples:
            raise IndexError(f"positions [{start}, {stop}) are not within [0, {self.num_samples}].")
        if self.lengths is None:
            return self._shuffled(epoch, start, stop)
        parts, position = [np.empty(0, dtype=np.int64)], start
        while position < stop:
            step = min(position // self.global_batch_size, self.steps_per_epoch - 1)
            low, high = self.batch_range(step)
            until = min(high, stop)
            parts.append(self._balanced(epoch, step)[position - low : until - low])
            position = until
        return np.concatenate(parts)

    @functools.cached_property
    def _balanced(self) -> Callable[[int, int], NDArray[np.int64]]:
        """Return a step's sample numbers, micro-batch by micro-batch; those of the last call are cached."""
        return functools.lru_cache(maxsize=1)(self._balance)

    def _balance(self, epoch: int, step: int) -> NDArray[np.int64]:
        assert self.lengths is not None
        numbers = self._shuffled(epoch, *self.batch_range(step))
        capacities = [high - low for low, high in self.microbatch_bounds(step)]
        return numbers[assign_by_length(self.lengths[numbers], capacities)]

    def _shuffled(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the sample numbers at the positions [start, stop) of an epoch, before lengths count."""
        positions = np.arange(start, stop, dtype=np.int64)
        if self.draws is not None:
            return self.draws.draw(derive_key(self.seed, _DRAW, epoch), self.num_samples, positions)
        if self.shuffle.window == 0:
            return positions
        key = derive_key(self.seed, _EPOCH, epoch)
        if self.shuffle.window == 1:
            return _permutation(self.num_samples, key)(positions)
        parts = list(self._shuffled_windows(key, start, stop))
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def microbatch_indices(self, epoch: int, step: int, microbatch: int) -> NDArray[np.int64]:
        """Return the sample numbers of one micro-batch of one step.

        Raises:
            IndexError: the epoch has no such step, or the step no such micro-batch.
        """
        bounds = self.microbatch_bounds(step)
        if not 0 <= microbatch < len(bounds):
            raise IndexError(f"micro-batch {microbatch} is not in [0, {len(bounds)}) in step {step}.")
        return self.indices(epoch, *bounds[microbatch])

    def describe(self, epoch: int, start: int, stop: int) -> str:
        """Describe the positions [start, stop) of an epoch with their first sample numbers, for messages.

        Raises:
            IndexError: the range is not within [0, num_samples].
        """
        numbers = self.indices(epoch, start, min(stop, start + _SHOWN)).tolist()
        shown = ", ".join(map(str, numbers)) + (", ..." if stop - start > _SHOWN else "")
        return f"positions {start} to {stop - 1} of the epoch (samples {shown})"

    def _shuffled_windows(self, key: int, start: int, stop: int) -> Iterator[NDArray[np.int64]]:
        """Yield windows of equal size, permuted; the short last window is inserted at a keyed position."""
        window = self.shuffle.window
        num_full, short = divmod(self.num_samples, window)
        short_start = window * (derive_key(key, _SHORT_WINDOW) % (num_full + 1))
        short_stop = short_start + short
        yield from self._full_windows(key, start, min(stop, short_start))
        low, high = max(start, short_start), min(stop, short_stop)
        if low < high:
            offsets = np.arange(low - short_start, high - short_start, dtype=np.int64)
            yield num_full * window + _permutation(short, derive_key(key, num_full))(offsets)
        yield from self._full_windows(key, max(start, short_stop) - short, stop - short)

    def _full_windows(self, key: int, start: int, stop: int) -> Iterator[NDArray[np.int64]]:
        """Yield the sample numbers at [start, stop) of the full windows alone, a chunk at a time."""
        window = self.shuffle.window
        network = FeistelNetwork(window)
        for low in range(start, stop, CHUNK):
            positions = np.arange(low, min(low + CHUNK, stop), dtype=np.int64)
            first_window = low // window
            windows = np.arange(first_window, int(positions[-1]) // window + 1, dtype=np.int64)
            shuffled = _permutation(self.num_samples // window, key)(windows)
            # One key per window: derive_key(key, window), vectorised.
            window_keys = splitmix64_of(np.uint64(splitmix64(key)) ^ shuffled.view(np.uint64))
            local = positions // window - first_window
            offsets = (positions % window).view(np.uint64)
            within = network.permute(offsets, network.round_keys(window_keys)[:, local])
            yield shuffled[local] * window + within.view(np.int64)


# --- Lengths and weights of samples in the run's directory, so that others can recompute the order ---


_FIELDS = {True: "with_replacement", False: "without_replacement"}


def save_order(run: RunDirectory, order: DeterministicSampler | None) -> None:
    """Save the lengths of a balanced order, and the weights of a weighted one; remove the files of other orders."""
    for path, array in _arrays(run, order).items():
        if array is None:
            path.unlink(missing_ok=True)
            continue
        content = io.BytesIO()
        np.save(content, array, allow_pickle=False)
        write_atomically(path, content.getvalue())


def restore_order(order: DeterministicSampler | None, run: RunDirectory) -> DeterministicSampler | None:
    """Return an order with the saved weights and lengths, if there are any.

    Raises:
        RunDirectoryError: a file does not fit the order.
    """
    if order is None:
        return None
    weights, lengths = _load(run.sample_weights), _load(run.sample_lengths)
    if weights is not None:
        names = [name for name in _FIELDS.values() if weights.dtype == [(name, np.float64)] and weights.ndim == 1]
        if not names:
            raise RunDirectoryError(f"{run.sample_weights} must contain weights, but contains {_describe(weights)}.")
        replacement = names[0] == _FIELDS[True]
        try:
            order = replace(order, draws=WeightedDraws(weights[names[0]], replacement))
        except UserError as error:
            raise RunDirectoryError(f"{run.sample_weights}: {error}") from error
    if lengths is not None:
        if lengths.shape != (order.dataset_size,) or lengths.dtype != np.int64:
            raise RunDirectoryError(
                f"{run.sample_lengths} must contain the lengths of {order.dataset_size} samples, int64, but contains "
                f"{_describe(lengths)}."
            )
        order = replace(order, lengths=lengths)
    return order


def require_same_order(order: DeterministicSampler | None, run: RunDirectory) -> None:
    """Reject sample lengths and weights other than those with which the run was created.

    Raises:
        RunDirectoryError: they differ.
    """
    for path, array in _arrays(run, order).items():
        saved = _load(path)
        same = array is saved if array is None or saved is None else _are_equal(array, saved)
        if not same:
            name = "sample_weights" if path == run.sample_weights else "sample_lengths"
            raise RunDirectoryError(
                f"the task's {name} differ from those in {path}, with which the run was created, so its micro-batches "
                "would have other samples. Restore the task, or start a new run with another --run-dir DIR."
            )


def _arrays(run: RunDirectory, order: DeterministicSampler | None) -> dict[Path, NDArray[Any] | None]:
    draws = None if order is None else order.draws
    weights = None if draws is None else draws.weights.view([(_FIELDS[draws.replacement], np.float64)])
    return {run.sample_weights: weights, run.sample_lengths: None if order is None else order.lengths}


def _are_equal(array: NDArray[Any], saved: NDArray[Any]) -> bool:
    return array.dtype == saved.dtype and array.shape == saved.shape and bool(np.all(array == saved))


def _load(path: Path) -> NDArray[Any] | None:
    try:
        with path.open("rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}") from error


def _describe(array: NDArray[Any]) -> str:
    return f"{array.dtype} of shape {array.shape}"
