"""The order of the data as index arithmetic: (seed, epoch, step, shard) -> sample numbers.

Nothing here has state, and nothing is as large as the data set. An epoch is a keyed permutation
of the sample numbers; a step is a range of positions in it; a shard is a part of that range.
Values are promised for ever, as those of ``paceline.data.permutation`` are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.config import Shuffle
from paceline.data.permutation import (
    CHUNK,
    MAX_SIZE,
    FeistelNetwork,
    Permutation,
    derive_key,
    splitmix64,
    splitmix64_of,
)
from paceline.errors import ConfigError, DataError

# Domains of the keys, so that no two uses of one seed share a key.
_EPOCH, _SHORT_BLOCK, _CARVE = 1, 2, 3

_BY_SAMPLE = Shuffle(block=1)

_permutation = functools.lru_cache(maxsize=8)(Permutation)
_SHOWN = 8  # sample numbers in a message


@functools.lru_cache(maxsize=16)
def _split(size: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Cut range(size) into ranges whose lengths differ by at most one, the longer ones first."""
    length, longer = divmod(size, parts)
    cuts = [k * length + min(k, longer) for k in range(parts + 1)]
    return tuple(itertools.pairwise(cuts))


@dataclass(frozen=True)
class DataOrder:
    """Which samples each shard of each step sees: a pure function, the same for any number of ranks.

    A step is ``global_batch_size`` samples over ``num_shards`` shards whose sizes differ by at
    most one. What is left over at the end of an epoch is a shorter batch, over as many shards as
    get ``min_shard`` samples each; fewer samples than that join the batch before.

    Attributes:
        num_samples: N, the samples of an epoch.
        global_batch_size: G, the samples of a step; N need not be a multiple of it.
        num_shards: S, the shards of a step; G need not be a multiple of it.
        seed: decides the order, together with the epoch.
        min_shard: the fewest samples that a shard may hold.
        shuffle: by sample, by blocks of neighbours, or not at all.

    Raises:
        ConfigError: the numbers do not fit together.
        DataError: there are too few samples for one shard, or too many to count.
    """

    num_samples: int
    global_batch_size: int
    num_shards: int
    seed: int
    min_shard: int = 2
    shuffle: Shuffle = _BY_SAMPLE

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise ConfigError(f"--shards must be at least 1, but is {self.num_shards}.")
        if self.min_shard < 1:
            raise ConfigError(f"the task's min_shard must be at least 1, but is {self.min_shard}.")
        if self.shuffle.block < 0:
            raise ConfigError(f"--shuffle block:N needs N of at least 1, but N is {self.shuffle.block}.")
        if self.global_batch_size < self.num_shards * self.min_shard:
            least = self.num_shards * self.min_shard
            fewer = self.global_batch_size // self.min_shard
            raise ConfigError(
                f"--global-batch-size {self.global_batch_size} is too small for {self.num_shards} shards "
                f"of at least {self.min_shard} samples. Use --global-batch-size {least} or more"
                + (f", or --shards {fewer} or fewer." if fewer else ".")
            )
        if self.num_samples < self.min_shard:
            raise DataError(
                f"the training data has {self.num_samples} samples, but a shard needs at least "
                f"{self.min_shard}. Give more data, or lower min_shard in the task."
            )
        if self.num_samples > MAX_SIZE:
            raise DataError(f"the training data claims {self.num_samples} samples; 2**62 is the most.")

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        """How many batches an epoch has, a short last one included."""
        full, rest = divmod(self.num_samples, self.global_batch_size)
        return full + 1 if rest >= self.min_shard or full == 0 else full

    def batch_range(self, step: int) -> tuple[int, int]:
        """The positions [start, stop) in the epoch that the step takes.

        Raises:
            IndexError: the epoch has no such step.
        """
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"step {step} is not in [0, {self.steps_per_epoch}).")
        start = step * self.global_batch_size
        last = step == self.steps_per_epoch - 1
        return start, self.num_samples if last else start + self.global_batch_size

    def shard_bounds(self, step: int) -> tuple[tuple[int, int], ...]:
        """The positions [start, stop) of each shard that is present; entry k is shard k.

        Raises:
            IndexError: the epoch has no such step.
        """
        start, stop = self.batch_range(step)
        present = max(1, min(self.num_shards, (stop - start) // self.min_shard))
        return tuple((start + low, start + high) for low, high in _split(stop - start, present))

    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """The sample numbers at the positions [start, stop) of an epoch, shape (stop - start,).

        Raises:
            IndexError: the range is not within [0, num_samples].
        """
        if not 0 <= start <= stop <= self.num_samples:
            raise IndexError(f"positions [{start}, {stop}) are not within [0, {self.num_samples}].")
        if self.shuffle.block == 0:
            return np.arange(start, stop, dtype=np.int64)
        key = derive_key(self.seed, _EPOCH, epoch)
        if self.shuffle.block == 1:
            return _permutation(self.num_samples, key)(np.arange(start, stop, dtype=np.int64))
        parts = list(self._shuffled_blocks(key, start, stop))
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def shard_indices(self, epoch: int, step: int, shard: int) -> NDArray[np.int64]:
        """The sample numbers of one shard of one step.

        Raises:
            IndexError: the epoch has no such step, or the step no such shard.
        """
        bounds = self.shard_bounds(step)
        if not 0 <= shard < len(bounds):
            raise IndexError(f"shard {shard} is not in [0, {len(bounds)}) in step {step}.")
        return self.indices(epoch, *bounds[shard])

    def describe(self, epoch: int, start: int, stop: int) -> str:
        """The positions [start, stop) of an epoch, and their first sample numbers, in words.

        Raises:
            IndexError: the range is not within [0, num_samples].
        """
        numbers = self.indices(epoch, start, min(stop, start + _SHOWN)).tolist()
        shown = ", ".join(map(str, numbers)) + (", ..." if stop - start > _SHOWN else "")
        return f"positions {start} to {stop - 1} of the epoch (samples {shown})"

    def _shuffled_blocks(self, key: int, start: int, stop: int) -> Iterator[NDArray[np.int64]]:
        """Blocks of equal size, permuted; the short last block is put in between at a place of its own."""
        block = self.shuffle.block
        num_full, short = divmod(self.num_samples, block)
        short_start = block * (derive_key(key, _SHORT_BLOCK) % (num_full + 1))
        short_stop = short_start + short
        yield from self._full_blocks(key, start, min(stop, short_start))
        low, high = max(start, short_start), min(stop, short_stop)
        if low < high:
            offsets = np.arange(low - short_start, high - short_start, dtype=np.int64)
            yield num_full * block + _permutation(short, derive_key(key, num_full))(offsets)
        yield from self._full_blocks(key, max(start, short_stop) - short, stop - short)

    def _full_blocks(self, key: int, start: int, stop: int) -> Iterator[NDArray[np.int64]]:
        """Sample numbers at [start, stop) of the full blocks alone, a chunk at a time."""
        block = self.shuffle.block
        network = FeistelNetwork(block)
        for low in range(start, stop, CHUNK):
            positions = np.arange(low, min(low + CHUNK, stop), dtype=np.int64)
            first_slot = low // block
            slots = np.arange(first_slot, int(positions[-1]) // block + 1, dtype=np.int64)
            blocks = _permutation(self.num_samples // block, key)(slots)
            # One key a block: derive_key(key, block), vectorised.
            block_keys = splitmix64_of(np.uint64(splitmix64(key)) ^ blocks.view(np.uint64))
            local = positions // block - first_slot
            offsets = (positions % block).view(np.uint64)
            within = network.permute(offsets, network.round_keys(block_keys)[:, local])
            yield blocks[local] * block + within.view(np.int64)


class Split(Protocol):
    """A part of a data set, as a function from index in the part to sample number in the whole."""

    def __len__(self) -> int: ...

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample numbers in the whole data set, shape (k,) to shape (k,)."""


class Carved(NamedTuple):
    """Two disjoint splits that together are the whole data set."""

    train: Split
    val: Split


def carve(num_samples: int, fraction: float, seed: int) -> Carved:
    """Carve a validation split out of a data set, by index arithmetic.

    The data set is cut into as many intervals as the validation split has samples, their lengths
    differing by at most one, and a keyed choice takes one sample of each (stratified sampling).
    So both splits keep the data set's order, which ``--shuffle none`` and ``block:N`` rely on, and
    a data set sorted by class gives up each class in proportion.

    Args:
        num_samples: samples in the data set, 2 to 2**52.
        fraction: the part to validate on, in (0, 1); at least one sample is left on either side.
        seed: decides the choice.

    Raises:
        ConfigError: the fraction is not between 0 and 1.
        DataError: the data set cannot be split.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"--val-fraction must be between 0 and 1, but is {fraction}.")
    if not 2 <= num_samples <= 2**52:
        raise DataError(
            f"--val-fraction cannot split a data set of {num_samples} samples; it must have 2 to 2**52."
        )
    num_val = min(num_samples - 1, max(1, round(num_samples * fraction)))
    strata = _Strata(num_samples, num_val, derive_key(seed, _CARVE))
    return Carved(train=_CarvedTrain(strata), val=_CarvedVal(strata))


def _scaled(x: NDArray[np.int64], numerator: int, denominator: int) -> NDArray[np.int64]:
    """floor(x * numerator / denominator), exact although the product may exceed 64 bits.

    A floating-point quotient is near enough that the remainder, computed modulo 2**64, is true.
    """
    near = (x * (numerator / denominator)).astype(np.int64)
    rest: NDArray[np.int64] = (x * np.int64(numerator) - near * np.int64(denominator)) // denominator
    return near + rest


@dataclass(frozen=True)
class _Strata:
    """``num_val`` intervals; interval j is [ceil(j N / V), ceil((j + 1) N / V))."""

    num_samples: int
    num_val: int
    key: int

    def starts(self, j: NDArray[np.int64]) -> NDArray[np.int64]:
        return -_scaled(-j, self.num_samples, self.num_val)

    def chosen(self, j: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sample number that validation takes of interval j."""
        start = self.starts(j)
        length = (self.starts(j + 1) - start).view(np.uint64)
        hashed = splitmix64_of(np.uint64(splitmix64(self.key)) ^ j.view(np.uint64))
        return start + (hashed % length).view(np.int64)


@dataclass(frozen=True)
class _CarvedVal:
    strata: _Strata

    def __len__(self) -> int:
        return self.strata.num_val

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        _check_indices(indices, len(self))
        return self.strata.chosen(indices)


@dataclass(frozen=True)
class _CarvedTrain:
    strata: _Strata

    def __len__(self) -> int:
        return self.strata.num_samples - self.strata.num_val

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        _check_indices(indices, len(self))
        # Before interval j lie ceil(j T / V) of the T training samples, so i is in the last j
        # with j T / V <= i; j of the samples before it went to validation.
        j = _scaled(indices, self.strata.num_val, len(self))
        number = indices + j
        return number + (number >= self.strata.chosen(j))


def _check_indices(indices: NDArray[np.int64], size: int) -> None:
    if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= size):
        raise IndexError(f"indices must lie in [0, {size}).")
