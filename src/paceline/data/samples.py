"""Read samples in this process or in workers, each sample under its own random key."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import pickle
import random
import time
import traceback
import warnings
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from paceline.core.errors import DataError
from paceline.core.task import Task
from paceline.core.task_loading import name_in_session
from paceline.data.order import derive_key
from paceline.data.train_val_split import Split
from paceline.data.workers import (
    DataWorkers,
    ReadError,
    SendFailure,
    advise_on_open_files,
    is_out_of_files,
)

_log = logging.getLogger(__name__)

# --- Types shared by all loaders ---


Indices = npt.NDArray[np.int64]
Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The data of one micro-batch in one step.

    Attributes:
        index: the micro-batch's; in an evaluation, the evaluation batch's.
        batch: the result of ``collate``, on the device.
        checksum: :func:`checksum` of the fetched sample numbers, for the ledger.
    """

    index: int
    batch: Any
    num_samples: int
    checksum: int


class Loader(Protocol):
    """Loads a rank's micro-batches. Any (epoch, step) may come first; sequential access is fastest.

    Attributes:
        checked: the last check of the dataset; None before the first one.
    """

    checked: SampleCheck | None

    def fetch(self, epoch: int, step: int, microbatches: range) -> list[MicroBatch]:
        """Return those of ``microbatches`` that are present in this step, in order.

        Raises:
            DataError: a sample cannot be read or does not fit its batch.
        """
        ...

    def close(self) -> None:
        """End worker processes; may be called twice."""
        ...


def checksum(numbers: Indices) -> int:
    """Return the CRC-32 of sample numbers as little-endian int64.

    The numbers are those within the split, before they are mapped to the dataset, so that an audit needs only the
    order.
    """
    return zlib.crc32(numbers.astype("<i8", copy=False).tobytes())


# --- Moving batches to the device ---


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a batch, through mappings, sequences and dataclasses; leave other values.

    Copies to a GPU go through pinned memory and are asynchronous.
    """
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor | PackedSequence):  # the sizes of a packed sequence stay on the CPU
        if device.type == "cuda" and not batch.is_cuda and not batch.is_pinned():
            batch = batch.pin_memory()
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return type(batch)({key: to_device(value, device) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple | list):
        values = [to_device(value, device) for value in batch]
        # Other tuples are named ones, which take their fields one by one.
        return type(batch)(values) if type(batch) in (tuple, list) else type(batch)(*values)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = (f.name for f in dataclasses.fields(batch) if f.init)
        return dataclasses.replace(batch, **{f: to_device(getattr(batch, f), device) for f in fields})
    return batch


# --- Tensor-backed datasets, indexed a batch at a time ---


def without_subsets(dataset: Any) -> tuple[Any, Indices | None]:
    """Unwrap torch's ``Subset``: return the inner dataset and each sample's number in it (None: the same)."""
    numbers: Indices | None = None
    # Only Subset itself: a subclass may do more in __getitem__.
    while type(dataset) is Subset:
        outer = np.asarray(dataset.indices, dtype=np.int64)
        numbers = outer if numbers is None else outer[numbers]
        dataset = dataset.dataset
    return dataset, numbers


def is_tensor_backed(dataset: Any, collate: Collate) -> bool:
    """Return whether batches are plain indexing: a ``TensorDataset`` (or a Subset of one), default collate."""
    if getattr(collate, "__func__", collate) not in (Task.collate, default_collate):
        return False
    inner = type(without_subsets(dataset)[0])
    return issubclass(inner, TensorDataset) and inner.__getitem__ is TensorDataset.__getitem__


class RowNumbers:
    """Maps numbers within a split to numbers in the innermost dataset, through an index map and Subsets."""

    def __init__(self, index_map: Split | None, subset: Indices | None) -> None:
        self._index_map = index_map
        self._subset = subset

    def __call__(self, numbers: Indices) -> Indices:
        if self._index_map is not None:
            numbers = self._index_map(numbers)
        return numbers if self._subset is None else self._subset[numbers]


ALIGNMENT_BYTES = {"cpu": 64, "cuda": 512}
"""Alignment of the memory that torch allocates, by device."""


class TensorGather:
    """Gathers rows of tensors by number: one ``index_select`` per tensor, then a copy to the device.

    Small tensors live on the GPU. Larger ones are gathered on the CPU into pinned memory and copied asynchronously, so
    that a gather overlaps with the previous step.
    """

    def __init__(self, dataset: Any, *, device: torch.device, index_map: Split | None) -> None:
        inner, subset = without_subsets(dataset)
        self._to_rows = RowNumbers(index_map, subset)
        self._tensors: tuple[torch.Tensor, ...] = inner.tensors
        self._device = device
        if device.type == "cuda":
            num_bytes = sum(t.numel() * t.element_size() for t in self._tensors)
            if num_bytes <= torch.cuda.mem_get_info(device)[0] // 8:
                self._tensors = tuple(t.to(device) for t in self._tensors)
        self._tensor_device = self._tensors[0].device

    def locate(self, numbers: Indices) -> torch.Tensor:
        """Map numbers within the split to row numbers, int64, on the tensors' device."""
        rows: torch.Tensor = to_device(torch.from_numpy(self._to_rows(numbers)), self._tensor_device)
        return rows

    def take(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows of each tensor, on the device; a list, as ``default_collate`` makes of tuples."""
        if self._tensor_device.type == self._device.type:
            return [tensor.index_select(0, rows) for tensor in self._tensors]
        taken = []
        for tensor in self._tensors:
            pinned = torch.empty((len(rows), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
            # torch keeps pinned memory until a copy from it is done, also of a tensor that is gone.
            taken.append(torch.index_select(tensor.detach(), 0, rows, out=pinned).to(self._device, non_blocking=True))
        return taken

    def take_each(self, rows: torch.Tensor, sizes: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
        """Return consecutive parts of the rows, of these sizes: for each tensor its parts, in memory aligned as new.

        Kernels choose their code, and so the bits of their results, by the alignment of their operands (oneMKL's matrix
        products do). A view into one gather starts where the part before it ends, and those parts differ with the
        number of ranks. So parts are views only if each row fills whole units of the allocator's alignment; the rule
        does not depend on the sizes, because compiled code can differ for views and other tensors.
        """
        # One split per tensor, not one slice per part: a slice costs 2 us.
        return [
            parts if self._fills_units(tensor) else tuple(part.clone() for part in parts)
            for tensor in self.take(rows)
            for parts in (tensor.split_with_sizes(sizes),)
        ]

    def _fills_units(self, tensor: torch.Tensor) -> bool:
        row_bytes = tensor[0].numel() * tensor.element_size()
        return row_bytes % ALIGNMENT_BYTES.get(self._device.type, 1) == 0


# --- Reading and collating samples with randomness keyed by sample, in a worker or this process ---
#
# The generators of torch, ``random`` and numpy are seeded from (seed, epoch, sample) before each ``__getitem__``, so
# augmentation is equal for any number of workers, micro-batches or processes.


_SAMPLE = 16
"""Domain of the keys, distinct from those of ``paceline.data.order``."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A request for the samples of one micro-batch.

    Attributes:
        epoch: keys the randomness.
        numbers: the samples' numbers within the split, for the ledger.
        rows: their numbers in the dataset.
        draws: their positions in the epoch, which key the randomness as well; None where a sample occurs once.
    """

    epoch: int
    numbers: Indices
    rows: Indices
    draws: Indices | None


@dataclass(frozen=True, slots=True)
class CheckRequest(ReadRequest):
    """A request to read samples twice, and to compare them.

    Attributes:
        reference: the rows of samples that every process reads.
    """

    reference: Indices


@dataclass(frozen=True)
class ReadFailure:
    """The result of a micro-batch that could not be read, sent from a worker in place of the batch."""

    message: str
    cause: ReadError | None = None


class SampleReader:
    """Turns requests into batches. It returns a :class:`ReadFailure` instead of raising an ``Exception``.

    A dataset with ``__getitems__`` (PyTorch's convention for batched reading) is read a micro-batch at a time, with
    randomness keyed by the micro-batch's first sample.
    """

    def __init__(self, dataset: Any, *, collate: Collate, seed: int, split: str) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed
        self._split = split
        self._set_epoch = EpochSetter(dataset)
        self._batched = callable(getattr(type(dataset), "__getitems__", None))

    def __getitem__(self, request: ReadRequest) -> Any:
        """Return the collated batch, or a :class:`ReadFailure`; for a :class:`CheckRequest` a :class:`SampleCheck`."""
        if isinstance(request, CheckRequest):
            return self._check(request)
        rows = request.rows.tolist()
        keys = [(row,) for row in rows] if request.draws is None else [*zip(rows, request.draws.tolist(), strict=True)]
        samples: list[Any] = []
        try:
            self._set_epoch(request.epoch)
            if self._batched:
                seed_everything(derive_key(self._seed, _SAMPLE, request.epoch, *keys[0]))
                samples = list(self._dataset.__getitems__(rows))
            else:
                for row, key in zip(rows, keys, strict=True):
                    seed_everything(derive_key(self._seed, _SAMPLE, request.epoch, *key))
                    samples.append(self._dataset[row])
        except Exception as error:
            which = _span(rows) if self._batched else f"sample {rows[len(samples)]}"
            return self._failure(f"{which} cannot be read", error)
        if len(samples) != len(rows):
            message = f"__getitems__ returned {len(samples)} samples for {len(rows)} numbers"
            return ReadFailure(f"{self._split} dataset, {_span(rows)}: {message}.")
        try:
            return self._collate(samples)
        except Exception as error:
            ragged = describe_ragged(rows, samples)
            if ragged is not None:
                return self._failure(f"{ragged} Make them equal, or define collate() in the task", error)
            return self._failure(f"{_span(rows)} cannot be collated", error)

    def _check(self, request: CheckRequest) -> SampleCheck:
        def read(epoch: int, row: int) -> Any:
            self._set_epoch(epoch)
            seed_everything(derive_key(self._seed, _SAMPLE, epoch, row))
            return self._dataset.__getitems__([row]) if self._batched else self._dataset[row]

        try:
            return check_samples(read, request.epoch, request.rows.tolist(), request.reference.tolist())
        except Exception:
            return SampleCheck(0)  # the error, if it is one of the dataset, comes again with the batch

    def _failure(self, what: str, error: Exception) -> ReadFailure:
        message = f"{self._split} dataset, {what}: {type(error).__name__}: {error}"
        return ReadFailure(message, ReadError(traceback.format_exc()))


def describe_ragged(rows: Sequence[int], samples: Sequence[Any]) -> str | None:
    """Describe which samples have other shapes than the rest; None if all shapes are equal."""
    by_shape: dict[Any, list[int]] = {}
    for row, sample in zip(rows, samples, strict=True):
        by_shape.setdefault(_shape(sample), []).append(row)
    if len(by_shape) == 1:
        return None
    # The rarest shape first, because it is the likely mistake.
    parts = [
        f"{_named(alike)} {'has' if len(alike) == 1 else 'have'} {shape}"
        for shape, alike in sorted(by_shape.items(), key=lambda item: len(item[1]))[:4]
    ]
    return "samples of one batch have different shapes: " + "; ".join(parts) + "."


def _named(rows: list[int]) -> str:
    if len(rows) == 1:
        return f"sample {rows[0]}"
    return f"samples {', '.join(map(str, rows[:3]))}" + (f" and {len(rows) - 3} more" if len(rows) > 3 else "")


def _span(rows: Sequence[int]) -> str:
    return f"sample {rows[0]}" if len(rows) == 1 else f"samples {rows[0]} ... {rows[-1]} ({len(rows)} of them)"


def _shape(sample: Any) -> str:
    """Format the shapes in a sample: "((1, 28, 28), int)"."""
    if isinstance(sample, torch.Tensor | np.ndarray):
        return str(tuple(sample.shape))
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key}: {_shape(value)}" for key, value in sample.items()) + "}"
    if isinstance(sample, tuple | list):
        return "(" + ", ".join(_shape(value) for value in sample) + ")"
    return type(sample).__name__


def seed_everything(key: int) -> None:
    """Seed the CPU generators of torch, ``random`` and numpy with 64 bits (numpy takes 32)."""
    # Not torch.manual_seed: that also queues a CUDA seed, with a stack trace, for every sample.
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Read samples in the trainer's process as a worker would, and restore the RNG state afterwards.

    Workers run torch on one thread, and a sum over two threads can have other bits.
    """
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    threads = torch.get_num_threads()
    if threads != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads != 1:
            torch.set_num_threads(threads)
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


# --- Map-style datasets read by worker processes, a few steps ahead ---


class SampleSource:
    """Reads requests in order, in this process or in workers of torch's ``DataLoader``.

    Workers are forked from multiprocessing's fork server. A plain fork would copy the locks of threads that do not
    exist in the child (gloo, the checkpoint writer, OpenMP) and an unusable CUDA context; a spawned process would
    import torch again, which costs a second and more memory per worker. The dataset is pickled to each worker; its
    torch tensors are shared, numpy arrays are copied.
    """

    def __init__(
        self, dataset: Any, *, seed: int, device: torch.device, workers: int, collate: Collate, split: str
    ) -> None:
        self._reader = SampleReader(dataset, collate=collate, seed=seed, split=split)
        self._dataset = dataset
        self._collate = collate
        self._device = device
        self._split = split
        self._num_workers = workers
        self._workers: DataWorkers | None = None
        self._requests: Iterator[ReadRequest] = iter(())
        self._pending: deque[ReadRequest] = deque()
        self._ahead = 0
        self._deaths = 0  # of workers since the last batch

    def start(self, requests: Iterator[ReadRequest], *, ahead: int) -> None:
        """Begin a sequence of requests, and drop what was prefetched for the previous one.

        Args:
            requests: may be endless.
            ahead: minimum number of requests in flight.
        """
        self._pending.clear()
        self._requests = requests
        self._ahead = ahead
        if self._num_workers == 0:
            return
        if self._workers is None:
            name = name_in_session(without_subsets(self._dataset)[0], self._collate)
            if name is not None:
                raise DataError(
                    f"{name}, which the {self._split} dataset needs, was defined in a notebook's cell or an "
                    "interactive session, which data workers cannot import. Write it into a file and import it, or use "
                    "--num-workers 0 (num_workers=0)."
                )
            self._workers = DataWorkers(self._reader, self._num_workers, ahead=ahead, pin=self._device.type == "cuda")
        try:
            with warnings.catch_warnings():
                # torch advises to fork; the error below has better advice.
                warnings.filterwarnings("ignore", message="Got pickle error")
                self._workers.start(self._recorded(requests))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise DataError(
                f"the {self._split} dataset cannot be sent to worker processes: {error}. Open files and "
                "connections in __getitem__ instead of __init__, avoid lambdas, or use --num-workers 0."
            ) from error

    def next(self) -> tuple[ReadRequest, Any]:
        """Return the next request and its batch, on the device.

        Raises:
            DataError: a sample cannot be read or sent, samples do not fit together, or a worker died twice without a
                batch.
            StopIteration: there are no more requests.
        """
        if self._workers is None:
            request = next(self._requests)
            with preserve_rng_state():
                batch = self._reader[request]
        else:
            batch = self._next_from_workers(self._workers)
            request = self._pending.popleft()
            self._deaths = 0
        if isinstance(batch, ReadFailure):
            raise DataError(batch.message) from batch.cause
        if isinstance(batch, SendFailure):
            what = f"{self._split} dataset, {_span(request.rows.tolist())} cannot be sent by a data worker"
            raise DataError(f"{what}: {batch.message}") from batch.cause
        return request, to_device(batch, self._device)

    def close(self) -> None:
        """End the workers; may be called twice."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _recorded(self, requests: Iterator[ReadRequest]) -> Iterator[ReadRequest]:
        for request in requests:
            self._pending.append(request)
            yield request

    def _next_from_workers(self, workers: DataWorkers) -> Any:
        try:
            return next(workers)
        except (RuntimeError, OSError, EOFError) as error:  # whichever end of the pipe notices first
            rows = self._pending[0].rows
            killed, failed = workers.any_killed(), workers.any_failed()
            if not (killed or failed) and (is_out_of_files(error) or not isinstance(error, RuntimeError)):
                # With no room for a file, either end may close a connection.
                raise DataError(
                    f"{self._split} dataset, {_span(rows.tolist())} did not arrive from their data worker: {error!r}. "
                    f"{advise_on_open_files()}"
                ) from error
            self._deaths += 1
            if self._deaths > 1 or not killed:
                advice = "The usual cause is lack of memory: use fewer --num-workers, or --num-workers 0."
                if failed:
                    advice = (
                        "A dataset that cannot be pickled, or a script without if __name__ == '__main__':, is the "
                        "likely cause: use --num-workers 0."
                    )
                raise DataError(
                    f"a worker process of the {self._split} dataset died; samples {rows[0]} ... {rows[-1]} were "
                    f"due. See above for its own message. {advice} ({error})"
                ) from error
        # Not while the error is handled: its frames would keep the old workers.
        return self._next_from_new_workers()

    def _next_from_new_workers(self) -> Any:
        """Ask new workers for all that the old ones have not returned: the kernel kills one where memory is short."""
        first = self._pending[0].rows
        _log.warning(
            "a worker process of the %s dataset was killed; new ones read samples %d ... again.", self._split, first[0]
        )
        self.close()
        self.start(itertools.chain(tuple(self._pending), self._requests), ahead=self._ahead)
        assert self._workers is not None
        return self._next_from_workers(self._workers)


# --- Whether a dataset is a function of sample number and epoch: some samples are read twice, in two orders ---
#
# Each process reads samples of its own, in its own order. A dataset that remembers what it read, or draws from a
# generator of its own, then yields other samples on another number of processes, and after a restart.


_BUDGET_S = 0.2  # then no further sample is read for the check
MOST_SAMPLES = 8
"""The samples that one check compares."""

ReadSample = Callable[[int, int], Any]
"""Reads, for an epoch, the sample in a row of the dataset, with the random keys of both."""


class SampleProblem(NamedTuple):
    """Why samples differ that should be the same.

    Attributes:
        kind: what they depend on: draws that no key seeds, draws that the dataset keeps, a stream's own order.
        what: which samples; "" for the first ones of a stream.
    """

    kind: Literal["unkeyed-randomness", "cached-randomness", "reshuffled-stream"]
    what: str


@dataclass(frozen=True)
class SampleCheck:
    """What a check of the dataset found.

    Attributes:
        reference: a number in [1, 2**48] for the bits of some samples that every process reads.
        num_samples: the samples that were compared; 0 if they could not be.
        problem: what differed; None if nothing did.
    """

    reference: int
    num_samples: int = 0
    problem: SampleProblem | None = None
    seconds: float = 0.0


def check_samples(read: ReadSample, epoch: int, rows: Sequence[int], reference: Sequence[int]) -> SampleCheck:
    """Read samples in order, and then in reverse order, and compare them.

    Args:
        epoch: the epoch of the samples that are compared.
        reference: rows that every process reads, as in epoch 0, for :attr:`SampleCheck.reference`.
    """
    started = time.monotonic()
    first: dict[int, tuple[bytes, dict[str, bytes]]] = {}
    for row in dict.fromkeys(rows):
        if len(first) >= 2 and time.monotonic() - started > _BUDGET_S:
            break
        first[row] = _observe(read, epoch, row)
    problem = None
    for row in reversed(first):
        sample, generators = _observe(read, epoch, row)
        if sample != first[row][0]:
            what = f"sample {row} had other values when it was read again in another order"
            problem = SampleProblem("unkeyed-randomness", what)
        elif generators != first[row][1]:
            problem = SampleProblem("cached-randomness", f"sample {row}")
        if problem is not None:
            break
    number = reference_of(read(0, row) for row in reference)
    return SampleCheck(number, len(first), problem, time.monotonic() - started)


def reference_of(samples: Iterable[Any]) -> int:
    """Return the :attr:`SampleCheck.reference` of some samples."""
    digest = hashlib.blake2b(digest_size=6)
    for sample in samples:
        digest.update(digest_of(sample))
    return int.from_bytes(digest.digest(), "little") + 1


def _observe(read: ReadSample, epoch: int, row: int) -> tuple[bytes, dict[str, bytes]]:
    """Read a sample; return a digest of its values, and those of the random generators afterwards."""
    return digest_of(read(epoch, row)), generator_digests()


def generator_digests() -> dict[str, bytes]:
    """Return digests of the states of the global random generators, by name."""
    numpy_state = np.random.get_state(legacy=False)
    states = {"torch": torch.get_rng_state(), "random": repr(random.getstate()), "numpy": numpy_state}
    return {name: digest_of(state) for name, state in states.items()}


def digest_of(value: Any) -> bytes:
    """Return a digest of the bits in a sample or batch: tensors, arrays, images, numbers, text, and nested ones."""
    digest = hashlib.blake2b(digest_size=16)
    _update(digest, value)
    return digest.digest()


def _update(digest: Any, value: Any) -> None:
    digest.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            value = value.to_dense()
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        digest.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray | np.generic):
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes())
    elif isinstance(value, bool | int | float | complex | str | bytes | None):
        digest.update(repr(value).encode())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            digest.update(repr(key).encode())
            _update(digest, item)
    elif isinstance(value, list | tuple):
        for item in value:
            _update(digest, item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _update(digest, getattr(value, field.name, None))
    elif callable(getattr(value, "tobytes", None)):  # an image
        digest.update(value.tobytes())


# --- ``set_epoch``, by which datasets learn the epoch: called for a dataset and all that it wraps ---


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
