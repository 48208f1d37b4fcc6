"""Mixtures by weight: which source a position is of, as a function of the position, for datasets and for streams."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch.utils.data import Dataset

from paceline.core.errors import DataError, TaskError
from paceline.data.order import Permutation, derive_key
from paceline.data.train_val_split import Split, split_train_val
from paceline_lm.document_stream import DocumentReader, DocumentStream
from paceline_lm.packing import PackedDocuments

_PLACE, _SOURCE = 1, 2  # domains of the keys
_CYCLE = 10_000
"""Positions of a stream in which the sources have their shares."""


@dataclass
class SourceOrder:
    """Scatters sources over the positions of an epoch, in each of which a source has its count of them."""

    counts: Sequence[int]
    key: int

    def __post_init__(self) -> None:
        self._starts = np.cumsum([0, *self.counts])
        self._epoch = -1

    def __len__(self) -> int:
        return int(self._starts[-1])

    def locate(self, epoch: int, position: int) -> tuple[int, int]:
        """Return the source of a position, and a number below its count that no other position of the epoch has."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = Permutation(len(self), derive_key(self.key, _PLACE, epoch))
        place = int(self._order(np.array([position]))[0])
        which = int(np.searchsorted(self._starts, place, side="right")) - 1
        return which, place - int(self._starts[which])


@dataclass(frozen=True)
class Share:
    """A source in a mixture. It is not a dataset, so that the epochs of the mixture are not announced to the source.

    Attributes:
        source: a map-style dataset; with an attribute ``tokens``, the number of tokens in it, its weight is in tokens.
        count: samples of an epoch.
    """

    source: Any
    weight: float
    count: int

    @property
    def mean_tokens(self) -> float:
        return _tokens(self.source) / len(self.source)

    @property
    def passes(self) -> float:
        """How often an epoch contains each sample of the source."""
        return self.count / len(self.source)


class Mixture(Dataset[Any]):
    """Samples of several sources, each in its share of the tokens, in random access and without state.

    An epoch has as many tokens as the sources hold together, or as are given. A source is read in passes: each contains
    every sample once, in an order of its own, and the next epoch continues where this one ended. So after any number of
    epochs, no sample of a source was seen two times more than another.

    Args:
        sources: map-style datasets whose samples fit into one batch.
        weights: positive numbers, one for each source.
        key: of the order.
        tokens: of an epoch.

    Raises:
        TaskError: a weight is not a positive number, or there is not one for each source.
    """

    def __init__(self, sources: Sequence[Any], weights: Sequence[float], key: int, tokens: float | None = None) -> None:
        _check_weights(sources, weights)
        total = (tokens or sum(map(_tokens, sources))) / math.fsum(weights)
        self.shares = tuple(
            Share(source, weight, max(1, round(total * weight * len(source) / _tokens(source))))
            for source, weight in zip(sources, weights, strict=True)
        )
        self._key = key
        self._tokens = tokens
        # For `--shuffle none` and windows, too.
        self._order = SourceOrder([share.count for share in self.shares], key)
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._order)

    @property
    def tokens(self) -> float:
        return math.fsum(share.count * share.mean_tokens for share in self.shares)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        for share in self.shares:
            if isinstance(share.source, PackedDocuments):
                share.source.keep_plans(self._epoch * share.count // len(share.source))

    def locate(self, number: int) -> tuple[int, int, int]:
        """Return the source of a sample of this epoch, the source's pass, and the sample's number in the source."""
        which, within = self._order.locate(self._epoch, number)
        share = self.shares[which]
        turn, position = divmod(self._epoch * share.count + within, len(share.source))
        order = Permutation(len(share.source), derive_key(self._key, _SOURCE, which, turn))
        return which, turn, int(order(np.array([position]))[0])

    def __getitem__(self, number: int) -> Any:
        which, turn, row = self.locate(number)
        source = self.shares[which].source
        return source.read(row, turn) if isinstance(source, PackedDocuments) else source[row]

    def split_train_val(self, fraction: float, seed: int) -> tuple[Mixture, Mixture]:
        """Return mixtures of the sources' training parts, and of their validation parts."""
        parts = [_split(share.source, fraction, seed) for share in self.shares]
        weights = [share.weight for share in self.shares]
        train, val = zip(*parts, strict=True)
        return Mixture(train, weights, self._key, self._tokens), Mixture(val, weights, self._key)


@dataclass(frozen=True)
class _Part(Dataset[Any]):
    """Some samples of a source."""

    source: Any
    split: Split

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, number: int) -> Any:
        return self.source[int(self.split(np.array([number]))[0])]

    @property
    def tokens(self) -> float:
        return _tokens(self.source) / len(self.source) * len(self)


def _split(source: Any, fraction: float, seed: int) -> tuple[Any, Any]:
    if isinstance(source, PackedDocuments):
        return source.split_train_val(fraction, seed)
    split = split_train_val(len(source), fraction, seed)
    return _Part(source, split.train), _Part(source, split.val)


def _tokens(source: Any) -> float:
    return float(getattr(source, "tokens", len(source)))


def _check_weights(sources: Sequence[Any], weights: Sequence[float]) -> None:
    if len(sources) != len(weights) or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise TaskError(f"a mixture needs a weight above 0 for each of its {len(sources)} sources, not {weights}.")


# --- Streams, whose length is not known ---


class StreamMixture:
    """A :class:`~paceline.data.stream.ShardedStream` of several, in their shares of the tokens, without an end.

    Item i of shard k of S is position i S + k, and of every 10,000 positions each source has its count. A shard that is
    through with its part of a source begins the source's next pass, in another order.

    Args:
        sources: streams with ``mean_tokens``, tokens of a sample.
        weights: positive numbers, one for each source.

    Attributes:
        counts: of each source, of 10,000 positions or about as many.

    Raises:
        TaskError: a weight is not a positive number, or there is not one for each source.
    """

    units: ClassVar[Mapping[str, int]] = {"documents": 0}
    run_samples: int | None = None

    def __init__(self, sources: Sequence[DocumentStream], weights: Sequence[float]) -> None:
        _check_weights(sources, weights)
        self.sources = tuple(sources)
        shares = [weight / source.mean_tokens for source, weight in zip(sources, weights, strict=True)]
        self.counts = [max(1, round(_CYCLE * share / math.fsum(shares))) for share in shares]

    @property
    def mean_tokens(self) -> float:
        tokens = [count * source.mean_tokens for count, source in zip(self.counts, self.sources, strict=True)]
        return math.fsum(tokens) / sum(self.counts)

    def open(self, shard: int, num_shards: int, epoch: int, seed: int) -> MixtureReader:
        """See :class:`~paceline.data.stream.ShardedStream`."""
        return MixtureReader(self, shard, num_shards, derive_key(seed, _SOURCE, epoch))


class MixtureReader:
    """Reads a shard of a mixture: a reader of each source, and how many passes of it are over."""

    def __init__(self, mixture: StreamMixture, shard: int, num_shards: int, key: int) -> None:
        self._sources = mixture.sources
        self._order = SourceOrder(mixture.counts, key)
        self._shard = shard
        self._num_shards = num_shards
        self._key = key
        self._item = 0
        self._passes = [0] * len(self._sources)
        self._units = 0  # of passes that are over
        self._readers = [self._open(which) for which in range(len(self._sources))]

    def __next__(self) -> Any:
        which, _ = self._order.locate(*divmod(self._item * self._num_shards + self._shard, len(self._order)))
        for _ in range(self._num_shards + 1):
            try:
                sample = next(self._readers[which])
            except StopIteration:
                self._units += self._readers[which].state_dict()["units"]
                self._passes[which] += 1
                self._readers[which] = self._open(which)
            else:
                self._item += 1
                return sample
        raise DataError(f"{self._sources[which].name}: no document has a token to learn.")

    def state_dict(self) -> dict[str, Any]:
        states = [reader.state_dict() for reader in self._readers]
        units = self._units + sum(state["units"] for state in states)
        return {"item": self._item, "passes": list(self._passes), "sources": states, "units": units}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._item = state["item"]
        self._passes = list(state["passes"])
        self._units = state["units"] - sum(each["units"] for each in state["sources"])
        for which, each in enumerate(state["sources"]):
            self._readers[which] = self._open(which)
            self._readers[which].load_state_dict(each)

    def _open(self, which: int) -> DocumentReader:
        turn = self._passes[which]
        # A source may have less parts than there are shards: in each pass others get one.
        shard = (self._shard + turn) % self._num_shards
        return self._sources[which].open(shard, self._num_shards, turn, derive_key(self._key, which))
