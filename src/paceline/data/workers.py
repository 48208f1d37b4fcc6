"""Map-style datasets read by worker processes, a few steps ahead."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.data.device import to_device
from paceline.data.microbatch import Collate, MicroBatch, checksum
from paceline.data.order import DataOrder, Split
from paceline.data.samples import Failure, Request, SampleReader, undisturbed
from paceline.data.tensors import RowNumbers, without_subsets
from paceline.errors import DataError
from paceline.stacks import offer_stacks
from paceline.task import Task, load_task_class


class SampleSource:
    """Reads requests in order, in this process or by workers through torch's ``DataLoader``.

    Workers are forked from multiprocessing's fork server. A plain fork copies the locks of threads that
    do not exist in the child (gloo, the checkpoint writer, OpenMP) and a CUDA context that is useless
    there; a spawned process imports torch anew, which costs each worker a second and its own memory.
    The dataset is pickled to each worker; torch tensors in it are shared, numpy arrays are copied.
    """

    def __init__(
        self, dataset: Any, *, seed: int, device: torch.device, workers: int, collate: Collate, split: str
    ) -> None:
        self._reader = SampleReader(dataset, collate=collate, seed=seed, split=split)
        self._device = device
        self._split = split
        self._num_workers = workers
        self._workers: _Workers | None = None
        self._requests: Iterator[Request] = iter(())
        self._pending: deque[Request] = deque()

    def start(self, requests: Iterator[Request], *, ahead: int) -> None:
        """Begin a sequence of requests; what was read ahead of another one is dropped.

        Args:
            requests: may be endless.
            ahead: how many to keep in flight, at least.
        """
        self._pending.clear()
        if self._num_workers == 0:
            self._requests = requests
            return
        if self._workers is None:
            self._workers = _Workers(
                self._reader, self._num_workers, ahead=ahead, pin=self._device.type == "cuda"
            )
        try:
            with warnings.catch_warnings():
                # torch's advice to fork after all; the error below says what helps.
                warnings.filterwarnings("ignore", message="Got pickle error")
                self._workers.start(self._recorded(requests))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise DataError(
                f"the {self._split} dataset cannot be sent to worker processes: {error}. Open files and "
                "connections in __getitem__ instead of __init__, avoid lambdas, or use --workers 0."
            ) from error

    def next(self) -> tuple[Request, Any]:
        """The next request and its batch, on the device.

        Raises:
            DataError: a sample cannot be read, samples do not fit together, or a worker died.
            StopIteration: there are no more requests.
        """
        if self._workers is None:
            request = next(self._requests)
            with undisturbed():
                batch = self._reader[request]
        else:
            batch = self._next_from_workers(self._workers)
            request = self._pending.popleft()
        if isinstance(batch, Failure):
            raise DataError(batch.message) from batch.cause
        return request, to_device(batch, self._device)

    def close(self) -> None:
        """End the workers; may be called twice."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _recorded(self, requests: Iterator[Request]) -> Iterator[Request]:
        for request in requests:
            self._pending.append(request)
            yield request

    def _next_from_workers(self, workers: _Workers) -> Any:
        try:
            return next(workers)
        except (RuntimeError, OSError, EOFError) as error:  # whichever end of the pipe notices first
            rows = self._pending[0].rows
            raise DataError(
                f"a worker process of the {self._split} dataset died; samples {rows[0]} ... {rows[-1]} were "
                "due. Its own message, if any, stands above; often memory ran out: use fewer --workers, or "
                f"--workers 0. ({error})"
            ) from error


class SampleLoader:
    """Loads any map-style dataset, a micro-batch at a time."""

    def __init__(
        self,
        dataset: Any,
        order: DataOrder,
        *,
        seed: int,
        device: torch.device,
        workers: int,
        collate: Collate,
        index_map: Split | None,
        split: str,
    ) -> None:
        inner, subset = without_subsets(dataset)
        self._order = order
        self._rows = RowNumbers(index_map, subset)
        self._source = SampleSource(
            inner, seed=seed, device=device, workers=workers, collate=collate, split=split
        )
        self._due: tuple[int, int, range] | None = None

    def fetch(self, epoch: int, step: int, shards: range) -> list[MicroBatch]:
        """See :class:`Loader`; another step or other shards than the next ones start reading anew."""
        if not shards:
            return []  # a spare's
        if (epoch, step, shards) != self._due:
            self._source.start(self._from(epoch, step, shards), ahead=2 * len(shards))
        # Not known to be due until all of it has been read.
        self._due = None
        micro_batches = []
        for shard in shards[: len(self._order.shard_bounds(step)[shards.start : shards.stop : shards.step])]:
            request, batch = self._source.next()
            micro_batches.append(MicroBatch(shard, batch, len(request.numbers), checksum(request.numbers)))
        last = step + 1 == self._order.steps_per_epoch
        self._due = (epoch + 1, 0, shards) if last else (epoch, step + 1, shards)
        return micro_batches

    def close(self) -> None:
        """End the workers; may be called twice."""
        self._source.close()

    def _from(self, epoch: int, step: int, shards: range) -> Iterator[Request]:
        """Every micro-batch of these shards from a step on, without end."""
        for e in itertools.count(epoch):
            for t in range(step if e == epoch else 0, self._order.steps_per_epoch):
                for start, stop in self._order.shard_bounds(t)[shards.start : shards.stop : shards.step]:
                    numbers = self._order.indices(e, start, stop)
                    yield Request(e, numbers, self._rows(numbers))


_open: tuple[weakref.ref[_Workers], ...] = ()


def data_workers() -> list[int]:
    """The process ids of this process's data workers; may be asked from any thread."""
    return [pid for reference in _open if (workers := reference()) is not None for pid in workers.pids]


class _Workers:
    """A ``DataLoader`` whose persistent workers answer one sequence of requests after another."""

    def __init__(self, reader: SampleReader, num_workers: int, *, ahead: int, pin: bool) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["paceline.data.fork_server"])
        self._sequence = _Sequence()
        self._loader: DataLoader[Any] = DataLoader(
            _Parcel(reader),  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._sequence,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            pin_memory=pin,
            multiprocessing_context=context,
            worker_init_fn=_prepare_worker,
            prefetch_factor=max(2, -(-ahead // num_workers)),
            persistent_workers=True,
            # Else every new sequence would draw a number from the trainer's generator.
            generator=torch.Generator(),
        )
        self._iterator: Iterator[Any] = iter(())
        self._processes: set[Any] = set()
        self._end = weakref.finalize(self, _kill, self._processes)
        self.pids: tuple[int, ...] = ()
        global _open
        _open = (*(reference for reference in _open if reference() is not None), weakref.ref(self))

    def start(self, requests: Iterator[Request]) -> None:
        self._sequence.requests = requests
        before = set(multiprocessing.active_children())
        self._iterator = iter(self._loader)
        self._processes |= set(multiprocessing.active_children()) - before
        self.pids = tuple(process.pid for process in self._processes)

    def __next__(self) -> Any:
        return next(self._iterator)

    def close(self) -> None:
        # The last references: the DataLoader's iterator ends its workers when it is collected.
        del self._iterator, self._loader
        self._end()
        self.pids = ()


class _Sequence:
    """The sampler: what a ``DataLoader`` iterates when it starts or starts anew."""

    requests: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.requests


class _Parcel:
    """The reader on its way to a worker, behind the task files it was made of.

    A task from a file is no module that a worker could import by name, so its file is run there first;
    ``pickle`` rebuilds arguments in their order.
    """

    def __init__(self, reader: SampleReader) -> None:
        self._reader = reader

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (_TaskFiles(), self._reader)


class _TaskFiles:
    def __reduce__(self) -> tuple[Any, ...]:
        return _import_task_files, (loaded_task_files(),)


def loaded_task_files() -> list[str]:
    """One ``file.py:Name`` for each file that tasks were loaded from."""
    specs = []
    for module in list(sys.modules.values()):
        if module.__name__.startswith("paceline_task_"):
            values = [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, Task)]
            names = [v.__name__ for v in values if v.__module__ == module.__name__]
            specs += [f"{module.__file__}:{name}" for name in names[:1]]
    return specs


def _import_task_files(specs: list[str]) -> None:
    for spec in specs:
        load_task_class(spec)


def _unpack(task_files: None, reader: SampleReader) -> SampleReader:
    return reader


def _as_it_is(batch: Any) -> Any:
    return batch


def _prepare_worker(worker: int) -> None:
    """Leave it to the trainer when to end: Ctrl-C and a scheduler's signals reach workers too."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    offer_stacks()
    threading.Thread(target=_end_with_trainer, daemon=True).start()


def _end_with_trainer() -> None:
    # The DataLoader watches the parent's process id, but that is the fork server's here.
    trainer = multiprocessing.parent_process()
    if trainer is not None:
        wait([trainer.sentinel])
        os._exit(1)


def _kill(processes: set[Any]) -> None:
    """The end of workers that did not end when asked, being stuck in ``__getitem__``."""
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()
    processes.clear()
