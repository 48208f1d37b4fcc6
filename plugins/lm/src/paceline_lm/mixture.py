"""A mixture of sources by weight: which sample of which source a number is, as a function of the epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from paceline.core.errors import TaskError
from paceline.data.order import Permutation, derive_key
from paceline.data.train_val_split import Split, split_train_val
from paceline_lm.packing import PackedDocuments

_PLACE, _SOURCE = 1, 2  # domains of the keys


@dataclass(frozen=True)
class Share:
    """A source in a mixture. It is not a dataset, so that the epochs of the mixture are not announced to the source.

    Attributes:
        source: a map-style dataset; with an attribute ``tokens``, the number of tokens in it, its weight is in tokens.
        weight: in proportion to the other sources'.
        count: samples of an epoch.
    """

    source: Any
    weight: float
    count: int

    @property
    def mean_tokens(self) -> float:
        """Tokens of a sample."""
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
        if len(sources) != len(weights) or not all(math.isfinite(weight) and weight > 0 for weight in weights):
            raise TaskError(f"a mixture needs a weight above 0 for each of its {len(sources)} sources, not {weights}.")
        total = (tokens or sum(map(_tokens, sources))) / math.fsum(weights)
        self.shares = tuple(
            Share(source, weight, max(1, round(total * weight * len(source) / _tokens(source))))
            for source, weight in zip(sources, weights, strict=True)
        )
        self._key = key
        self._tokens = tokens
        self._starts = np.cumsum([0, *(share.count for share in self.shares)])
        self._epoch = 0
        self._place = self._order_of_places(0)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def tokens(self) -> float:
        """Tokens of an epoch."""
        return math.fsum(share.count * share.mean_tokens for share in self.shares)

    def set_epoch(self, epoch: int) -> None:
        """Read the samples of another epoch."""
        self._epoch = epoch
        self._place = self._order_of_places(epoch)
        for share in self.shares:
            if isinstance(share.source, PackedDocuments):
                share.source.keep_plans(self._epoch * share.count // len(share.source))

    def locate(self, number: int) -> tuple[int, int, int]:
        """Return the source of a sample of this epoch, the source's pass, and the sample's number in the source.

        Raises:
            IndexError: there is no such sample.
        """
        place = int(self._place(np.array([number]))[0])
        which = int(np.searchsorted(self._starts, place, side="right")) - 1
        share = self.shares[which]
        turn, position = divmod(self._epoch * share.count + place - int(self._starts[which]), len(share.source))
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

    def _order_of_places(self, epoch: int) -> Permutation:
        """Scatter the sources over the epoch, for ``--shuffle none`` and windows."""
        return Permutation(len(self), derive_key(self._key, _PLACE, epoch))


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
