"""Streaming datasets: S independent shards whose positions are saved with the state."""

from __future__ import annotations

import copy
import itertools
import json
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import IterableDataset

from paceline.core.errors import ConfigError, DataError
from paceline.data.order import derive_key
from paceline.data.samples import (
    Collate,
    MicroBatch,
    SampleCheck,
    SampleProblem,
    describe_ragged,
    preserve_rng_state,
    reference_of,
    seed_everything,
    set_epoch,
    to_device,
)

_SavedState = tuple[int, Any]
"""The number of the next item of a dataset, and the dataset's state before it."""

_ITEM = 17
"""Domain of the keys, distinct from those of ``paceline.data.order`` and ``samples``."""

_MOST_TURNS = 4
"""Micro-batches of items that a shard of an iterable holds, before it iterates on its own."""

_MOST_AHEAD = 64
"""Samples of a whole stream that are read at a time."""

_FORGETFUL = "BufferShuffledExamplesIterable"
"""The shuffle buffer of Hugging Face's streams, which their saved state leaves out."""


class StreamReader(Protocol):
    """Reads one shard of one epoch."""

    def __next__(self) -> Any:
        """Return the next sample; raise ``StopIteration`` at the end of the shard and ever after."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as JSON types, from which :meth:`load_state_dict` of a new reader continues.

        ``units``, if it is in it, counts what the samples so far hold: the stream has an attribute of that name, such
        as ``units = {"documents": 0}``, and ``paceline audit`` names their number.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to a position."""
        ...


@runtime_checkable
class ShardedStream(Protocol):
    """A dataset of S independent streams that together contain each sample once.

    The items of a shard must be a function of the arguments of :meth:`open`. Paceline seeds torch, ``random`` and numpy
    before each item, by (seed, epoch, shard, item), so a reader may use their randomness.
    """

    def open(self, shard: int, num_shards: int, epoch: int, seed: int) -> StreamReader:
        """Return a reader at the beginning of a shard."""
        ...


class IterableShards:
    """A torch ``IterableDataset`` as a :class:`ShardedStream`: shard k takes items k, k + S, k + 2 S, ...

    Shards that are opened before one of them is read share one iteration of the dataset, so a rank reads it once. A
    resumed rank continues from the dataset's ``state_dict``, as ``datasets`` and torchdata define it: of JSON types,
    after the last item of the latest iteration. Without one, or with a shuffle buffer of ``datasets``, which is not in
    it, the rank iterates again up to its position. Both are correct for any dataset whose ``__iter__`` yields the same
    items given the same random state.
    """

    def __init__(self, dataset: Iterable[Any]) -> None:
        self._dataset = dataset
        self._unread: weakref.ref[_Iteration] | None = None

    def open(self, shard: int, num_shards: int, epoch: int, seed: int) -> StreamReader:
        """See :class:`ShardedStream`."""
        key, shared = derive_key(seed, _ITEM, epoch), None if self._unread is None else self._unread()
        if shared is None or not shared.takes(shard, num_shards, key):
            shared = _Iteration(self._dataset, num_shards, key)
            self._unread = weakref.ref(shared)
        return _EveryNth(shared, shard)


def _is_forgetful(dataset: Any) -> bool:
    """Return whether a stream of ``datasets``, or a part of it, has a state without all that it needs."""
    inner = [getattr(dataset, name, None) for name in ("_ex_iterable", "ex_iterable")]
    inner += getattr(dataset, "ex_iterables", None) or []
    return type(dataset).__name__ == _FORGETFUL or any(_is_forgetful(each) for each in inner if each is not None)


def _copy_with_state(dataset: Any) -> Any:
    """Return a copy of a dataset, so that its state is that of one iteration; None if it has no exact state."""
    if not _has_state(dataset) or _is_forgetful(dataset):
        return None
    try:
        return copy.deepcopy(dataset)
    except TypeError:  # it holds an open file
        return None


class _Iteration:
    """One iteration of a dataset, whose items go to the readers of its shards, all drawn with keyed randomness."""

    def __init__(self, dataset: Iterable[Any], num_shards: int, key: int) -> None:
        self.num_shards = num_shards
        self.key = key
        self._dataset = dataset
        self._readers: weakref.WeakValueDictionary[int, _EveryNth] = weakref.WeakValueDictionary()
        self._drawn = 0
        self._most = 1  # items that one reader took before another one's turn
        self._last = -1
        self._taken = 0
        self._slower: _Iteration | None = None
        self._stateful = _copy_with_state(dataset)
        self._items: Iterator[Any] | None = None
        self._saved: list[_SavedState] = []

    def _begin(self) -> Iterator[Any]:
        """Iterate from the last saved state that is before the items of all readers.

        Raises:
            DataError: ``__iter__`` returns the dataset itself, so shards would share one position.
        """
        first = min(reader.index for reader in self._readers.values())
        known = [saved for reader in self._readers.values() if (saved := reader.saved) and saved[0] <= first]
        dataset = self._dataset if self._stateful is None else self._stateful
        if known and self._stateful is not None:
            self._drawn, state = max(known, key=itemgetter(0))
            self._stateful.load_state_dict(state)
        seed_everything(self.key)
        items = iter(dataset)
        if items is dataset:
            raise DataError(
                f"{type(dataset).__name__}.__iter__ returns the dataset itself, so it can be read only once "
                "at a time. Write __iter__ as a generator (with yield)."
            )
        return items

    def state_before(self, index: int) -> _SavedState | None:
        """Return the dataset's last known state before an item, and the number of the item that follows it."""
        newest = self._saved[-1][0] if self._saved else -1
        if self._stateful is not None and self._items is not None and newest < self._drawn <= index:
            state = self._stateful.state_dict()
            if json.loads(json.dumps(state, default=repr)) == state:
                self._saved.append((self._drawn, state))
        first = min((reader.index for reader in self._readers.values()), default=index)
        while len(self._saved) > 1 and self._saved[1][0] <= first:
            del self._saved[0]
        return next((saved for saved in reversed(self._saved) if saved[0] <= index), None)

    def takes(self, shard: int, num_shards: int, key: int) -> bool:
        """Return whether a reader of a shard can still join."""
        return self._items is None and (self.num_shards, self.key) == (num_shards, key) and shard not in self._readers

    def join(self, reader: _EveryNth) -> None:
        self._readers[reader.shard] = reader

    def draw_for(self, reader: _EveryNth) -> None:
        """Draw items until the reader has one; an item's key does not depend on the reader that draws it."""
        if self._items is None:
            self._items = self._begin()
        while not reader.items:
            index = self._drawn
            seed_everything(derive_key(self.key, index))
            item = next(self._items)
            self._drawn = index + 1
            owner = self._readers.get(index % self.num_shards)
            if owner is not None and index >= owner.index:
                owner.items.append(item)
                if owner is not reader and len(owner.items) > _MOST_TURNS * self._most:
                    self._drop(owner)

    def count(self, reader: _EveryNth) -> None:
        """Count the items that a reader takes in its turn."""
        self._taken = self._taken + 1 if reader.shard == self._last else 1
        self._last = reader.shard
        self._most = max(self._most, self._taken)

    def _drop(self, reader: _EveryNth) -> None:
        """Let a reader that falls behind, since its micro-batches are smaller, continue in another iteration."""
        if self._slower is None or not self._slower.takes(reader.shard, self.num_shards, self.key):
            self._slower = _Iteration(self._dataset, self.num_shards, self.key)
        del self._readers[reader.shard]
        reader.move(self._slower)


class _EveryNth:
    """Items ``shard``, ``shard + S``, ... of an iteration."""

    def __init__(self, iteration: _Iteration, shard: int) -> None:
        self.shard = shard
        self.items: deque[Any] = deque()
        self.saved: _SavedState | None = None  # before its position
        self._consumed = 0
        self.move(iteration)

    @property
    def index(self) -> int:
        """The number of the next item in the dataset."""
        return self.shard + self._consumed * self._iteration.num_shards

    def move(self, iteration: _Iteration) -> None:
        """Continue in another iteration."""
        self.items.clear()
        self._iteration = iteration
        iteration.join(self)

    def __next__(self) -> Any:
        self._iteration.draw_for(self)
        self._iteration.count(self)
        # As if it were just drawn: the collation of samples may be random.
        seed_everything(derive_key(self._iteration.key, self.index))
        self._consumed += 1
        return self.items.popleft()

    def state_dict(self) -> dict[str, Any]:
        self.saved = self._iteration.state_before(self.index) or self.saved
        return {"consumed": self._consumed} | ({} if self.saved is None else {"before": list(self.saved)})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._consumed = state["consumed"]
        self.saved = state.get("before")


def as_stream(dataset: Any) -> ShardedStream | None:
    """Return the dataset as a stream, or None for a map-style one."""
    # A map-style dataset may have an open() of its own.
    if not isinstance(dataset, IterableDataset) and callable(getattr(type(dataset), "__getitem__", None)):
        return None
    if isinstance(dataset, ShardedStream):
        return dataset
    return IterableShards(dataset) if isinstance(dataset, IterableDataset) or _has_state(dataset) else None


def _has_state(dataset: Any) -> bool:
    """Return whether this is an iterable whose position can be saved, as torchdata defines it."""
    return all(callable(getattr(dataset, name, None)) for name in ("__iter__", "state_dict", "load_state_dict"))


@dataclass
class _StreamShard:
    """A shard's reader, one micro-batch ahead of the trainer."""

    epoch: int
    step: int  # the step whose samples are in `ahead`
    handed_out: int
    reader: StreamReader
    state: dict[str, Any]  # the reader's, before it read `ahead`
    ahead: list[Any]

    def position(self) -> dict[str, Any]:
        """Return the position before ``step``, as JSON types."""
        return {"epoch": self.epoch, "step": self.step, "handed_out": self.handed_out, "reader": self.state}


def _can_continue(position: Mapping[str, Any], epoch: int, step: int) -> bool:
    """Return whether reading can continue from a position to the beginning of a step."""
    return bool(position["epoch"] == epoch and position["step"] <= step)


class StreamLoader:
    """Loads a stream: in each step every shard contributes G / S samples until it is exhausted.

    Sizes differ by at most one, the larger ones first. A shard's last micro-batch is its remainder; if that is smaller
    than ``min_microbatch_size``, it joins the previous one. Streams are read in this process, one micro-batch ahead, so
    that the end of an epoch is known before the next step.
    """

    def __init__(
        self,
        stream: ShardedStream,
        *,
        global_batch_size: int,
        num_microbatches: int,
        min_microbatch_size: int,
        seed: int,
        device: torch.device,
        collate: Collate,
        split: str = "train",
        check: bool = False,
    ) -> None:
        """Wrap a stream; with ``check``, its beginning is read once more, for :attr:`checked`.

        Raises:
            ConfigError: G is too small for S micro-batches of ``min_microbatch_size`` samples.
        """
        if global_batch_size < num_microbatches * min_microbatch_size:
            raise ConfigError(
                f"--global-batch-size {global_batch_size} is too small for {num_microbatches} micro-batches of at "
                f"least {min_microbatch_size} samples. Use --global-batch-size "
                f"{num_microbatches * min_microbatch_size} or more."
            )
        self._stream = stream
        self._sizes = [
            global_batch_size // num_microbatches + (k < global_batch_size % num_microbatches)
            for k in range(num_microbatches)
        ]
        self._min_microbatch_size = min_microbatch_size
        self._seed = seed
        self._device = device
        self._collate = collate
        self._split = split
        self._check = check
        self.checked: SampleCheck | None = None
        self._shards: dict[int, _StreamShard] = {}
        self._known: dict[int, Mapping[str, Any]] = {}  # positions before steps that were committed

    def fetch(self, epoch: int, step: int, microbatches: range) -> list[MicroBatch]:
        """Return those of ``microbatches`` that have samples left; steps must be in order.

        A shard that this rank did not read in the previous step continues from its known position, or else from its
        beginning.

        Raises:
            DataError: the stream fails, its samples do not fit together, or a whole shard has fewer than
                ``min_microbatch_size`` samples.
        """
        self._shards = {k: s for k, s in self._shards.items() if k in microbatches}
        micro_batches = []
        with preserve_rng_state():
            if self._check and self.checked is None:
                # First: some iterators end as soon as the dataset gives another one.
                first_shard = self._open(0, 0)
                self._read_ahead(0, first_shard)
                self.checked = SampleCheck(reference_of(first_shard.ahead), len(first_shard.ahead))
                del first_shard
            # All are opened before one is read: those of an IterableDataset then share its iteration.
            opened = {k: self._open(k, epoch, step) for k in microbatches if not self._is_at(k, epoch, step)}
            for k in microbatches:
                if k in opened:
                    self._shards[k] = self._begin(k, opened[k], step)
                shard = self._shards[k]
                # The step is fetched again if it is not committed.
                self._known[k] = shard.position()
                first, samples, units = shard.handed_out, shard.ahead, shard.state.get("units", 0)
                if not samples:
                    shard.step += 1
                    continue
                self._advance(k, shard)
                batch = to_device(self._collate_samples(k, first, samples), self._device)
                micro_batches.append(MicroBatch(k, batch, len(samples), shard.state.get("units", 0) - units))
        return micro_batches

    def exhausted(self, microbatches: range) -> bool:
        """Return whether these micro-batches, as of the last :meth:`fetch`, have no samples left in the epoch."""
        return not any(self._shards[k].ahead for k in microbatches)

    @property
    def reading(self) -> tuple[int, ...]:
        """The shards for which this rank has readers."""
        return tuple(self._shards)

    def positions(self, epoch: int, step: int, microbatches: Iterable[int]) -> dict[str, Any]:
        """Return the positions from which these shards can be read to the beginning of a step, by shard (as text).

        The values are JSON types; shards without a known position are omitted and read from the beginning. A reader
        ahead of ``step``, because the step failed, counts with its earlier position.
        """
        positions: dict[str, Any] = {}
        for k in microbatches:
            known = [self._shards[k].position()] if k in self._shards else []
            known += [dict(self._known[k])] if k in self._known else []
            positions |= {str(k): candidate for candidate in known[::-1] if _can_continue(candidate, epoch, step)}
        return positions

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Replace all known positions, including those of shards that this rank does not read."""
        self._shards.clear()
        self._known = {int(k): state for k, state in states.items()}

    def add_positions(self, states: Mapping[str, Any]) -> None:
        """Add positions from other ranks; this rank's readers keep theirs."""
        self._known |= {int(k): state for k, state in states.items()}

    def close(self) -> None:
        """Drop all readers."""
        self._shards.clear()

    def _is_at(self, k: int, epoch: int, step: int) -> bool:
        shard = self._shards.get(k)
        return shard is not None and (shard.epoch, shard.step) == (epoch, step)

    def _open(self, k: int, epoch: int, step: int = 0) -> _StreamShard:
        """Return shard ``k`` at its known position before a step, or else at its beginning; nothing is read."""
        set_epoch(self._stream, epoch)
        reader = self._stream.open(k, len(self._sizes), epoch, self._seed)
        known = self._known.get(k)
        if known is None or not _can_continue(known, epoch, step):
            return _StreamShard(epoch, 0, 0, reader, reader.state_dict(), [])
        reader.load_state_dict(known["reader"])
        return _StreamShard(epoch, known["step"], known["handed_out"], reader, known["reader"], [])

    def _begin(self, k: int, shard: _StreamShard, step: int) -> _StreamShard:
        """Read a shard that was opened up to the samples of a step."""
        is_beginning = shard.step == shard.handed_out == 0
        self._read_ahead(k, shard)
        if is_beginning:
            first = k == shard.epoch == 0 and self.checked is not None
            if first and self.checked and reference_of(shard.ahead) != self.checked.reference:
                self.checked = replace(self.checked, problem=SampleProblem("reshuffled-stream", ""))
            if 0 < len(shard.ahead) < self._min_microbatch_size:
                raise DataError(
                    f"{self._split} stream, shard {k} contains only {len(shard.ahead)} samples, but a "
                    f"shard needs at least {self._min_microbatch_size}. Give more data, use fewer --microbatches, or "
                    "lower min_microbatch_size in the task."
                )
        while shard.step < step:
            self._advance(k, shard)
        return shard

    def _advance(self, k: int, shard: _StreamShard) -> None:
        """Advance past the prefetched samples; a remainder that is too small joins them."""
        samples = shard.ahead
        shard.state = shard.reader.state_dict()
        shard.handed_out += len(samples)
        shard.step += 1
        self._read_ahead(k, shard)
        if len(shard.ahead) < self._min_microbatch_size:
            samples += shard.ahead  # in place: this is the list that fetch() is about to collate
            shard.handed_out += len(shard.ahead)
            shard.state = shard.reader.state_dict()
            shard.ahead = []

    def _read_ahead(self, k: int, shard: _StreamShard) -> None:
        shard.ahead = []
        try:
            for number in range(shard.handed_out, shard.handed_out + self._sizes[k]):
                seed_everything(derive_key(self._seed, _ITEM, shard.epoch, k, number))
                shard.ahead.append(next(shard.reader))
        except StopIteration:
            return
        except DataError:
            raise
        except Exception as error:
            where = f"{self._split} stream, shard {k}, item {number}"
            raise DataError(f"{where} cannot be read: {type(error).__name__}: {error}") from error

    def _collate_samples(self, k: int, first: int, samples: list[Any]) -> Any:
        try:
            return self._collate(samples)
        except Exception as error:
            items = range(first, first + len(samples))
            ragged = describe_ragged(items, samples) or f"items {items[0]} ... {items[-1]} cannot be collated:"
            raise DataError(f"{self._split} stream, shard {k}: {ragged} {type(error).__name__}: {error}") from error


def read_whole(dataset: Any, split: str, seed: int) -> Any:
    """Return all samples of a stream in a fixed order, as a list for evaluations; other datasets as they are.

    Raises:
        DataError: the stream fails.
    """
    stream = as_stream(dataset)
    if stream is None:
        return dataset
    loader = StreamLoader(
        stream,
        global_batch_size=_MOST_AHEAD,
        num_microbatches=1,
        min_microbatch_size=1,
        seed=seed,
        device=torch.device("cpu"),
        collate=list,
        split=split,
    )
    steps = (loader.fetch(0, step, range(1)) for step in itertools.count())
    return [sample for (found,) in itertools.takewhile(bool, steps) for sample in found.batch]
