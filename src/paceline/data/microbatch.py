"""What loaders hand to the trainer, and the few types that all of them share."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one shard computes in one step.

    Attributes:
        shard: the logical shard; in an evaluation, the block's number.
        batch: what ``collate`` returned, on the device.
        num_samples: how many samples it holds.
        checksum: :func:`checksum` of the sample numbers that were fetched. The ledger's evidence.
    """

    shard: int
    batch: Any
    num_samples: int
    checksum: int


class Loader(Protocol):
    """Gives a rank its micro-batches. Any (epoch, step) may come first; in order is fastest."""

    def fetch(self, epoch: int, step: int, shards: range) -> list[MicroBatch]:
        """The micro-batches of those of ``shards`` that are present in this step, in order.

        Raises:
            DataError: a sample cannot be read or does not fit its batch.
        """
        ...

    def close(self) -> None:
        """End worker processes; may be called twice."""
        ...


def checksum(numbers: Indices) -> int:
    """CRC-32 of sample numbers as little-endian int64.

    They are numbered within the split, before a carved split is mapped to its dataset, so that an
    audit needs nothing but the order.
    """
    return zlib.crc32(numbers.astype("<i8", copy=False).tobytes())
