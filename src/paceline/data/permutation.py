"""A keyed permutation of any range in constant memory, and the integer hash its keys come from.

Values are promised for ever: only integer arithmetic modulo 2**64, no random number generator.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

MAX_SIZE = 2**62
"""The largest range that can be permuted."""

CHUNK = 8192
"""Positions to work on at a time, so that the arrays stay in the L2 cache."""

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def splitmix64(value: int) -> int:
    """One output of the SplitMix64 generator (Steele, Lea and Flood 2014) in state ``value``."""
    z = (value + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def derive_key(first: int, *rest: int) -> int:
    """A 64-bit key that depends on every word and on their order: a chain of ``splitmix64``."""
    key = splitmix64(first)
    for word in rest:
        key = splitmix64(key ^ (word & _MASK))
    return key


def splitmix64_of(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """``splitmix64`` of each value."""
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
    every round is even, and half of all permutations could never come. Tiny domains need more
    rounds: the least at which chi-square tests over keys (whole permutations up to n = 7, order
    patterns of five positions above) see no bias, plus a margin.
    """

    def __init__(self, n: int) -> None:
        root = math.isqrt(n - 1) + 1
        rows = root + root % 2
        self.n = np.uint64(n)
        self.rows = np.uint64(rows)
        self.cols = np.uint64(-(-n // rows))
        self.rounds = 24 if n < 32 else 12 if n < 256 else 8 if n < 4096 else 6

    def round_keys(self, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Round keys of K keys: shape (rounds, K)."""
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
            # target = (target + h) mod size: what would be negative wraps to something huge.
            np.add(target, h, out=target)
            np.subtract(target, size, out=h)
            np.minimum(target, h, out=target)
        return left * self.cols + right


class Permutation:
    """A keyed permutation of range(n) in constant memory, the same on every machine and for ever.

    It is for shuffling, not for secrecy. Making one costs some microseconds; a call about 15 ns
    a position on one core, and at least 40 us.

    Args:
        n: how many numbers, 1 to 2**62.
        key: any integer; the low 64 bits count.
    """

    def __init__(self, n: int, key: int) -> None:
        if not 1 <= n <= MAX_SIZE:
            raise ValueError(f"n must be between 1 and 2**62, but is {n}.")
        self.n = n
        self._network = FeistelNetwork(n)
        self._round_keys = self._network.round_keys(np.array([key & _MASK], dtype=np.uint64))

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers at ``positions``, shape (k,) to shape (k,).

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
