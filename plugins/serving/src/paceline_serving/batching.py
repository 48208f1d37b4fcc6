"""Batching of a model's requests, and the replicas that answer them."""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np

from paceline.core.errors import ServingError
from paceline_serving.model import UNBOUNDED, Array, Arrays, ServedModel, ServingOptions, rows_of
from paceline_serving.replica_process import BatchFailed, ReplicaDied, ReplicaProcess, ReplicaStarter

log = logging.getLogger("paceline_serving")

# --- Failures of requests, with their HTTP status ---


class RequestFailure(Exception):
    """A request is answered with this status of HTTP, and these headers."""

    def __init__(self, status: int, message: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class InvalidRequest(RequestFailure):
    """The request does not follow the protocol or the model's schema."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message)


class Overloaded(RequestFailure):
    """The queue is full."""

    def __init__(self, waiting_rows: int, retry_after_s: int) -> None:
        super().__init__(
            429,
            f"the queue is full with {waiting_rows} rows. Try again in {retry_after_s} s.",
            [(b"retry-after", str(retry_after_s).encode())],
        )


class DeadlinePassed(RequestFailure):
    """The request's time limit has passed."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(504, f"the request was not answered within its time limit of {timeout_s * 1000:,.6g} ms.")


# --- Batching ---
#
# A batch never waits while a replica is idle. While all replicas compute, requests gather. Each replica may have
# one more batch queued, so that it does not wait for the server between two batches; that batch is sent when it is
# full, or ``max_wait`` after its first request arrived.


_MEASUREMENT_S = 0.1
_MAX_PAUSE_S = 10.0
_QUEUED_PIECES = 64  # of a request with more rows than a batch
MAX_IN_FLIGHT = 2  # batches per replica: the one that it computes, and the next
_Shape = tuple[tuple[int, ...], ...]


class BatchExecutor(Protocol):
    """A process of this machine that computes batches, or a place for one of Ray Serve's replicas."""

    @property
    def in_flight(self) -> int:
        """The number of unanswered batches."""

    @property
    def gone(self) -> bool:
        """Whether it cannot compute batches any more."""

    async def predict(self, inputs: Arrays) -> dict[str, Array]:
        """Compute a batch.

        Raises:
            BatchFailed: the model raised an error.
            ReplicaDied: the replica died without an answer.
        """


class _PendingRequest:
    """A waiting request, or a piece of a large one."""

    __slots__ = ("answer", "arrived_at", "inputs", "lost_replicas", "rows", "shape")

    def __init__(self, inputs: Arrays, arrived_at: float, answer: asyncio.Future[dict[str, Array]]) -> None:
        self.inputs = inputs
        self.rows = rows_of(inputs)
        self.shape: _Shape = tuple(array.shape[1:] for array in inputs.values())
        self.arrived_at = arrived_at
        self.answer = answer
        self.lost_replicas = 0


class _Speed:
    """The recent and the best time of a replica for a row of a large batch."""

    def __init__(self) -> None:
        self.seconds_per_row = 0.001
        self._best = math.inf
        self._seconds = 0.0
        self._rows = 0

    @property
    def relative(self) -> float:
        """The recent speed relative to the best: at most 1."""
        return min(1.0, self._best / self.seconds_per_row)

    def note(self, seconds: float, rows: int, *, large: bool) -> None:
        """Record a batch. A small one means that the load is gone, so the best speed is assumed next."""
        if not large:
            if not math.isinf(self._best):
                self.seconds_per_row = self._best
            elif seconds > 0:
                self.seconds_per_row = seconds / rows
            return
        # Average over time: clocks have limited resolution, and answers arrive in pairs.
        self._seconds += seconds
        self._rows += rows
        if self._seconds < _MEASUREMENT_S:
            return
        measured = self._seconds / self._rows
        self._seconds = 0.0
        self._rows = 0
        self.seconds_per_row = measured if math.isinf(self._best) else (self.seconds_per_row + measured) / 2
        # Slowly forget a best speed that is never reached again.
        self._best = min(1.0001 * self._best, self.seconds_per_row)


class Batcher:
    """A queue of a model's requests that forms batches and sends them to replicas.

    Attributes:
        waiting_rows: rows that were not sent to a replica yet.
    """

    def __init__(self, options: ServingOptions, on_batch: Callable[[int, float], None]) -> None:
        """``on_batch`` is called with the rows and seconds of each computed batch."""
        self._options = options
        self._on_batch = on_batch
        self._loop = asyncio.get_running_loop()
        self._queue: OrderedDict[asyncio.Future[dict[str, Array]], _PendingRequest] = OrderedDict()  # by their answer
        self.replicas: list[BatchExecutor] = []
        self._running: set[asyncio.Task[None]] = set()
        self._is_abandoned = False
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._speed = _Speed()
        self._max_waiting = options.max_queue
        self._answered_at: WeakKeyDictionary[BatchExecutor, float] = WeakKeyDictionary()
        self.waiting_rows = 0

    def add(self, replica: BatchExecutor) -> None:
        self.replicas.append(replica)
        self._schedule()

    def remove(self, replica: BatchExecutor) -> None:
        self.replicas.remove(replica)

    def submit(self, inputs: Arrays) -> asyncio.Future[dict[str, Array]]:
        """Submit a request, unless the queue is full; cancelling its answer removes it from the queue."""
        rows = rows_of(inputs)
        self.check_room(rows)
        return self._enqueue(inputs) if rows <= self._options.max_batch else self._submit_large(inputs, rows)

    def _submit_large(self, inputs: Arrays, rows: int) -> asyncio.Future[dict[str, Array]]:
        """Submit a request of many batches, of which a few at a time are in the queue, as each takes memory."""
        unqueued, max_batch = rows, self._options.max_batch
        self.waiting_rows += rows
        pieces: deque[asyncio.Future[dict[str, Array]]] = deque()

        async def compute() -> dict[str, Array]:
            nonlocal unqueued
            outputs: list[dict[str, Array]] = []
            while unqueued or pieces:
                while unqueued and len(pieces) < _QUEUED_PIECES:
                    start = rows - unqueued
                    piece = {name: array[start : start + max_batch] for name, array in inputs.items()}
                    unqueued -= rows_of(piece)
                    self.waiting_rows -= rows_of(piece)
                    pieces.append(self._enqueue(piece))
                outputs.append(await pieces[0])
                pieces.popleft()
            return {name: np.concatenate([each[name] for each in outputs]) for name in outputs[0]}

        def drop(_: object) -> None:
            self.waiting_rows -= unqueued
            for piece in pieces:
                if not piece.cancel() and not piece.cancelled():
                    piece.exception()  # otherwise asyncio would report it

        answer = asyncio.ensure_future(compute())
        answer.add_done_callback(drop)  # a task that is cancelled before it starts cannot do this itself
        return answer

    def check_room(self, rows: int = 1) -> None:
        """Refuse a request that does not fit into the queue, with the time after which there should be room."""
        refusal = self.refusal(rows)
        if refusal is not None:
            raise refusal

    def refusal(self, rows: int = 1) -> Overloaded | None:
        # An empty queue accepts a request of any size, since a request may be larger than the queue.
        if not self.waiting_rows or self.waiting_rows + rows <= self._max_waiting:
            return None
        seconds = self.waiting_rows * self._speed.seconds_per_row / max(len(self.replicas), 1)
        return Overloaded(self.waiting_rows, max(1, math.ceil(seconds)))

    def _queue_limit(self) -> int:
        """Return ``max_queue``, or less while batches are slow, so that waiting times stay bounded."""
        limit = self._options.max_queue
        if limit == UNBOUNDED:
            return limit
        # Fewer than two batches would leave a replica idle.
        return max(round(limit * self._speed.relative), min(limit, 2 * self._options.max_batch))

    def _enqueue(self, inputs: Arrays) -> asyncio.Future[dict[str, Array]]:
        item = _PendingRequest(inputs, self._loop.time(), self._loop.create_future())
        item.answer.add_done_callback(self._drop)
        self._queue[item.answer] = item
        self.waiting_rows += item.rows
        self._schedule()
        return item.answer

    def _drop(self, answer: asyncio.Future[dict[str, Array]]) -> None:
        # An answer that was cancelled or timed out must not occupy the queue.
        item = self._queue.pop(answer, None)
        if item is not None:
            self.waiting_rows -= item.rows

    def _schedule(self) -> None:
        # Run once per iteration of the event loop, so that requests of one iteration form a batch.
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._scheduled = False
        if not self._queue:
            return
        alive = (replica for replica in self.replicas if not replica.gone)
        replica = min(alive, key=lambda r: r.in_flight, default=None)
        if replica is None or replica.in_flight >= MAX_IN_FLIGHT:
            return
        if replica.in_flight and self.waiting_rows < self._options.max_batch:
            first = next(iter(self._queue.values()))
            wait_s = first.arrived_at + self._options.max_wait_s - self._loop.time()
            if wait_s > 0:
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = self._loop.call_later(wait_s, self._schedule)
                return
        batch = self._take_batch()
        if not batch:
            return
        task = self._loop.create_task(self._compute(replica, batch, is_crowded=bool(self._queue)))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        # Choose again only after the task has started, which raises the replica's count of batches.
        self._loop.call_soon(self._schedule)

    def _take_batch(self) -> list[_PendingRequest]:
        """Take the oldest request, and later ones of the same shape, up to the size of a batch."""
        batch: list[_PendingRequest] = []
        room = self._options.max_batch
        for item in self._queue.values():
            if item.answer.done():
                continue  # cancelled in this iteration of the loop; dropped in the next
            if batch and (item.shape != batch[0].shape or item.rows > room or item.lost_replicas):
                continue
            batch.append(item)
            room -= item.rows
            # Compute a request that may have killed a replica alone, so that it does not affect others.
            if room == 0 or item.lost_replicas:
                break
        for item in batch:
            del self._queue[item.answer]
            self.waiting_rows -= item.rows
        return batch

    async def _compute(self, replica: BatchExecutor, batch: list[_PendingRequest], *, is_crowded: bool) -> None:
        if len(batch) == 1:
            inputs = batch[0].inputs
        else:
            inputs = {name: np.concatenate([item.inputs[name] for item in batch]) for name in batch[0].inputs}
        rows = sum(item.rows for item in batch)
        start = self._loop.time()
        try:
            outputs = await replica.predict(inputs)
            for name, array in outputs.items():
                if array.ndim == 0 or array.shape[0] != rows:
                    raise BatchFailed(f"the output {name} has the shape {array.shape} for {rows} rows")
        except BatchFailed as error:
            await self._compute_separately(replica, batch, error)
        except ReplicaDied as died:
            self._requeue(batch, lost=died.computing)
        else:
            _answer(batch, outputs)
            now = self._loop.time()
            self._on_batch(rows, now - start)
            # A batch that was sent ahead has waited for the previous one.
            seconds = now - max(start, self._answered_at.get(replica, 0.0))
            self._answered_at[replica] = now
            self._speed.note(seconds, rows, large=is_crowded or 2 * rows >= self._options.max_batch)
            self._max_waiting = self._queue_limit()
        self._schedule()

    async def _compute_separately(
        self, replica: BatchExecutor, batch: list[_PendingRequest], error: BatchFailed
    ) -> None:
        """Compute each request alone, so that only the one that the model cannot compute fails."""
        if len(batch) > 1:
            for item in batch:
                await self._compute(replica, [item], is_crowded=False)
        elif error.is_invalid:
            failure = InvalidRequest(
                f"an index in this input is out of the model's range ({error}). Send smaller indices. If the task "
                "declares minimum and maximum of the input in its TensorSpec, the server names the valid range."
            )
            _fail(batch[0], failure)
        else:
            _fail(batch[0], RequestFailure(500, f"the model failed on this input: {error}"))

    def _requeue(self, batch: list[_PendingRequest], *, lost: bool) -> None:
        """Put a dead replica's requests first in the queue; each that may be the cause is repeated only once."""
        for item in reversed(batch):
            item.lost_replicas += lost
            if item.lost_replicas > 1:
                why = "the replicas that computed this request died. New ones are being started."
                _fail(item, RequestFailure(503, why))
            elif not item.answer.done():
                self._queue[item.answer] = item
                self._queue.move_to_end(item.answer, last=False)
                self.waiting_rows += item.rows

    def abandon(self) -> None:
        self._is_abandoned = True

    async def finish(self) -> None:
        """Wait until all accepted requests are answered, or abandoned."""
        while (self.waiting_rows or self._running) and not self._is_abandoned:
            if self._running:
                await asyncio.wait(self._running, timeout=0.05)
            else:
                self._schedule()
                await asyncio.sleep(0.005)


def _answer(batch: Sequence[_PendingRequest], outputs: dict[str, Array]) -> None:
    start = 0
    for item in batch:
        if not item.answer.done():
            item.answer.set_result({name: array[start : start + item.rows] for name, array in outputs.items()})
        start += item.rows


def _fail(item: _PendingRequest, failure: RequestFailure) -> None:
    if not item.answer.done():
        item.answer.set_exception(failure)


# --- Deployments: a model's batcher and its replicas, which are kept alive ---


@dataclass(frozen=True)
class DeploymentEvents:
    """Callbacks of a deployment: the rows and seconds of each batch, and the death of a replica."""

    on_batch: Callable[[int, float], None]
    on_restart: Callable[[], None]


NO_EVENTS = DeploymentEvents(lambda rows, seconds: None, lambda: None)


class Deployment(ABC):
    """One version of a model, with the queue of its requests.

    Attributes:
        spec: for clients.
        exact_sizes: with ``--exact``, the sizes of the batches that replicas compute, the largest first.
    """

    exact_sizes: tuple[int, ...] = ()

    def __init__(self, model: ServedModel, options: ServingOptions, observer: DeploymentEvents) -> None:
        self.spec = model.spec
        self.batcher = Batcher(options, observer.on_batch)
        self._model = model
        self._options = options
        self._on_restart = observer.on_restart

    @abstractmethod
    async def start(self) -> None:
        """Return when all required replicas are ready.

        Raises:
            ServingError: a replica cannot load the model or has no resources; all replicas have ended.
        """

    @abstractmethod
    async def close(self) -> None:
        """Answer all accepted requests, then end the replicas."""

    def abandon(self) -> None:
        """Answer no more requests: :meth:`close` will not wait for them."""
        self.batcher.abandon()

    @property
    def ready_replicas(self) -> int:
        return len(self.batcher.replicas)


class LocalDeployment(Deployment):
    """A deployment whose replicas are processes of this machine, restarted when they die."""

    def __init__(
        self,
        starter: ReplicaStarter,
        model: ServedModel,
        options: ServingOptions,
        observer: DeploymentEvents = NO_EVENTS,
    ) -> None:
        super().__init__(model, options, observer)
        self._starter = starter
        self._keep_alive_tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        devices = [self._options.devices[i % len(self._options.devices)] for i in range(self._options.replicas)]
        started = await asyncio.gather(*map(self._start_replica, devices), return_exceptions=True)
        replicas = [replica for replica in started if isinstance(replica, ReplicaProcess)]
        failures = [failure for failure in started if isinstance(failure, BaseException)]
        if len({replica.exact_sizes for replica in replicas}) > 1:
            failures.append(
                ServingError(f"{self.spec.name}: --exact: the devices compute other bits. Use devices of one model.")
            )
        if failures:
            await asyncio.gather(*(replica.end() for replica in replicas))
            raise failures[0]
        self.exact_sizes = replicas[0].exact_sizes
        for replica, device in zip(replicas, devices, strict=True):
            self.batcher.add(replica)
            self._keep_alive_tasks.append(asyncio.create_task(self._keep_alive(replica, device)))

    def abandon(self) -> None:
        super().abandon()
        for task in self._keep_alive_tasks:
            task.cancel()  # before it starts another replica
        for replica in self.batcher.replicas:
            if isinstance(replica, ReplicaProcess):
                replica.kill()

    async def close(self) -> None:
        await self.batcher.finish()
        for task in self._keep_alive_tasks:
            task.cancel()
        await asyncio.gather(*self._keep_alive_tasks, return_exceptions=True)

    def _start_replica(self, device: str) -> asyncio.Future[ReplicaProcess]:
        return asyncio.ensure_future(ReplicaProcess.start(self._model, device, self._options, self._starter))

    async def _keep_alive(self, replica: ReplicaProcess | None, device: str) -> None:
        pause_s = 0.0
        try:
            while True:
                if replica is not None:
                    await replica.wait_gone()
                    self.batcher.remove(replica)
                    log.warning("%s: replica %d died; starting another", self.spec.name, replica.pid)
                    await replica.end()
                    replica = None
                    self._on_restart()
                await asyncio.sleep(pause_s)
                try:
                    replica = await self._start_replica(device)
                except (ServingError, OSError) as error:
                    pause_s = min(max(2 * pause_s, 0.5), _MAX_PAUSE_S)
                    log.error("%s; retrying in %g s", str(error).removesuffix("."), pause_s)
                else:
                    pause_s = 0.0
                    self.batcher.add(replica)
                    log.info("%s: replica %d is ready", self.spec.name, replica.pid)
        finally:
            if replica is not None:
                with suppress(ValueError):
                    self.batcher.remove(replica)
                await replica.end()
