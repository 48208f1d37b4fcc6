"""``set_epoch``, by which datasets learn the epoch: called for a dataset and all that it wraps."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import Dataset

_MOST_ITEMS = 64  # of a list or mapping that may hold datasets

_last: weakref.ref[EpochSetter] | None = None


def set_epoch(dataset: Any, epoch: int) -> None:
    """Call ``set_epoch`` of a dataset, of the datasets in its attributes, and of what these hold, such as a sampler.

    Hugging Face's streams, for one, keep the order of their first epoch if nothing calls it.
    """
    for part in _parts(dataset):
        if callable(getattr(type(part), "set_epoch", None)):
            part.set_epoch(epoch)


class EpochSetter:
    """Calls :func:`set_epoch` when the epoch of the samples changes.

    Two of them may share a dataset in one process, as training and validation do: each calls again after the other.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._epoch = -1

    def __call__(self, epoch: int) -> None:
        """Announce the epoch of the next samples."""
        global _last
        if epoch == self._epoch and _last is not None and _last() is self:
            return
        self._epoch, _last = epoch, weakref.ref(self)
        set_epoch(self._dataset, epoch)


def _parts(root: Any) -> Iterator[Any]:
    pending, seen = [root], set[int]()
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if isinstance(part, list | tuple):
            pending += part[:_MOST_ITEMS]
        elif isinstance(part, dict):
            pending += islice(part.values(), _MOST_ITEMS)
        elif part is root or isinstance(part, Dataset):
            pending += getattr(part, "__dict__", {}).values()
