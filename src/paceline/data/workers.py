"""The worker processes that read samples, and how their batches reach the trainer."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import queues, util
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from multiprocessing.synchronize import SemLock
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from paceline.core.ownership import register_process
from paceline.core.signals import install_dump_handler
from paceline.core.task import Task
from paceline.core.task_loading import load_task_class

if TYPE_CHECKING:
    from paceline.data.samples import ReadRequest, SampleReader

_MOST_FILES = 65_536
"""Open files that a process with data workers asks for: enough for any batch, and few where a limit has no end."""


class ReadError(Exception):
    """The traceback of an error in a worker, as text, because it comes from another process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class SendFailure:
    """What arrives in place of a batch that a worker could not send.

    Attributes:
        message: the error, and what to do.
        cause: its traceback.
    """

    message: str
    cause: ReadError


def is_out_of_files(error: BaseException) -> bool:
    """Return whether an error says that a process has no room for another open file."""
    # torch's errors have no errno; a message whose files found no room arrives without "ancillary data".
    return os.strerror(errno.EMFILE) in str(error) or "ancdata" in str(error)


def advise_on_open_files() -> str:
    """Return what to do where batches need more open files than a process may have."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"Each tensor of a batch is an open file of the worker and of the trainer, and a process may have {limit} "
        "(ulimit -Hn): raise that limit, let collate() return fewer tensors, or use --num-workers 0."
    )


_open: tuple[weakref.ref[DataWorkers], ...] = ()


def data_workers() -> list[int]:
    """Return the process ids of this process's data workers; thread-safe."""
    return [pid for reference in _open if (workers := reference()) is not None for pid in workers.pids]


class DataWorkers:
    """A ``DataLoader`` with persistent workers for one sequence of requests after another."""

    def __init__(self, reader: SampleReader, num_workers: int, *, ahead: int, pin: bool) -> None:
        _raise_open_files_limit()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["paceline.data.forkserver_preload"])
        self._sequence = _Sequence()
        self._started, started = context.Pipe(duplex=False)
        self._to_start = num_workers
        self._loader: DataLoader[Any] = DataLoader(
            _PickledReader(reader),  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._sequence,
            num_workers=num_workers,
            collate_fn=_identity,
            pin_memory=pin,
            multiprocessing_context=context,
            worker_init_fn=partial(_prepare_worker, started),
            prefetch_factor=max(2, -(-ahead // num_workers)),
            persistent_workers=True,
            # Otherwise every new sequence would draw a number from the trainer's generator.
            generator=torch.Generator(),
        )
        self._iterator: Iterator[Any] = iter(())
        self._processes: set[Any] = set()
        self._end = weakref.finalize(self, _kill, self._processes)
        self._names: set[str] = set()  # of the workers' semaphores
        self.pids: tuple[int, ...] = ()
        global _open
        _open = (*(reference for reference in _open if reference() is not None), weakref.ref(self))

    def start(self, requests: Iterator[ReadRequest]) -> None:
        self._sequence.requests = requests
        before = set(multiprocessing.active_children())
        known = set(_semaphore_names())
        self._iterator = iter(self._loader)
        self._names |= set(_semaphore_names()) - known
        self._processes |= set(multiprocessing.active_children()) - before
        self.pids = tuple(process.pid for process in self._processes)

    def __next__(self) -> Any:
        batch = next(self._iterator)
        while self._to_start and self._started.poll():
            self._started.recv_bytes()
            self._to_start -= 1
        if self._names and not self._to_start:
            # Every worker has opened its semaphores by now. Their names would outlive a trainer that is killed.
            finalizers = _semaphore_names()
            for name in self._names & finalizers.keys():
                finalizers[name]()
            self._names = set()
        return batch

    def any_failed(self) -> bool:
        """Return whether a worker ended by an error of its own, and not by a signal."""
        wait([process.sentinel for process in self._processes], 1.0)  # its pipe may have closed before its end
        return any((process.exitcode or 0) > 0 for process in self._processes)

    def any_killed(self) -> bool:
        """Return whether a signal has ended a worker."""
        wait([process.sentinel for process in self._processes], 1.0)
        return any((process.exitcode or 0) < 0 for process in self._processes)

    def close(self) -> None:
        # These are the last references; the DataLoader's iterator ends its workers when it is collected.
        del self._iterator, self._loader
        self._end()
        self._started.close()
        self.pids = ()


class _Sequence:
    """The sampler that the ``DataLoader`` iterates for each sequence."""

    requests: Iterator[ReadRequest] = iter(())

    def __iter__(self) -> Iterator[ReadRequest]:
        return self.requests


class _PickledReader:
    """A pickled reader, preceded by the task files that it needs.

    A worker cannot import a task from a file by module name, so it runs the file first; ``pickle`` rebuilds arguments
    in their order.
    """

    def __init__(self, reader: SampleReader) -> None:
        self._reader = reader

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (_TaskFiles(), self._reader)


class _TaskFiles:
    def __reduce__(self) -> tuple[Any, ...]:
        return _import_task_files, (list_task_files(),)


def list_task_files() -> list[str]:
    """Return one ``file.py:Name`` for each file from which tasks were loaded, and that is still there."""
    specs = []
    for module in list(sys.modules.values()):
        if module.__name__.startswith("paceline_task_") and os.path.exists(module.__file__ or ""):
            values = [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, Task)]
            names = [v.__name__ for v in values if v.__module__ == module.__name__]
            specs += [f"{module.__file__}:{name}" for name in names[:1]]
    return specs


def _import_task_files(specs: list[str]) -> None:
    for spec in specs:
        load_task_class(spec)


def _unpack(task_files: None, reader: SampleReader) -> SampleReader:
    return reader


def _reduce_generator(generator: torch.Generator) -> tuple[Any, ...]:
    return _rebuild_generator, (str(generator.device), generator.get_state().numpy().tobytes())


def _rebuild_generator(device: str, state: bytes) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


# torch sends a generator's state as a tensor in shared memory, which is closed before a fork server's child opens it.
ForkingPickler.register(torch.Generator, _reduce_generator)


def _identity(batch: Any) -> Any:
    return batch


def _semaphore_names() -> dict[str, Callable[[], object]]:
    """Return what removes each named semaphore of this process, as its exit would."""
    return {
        finalizer._args[0]: finalizer
        for finalizer in list(util._finalizer_registry.values())  # type: ignore[attr-defined]
        if finalizer._callback is SemLock._cleanup  # type: ignore[attr-defined]
    }


def _prepare_worker(started: Connection, worker: int) -> None:
    """Ignore Ctrl-C and a scheduler's signals, because the trainer decides when the worker ends."""
    threading.Thread(target=_end_with_trainer, daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    install_dump_handler()
    register_process()
    _raise_open_files_limit()
    # For the queue of this worker's batches, the only one that it writes to.
    queues.Queue._on_queue_feeder_error = _send_failure  # type: ignore[attr-defined]
    started.send_bytes(b"1")


def _raise_open_files_limit() -> None:
    """Use the open files that the system allows: many give a shell 1024 of them, and a batch may have as many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _send_failure(queue: queues.Queue[Any], error: Exception, item: tuple[int, Any]) -> None:
    """Send why a batch cannot be sent: the queue would drop it, and the trainer would wait for it for ever."""
    if is_out_of_files(error):
        advice = advise_on_open_files()
    else:
        advice = "Return tensors without gradients, numpy arrays and plain Python values, or use --num-workers 0."
    number, _ = item
    message = f"{type(error).__name__}: {str(error).rstrip('.')}. {advice}"
    queue.put((number, SendFailure(message, ReadError(traceback.format_exc()))))


def _end_with_trainer() -> None:
    # The DataLoader watches the parent's process id, but the parent is the fork server. It also keeps a worker that
    # fails to start, to report that: it would wait for a trainer that was killed before.
    trainer = multiprocessing.parent_process()
    if trainer is not None:
        wait([trainer.sentinel])
        os._exit(1)


def _kill(processes: set[Any]) -> None:
    """Kill workers that are stuck in ``__getitem__`` and did not end."""
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()
    processes.clear()
