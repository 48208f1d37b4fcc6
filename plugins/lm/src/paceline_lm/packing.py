"""Documents packed into samples of one length: another plan in each epoch, the same one in every process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from paceline.core.errors import TaskError
from paceline.data.order import Permutation, derive_key
from paceline.data.train_val_split import split_train_val
from paceline_lm.token_loss import IGNORED

_IN_ORDER = 0.5
"""The share of the documents that is packed in a keyed order: were all sorted, each epoch would have the same packs."""

_ATTEMPTS = 8
"""Orders to try before all documents are sorted."""


@dataclass(frozen=True)
class PackingPlan:
    """Which documents are in which pack; each is in one.

    Attributes:
        documents: their numbers, pack after pack.
        starts: pack p has ``documents[starts[p] : starts[p + 1]]``.
    """

    documents: NDArray[np.int64]
    starts: NDArray[np.int64]

    @property
    def num_packs(self) -> int:
        return len(self.starts) - 1


def plan_packs(lengths: NDArray[np.int64], capacity: int, key: int, num_packs: int) -> PackingPlan:
    """Pack documents in a keyed order into a given number of packs.

    Args:
        lengths: tokens of each document, 1 to ``capacity``.
        num_packs: at least :func:`count_packs`, and at most the number of documents.
    """
    for attempt in range(_ATTEMPTS):
        plan = _plan(lengths, capacity, derive_key(key, attempt), _IN_ORDER)
        if plan.num_packs <= num_packs:
            break
    else:
        plan = _plan(lengths, capacity, key, 0.0)  # needs equally many packs in any order
    within = np.setdiff1d(np.arange(len(lengths)), plan.starts)  # where a pack can be divided
    more = num_packs - plan.num_packs
    cuts = within[np.arange(more) * len(within) // max(1, more)]
    return PackingPlan(plan.documents, np.sort(np.concatenate([plan.starts, cuts])))


def count_packs(lengths: NDArray[np.int64], capacity: int) -> int:
    """Return a number of packs that suffices in every order."""
    return max(_plan(lengths, capacity, 0, share).num_packs for share in (0.0, _IN_ORDER))


def _plan(lengths: NDArray[np.int64], capacity: int, key: int, share: float) -> PackingPlan:
    """Pack documents by best fit: a share of them in the order of the key, the rest by falling length."""
    order = Permutation(len(lengths), key)(np.arange(len(lengths), dtype=np.int64))
    first = int(len(order) * share)
    order[first:] = order[first:][np.argsort(-lengths[order[first:]], kind="stable")]
    packs = np.array(_best_fit(lengths[order].tolist(), capacity))
    starts = np.concatenate([[0], np.cumsum(np.bincount(packs))])
    return PackingPlan(order[np.argsort(packs, kind="stable")], starts)


def _best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Return the pack of each document: the one with the least room that suffices, or a new one."""
    packs: list[int] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set where a pack has room for r tokens
    num_packs = 0
    for length in lengths:
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            pack = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, pack = capacity, num_packs
            num_packs += 1
        packs.append(pack)
        if left := room - length:
            by_room[left].append(pack)
            rooms |= 1 << left
    return packs


class SizedDocuments(Protocol):
    """Documents of which the lengths are known, in tokens."""

    @property
    def lengths(self) -> NDArray[np.int64]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]: ...


class PackedDocuments(Dataset[dict[str, torch.Tensor]]):
    """Packs of documents: ``{"input_ids", "labels", "position_ids"}``, each (length,), int64, and ``num_tokens``, ().

    Positions begin again with each document, by which models isolate it; padding is more documents, without labels.

    Args:
        documents: of at most ``length`` tokens.
        key: of the plans, together with the epoch.
        chosen: the numbers of the documents to pack; None: all.

    Attributes:
        tokens: of the documents.
        fill: the share of the packs' tokens that is not padding.
        units: what the packs of an epoch contain once, for the audit.
    """

    def __init__(
        self, documents: SizedDocuments, length: int, key: int, chosen: NDArray[np.int64] | None = None
    ) -> None:
        self.documents = documents
        self._length = length
        self._key = key
        self._chosen = np.arange(len(documents)) if chosen is None else chosen
        self._num_packs = count_packs(documents.lengths[self._chosen], length)
        self._longest = int(documents.lengths.max())
        self.tokens = int(documents.lengths[self._chosen].sum())
        self.fill = self.tokens / (self._num_packs * length)
        self.units = {"documents": len(self._chosen)}
        self._epoch = 0
        self._plans: dict[int, PackingPlan] = {}

    def __len__(self) -> int:
        return self._num_packs

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._plans = {which: plan for which, plan in self._plans.items() if which == epoch}

    def keep_plans(self, first: int) -> None:
        """Forget the plans of epochs before one."""
        self._plans = {which: plan for which, plan in self._plans.items() if which >= first}

    def numbers(self, pack: int, epoch: int | None = None) -> list[int]:
        """Return the numbers of the documents in a pack of an epoch; by default, of this one."""
        epoch = self._epoch if epoch is None else epoch
        plan = self._plans.get(epoch)
        if plan is None:
            plan = self._plans[epoch] = self.plan(epoch)
        inside: list[int] = self._chosen[plan.documents[plan.starts[pack] : plan.starts[pack + 1]]].tolist()
        return inside

    def __getitem__(self, pack: int) -> dict[str, torch.Tensor]:
        return self.read(pack, self._epoch)

    def __getstate__(self) -> Mapping[str, Any]:
        return {**vars(self), "_plans": {}}  # data workers compute them

    def read(self, pack: int, epoch: int) -> dict[str, torch.Tensor]:
        parts = [self.documents[number] for number in self.numbers(pack, epoch)]
        joined = _join(parts, slice(self._length))
        positions = [torch.arange(len(part["input_ids"])) for part in parts]
        # The model may have fewer positions than a pack has tokens.
        rest = torch.arange(self._length - int(joined["num_tokens"])) % self._longest
        return {**joined, "position_ids": torch.cat([*positions, rest])}

    def plan(self, epoch: int) -> PackingPlan:
        lengths = self.documents.lengths[self._chosen]
        return plan_packs(lengths, self._length, derive_key(self._key, epoch), self._num_packs)

    def split_train_val(self, fraction: float, seed: int) -> tuple[PackedDocuments, PackedDocuments]:
        """Return packs of the training documents, and packs of a part for validation."""
        if len(self._chosen) < 2:
            raise TaskError("--val-fraction needs two documents; there is one.")
        split = split_train_val(len(self._chosen), fraction, seed)
        train, val = (
            PackedDocuments(self.documents, self._length, self._key, self._chosen[part(np.arange(len(part)))])
            for part in split
        )
        return train, val


class ConcatenatedDocuments(Dataset[dict[str, torch.Tensor]]):
    """Documents one after another, cut into samples of one length, as for pretraining.

    A sample is ``{"input_ids", "labels"}``, each (length,), int64, and ``num_tokens``, (). Documents see those before
    them in the sample, as in a file of tokens. The last sample is padded, without labels. The attributes are those of
    :class:`PackedDocuments`.
    """

    def __init__(self, documents: SizedDocuments, length: int) -> None:
        self._documents = documents
        self._length = length
        self._starts = np.concatenate([[0], np.cumsum(documents.lengths)])
        self.tokens = int(self._starts[-1])
        self.fill = self.tokens / (len(self) * length)
        self.units = {"documents": len(documents)}

    def __len__(self) -> int:
        return -(-self.tokens // self._length)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        first = int(np.searchsorted(self._starts, number * self._length, side="right")) - 1
        last = int(np.searchsorted(self._starts, (number + 1) * self._length))
        start = number * self._length - int(self._starts[first])
        parts = [self._documents[each] for each in range(first, min(last, len(self._documents)))]
        return _join(parts, slice(start, start + self._length))

    def count_beginning(self, number: int) -> int:
        """Return how many documents begin in a sample."""
        first, last = np.searchsorted(self._starts[:-1], [number * self._length, (number + 1) * self._length])
        return int(last - first)


def _join(parts: Sequence[Mapping[str, torch.Tensor]], part: slice) -> dict[str, torch.Tensor]:
    """Return a part of the joined documents, padded without labels, and its number of tokens."""
    joined = {name: torch.cat([each[name] for each in parts])[part] for name in ("input_ids", "labels")}
    number = len(joined["labels"])
    room = part.stop - (part.start or 0) - number
    padding = {"input_ids": torch.zeros(room, dtype=torch.int64), "labels": torch.full((room,), IGNORED)}
    padded = {name: torch.cat([joined[name], padding[name]]) for name in padding}
    return {**padded, "num_tokens": torch.tensor(number)}
