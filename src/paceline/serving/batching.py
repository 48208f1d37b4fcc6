"""Which requests go to which replica, and when."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np

from paceline.serving.model import UNBOUNDED, Array, Arrays, ServingOptions, rows_of
from paceline.serving.replica_process import BatchFailed, ReplicaDied

# --- Why a request is not answered with a prediction, as HTTP says it ---


class RequestFailure(Exception):
    """A request gets an error: a status, a sentence, and headers.

    Attributes:
        status: of HTTP.
        headers: to be sent with it.
    """

    def __init__(self, status: int, message: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class InvalidRequest(RequestFailure):
    """The request is not what the protocol or the model's schema says."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message)


class Overloaded(RequestFailure):
    """More waits than may wait."""

    def __init__(self, waiting_rows: int, retry_after_s: int) -> None:
        super().__init__(
            429,
            f"{waiting_rows} rows wait already. Try again in {retry_after_s} s.",
            [(b"retry-after", str(retry_after_s).encode())],
        )


class DeadlinePassed(RequestFailure):
    """The request's time is up."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(504, f"it took longer than the {timeout_s * 1000:,.0f} ms that this request may take.")


class ModelFailed(RequestFailure):
    """The model raised an error on this input alone."""

    def __init__(self, message: str) -> None:
        super().__init__(500, f"the model failed on this input: {message}")


class ReplicaLost(RequestFailure):
    """Two replicas, one after the other, died while they computed this request."""

    def __init__(self) -> None:
        super().__init__(503, "the replicas that computed this request died. Others are being started.")


# --- Which requests are computed together, and by whom ---
#
# A batch never waits while a replica is idle. While all compute, requests gather; each replica may have one
# more batch sent ahead, so that it need not wait for the server between two, and that one goes off when it is
# full or ``max_wait`` after its first request came.


_SPAN_S = 0.1
SENT_AHEAD = 2  # batches a replica: the one that it computes, and the next
_Shape = tuple[tuple[int, ...], ...]


class BatchExecutor(Protocol):
    """Who computes batches: a process of this machine, or room for one of Ray Serve's."""

    @property
    def in_flight(self) -> int:
        """Batches that it was sent and has not answered."""
        ...

    @property
    def gone(self) -> bool:
        """Whether it can compute no more."""
        ...

    async def predict(self, inputs: Arrays) -> dict[str, Array]:
        """Compute a batch.

        Raises:
            BatchFailed: the model raised.
            ReplicaDied: it is gone; the batch was not answered.
        """
        ...


class _Waiting:
    """A request, or a piece of a large one."""

    __slots__ = ("answer", "came", "inputs", "lost_replicas", "rows", "shape")

    def __init__(self, inputs: Arrays, came: float, answer: asyncio.Future[dict[str, Array]]) -> None:
        self.inputs = inputs
        self.rows = rows_of(inputs)
        self.shape: _Shape = tuple(array.shape[1:] for array in inputs.values())
        self.came = came
        self.answer = answer
        self.lost_replicas = 0


class _Speed:
    """How long a replica takes for a row of a large batch, lately and at best.

    Attributes:
        seconds_a_row: lately.
    """

    def __init__(self) -> None:
        self.seconds_a_row = 0.001
        self._best = math.inf
        self._seconds = 0.0
        self._rows = 0

    @property
    def of_best(self) -> float:
        """Lately, as a part of the best speed: 1, or less."""
        return min(1.0, self._best / self.seconds_a_row)

    def note(self, seconds: float, rows: int, *, large: bool) -> None:
        """Take in a batch. A small one: the crowd is gone; the next is met as if at the best speed."""
        if not large:
            if not math.isinf(self._best):
                self.seconds_a_row = self._best
            elif seconds > 0:
                self.seconds_a_row = seconds / rows
            return
        # Clocks tick, and answers come two at a time.
        self._seconds += seconds
        self._rows += rows
        if self._seconds < _SPAN_S:
            return
        found = self._seconds / self._rows
        self._seconds, self._rows = 0.0, 0
        self.seconds_a_row = found if math.isinf(self._best) else (self.seconds_a_row + found) / 2
        # What was fast once, but never again, is forgotten.
        self._best = min(1.0001 * self._best, self.seconds_a_row)


class Batcher:
    """Gathers the requests of a model and hands them to its replicas.

    Attributes:
        waiting_rows: rows that no replica has been sent yet.
    """

    def __init__(self, options: ServingOptions, on_batch: Callable[[int, float], None]) -> None:
        """``on_batch`` is told the rows and seconds of each batch that was computed."""
        self._options = options
        self._on_batch = on_batch
        self._loop = asyncio.get_running_loop()
        self._queue: OrderedDict[asyncio.Future[dict[str, Array]], _Waiting] = OrderedDict()  # by answer
        self._replicas: list[BatchExecutor] = []
        self._running: set[asyncio.Task[None]] = set()
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._speed = _Speed()
        self._most_waiting = options.max_queue
        self._answered_at: WeakKeyDictionary[BatchExecutor, float] = WeakKeyDictionary()
        self.waiting_rows = 0

    @property
    def replicas(self) -> Sequence[BatchExecutor]:
        """Those that are ready."""
        return self._replicas

    def add(self, replica: BatchExecutor) -> None:
        """Use a replica from now on."""
        self._replicas.append(replica)
        self._schedule()

    def remove(self, replica: BatchExecutor) -> None:
        """Send a replica nothing more."""
        self._replicas.remove(replica)

    def submit(self, inputs: Arrays) -> asyncio.Future[dict[str, Array]]:
        """Ask for a prediction; cancelling the answer takes a request that still waits out of the queue.

        Raises:
            Overloaded: as many rows wait as may wait.
        """
        rows = rows_of(inputs)
        self.check_room(rows)
        largest = self._options.max_batch
        if rows <= largest:
            return self._enqueue(inputs)
        pieces = [
            self._enqueue({name: array[start : start + largest] for name, array in inputs.items()})
            for start in range(0, rows, largest)
        ]
        whole = asyncio.ensure_future(_joined(pieces))
        # Cancelled before it has begun, it could not cancel them itself.
        whole.add_done_callback(lambda _: [piece.cancel() for piece in pieces])
        return whole

    def check_room(self, rows: int = 1) -> None:
        """Refuse what would have to wait behind more than may wait.

        Raises:
            Overloaded: with the time after which there should be room.
        """
        refusal = self.refusal(rows)
        if refusal is not None:
            raise refusal

    def refusal(self, rows: int = 1) -> Overloaded | None:
        """What :meth:`check_room` raises."""
        # An empty queue takes a request of any size: one that is larger than the queue must be answered too.
        if not self.waiting_rows or self.waiting_rows + rows <= self._most_waiting:
            return None
        seconds = self.waiting_rows * self._speed.seconds_a_row / max(len(self._replicas), 1)
        return Overloaded(self.waiting_rows, max(1, math.ceil(seconds)))

    def _bound(self) -> int:
        """``max_queue``, or fewer while batches take longer than they can: nobody must wait longer."""
        most = self._options.max_queue
        if most == UNBOUNDED:
            return most
        # Fewer than two batches would leave a replica idle.
        return max(round(most * self._speed.of_best), min(most, 2 * self._options.max_batch))

    def _enqueue(self, inputs: Arrays) -> asyncio.Future[dict[str, Array]]:
        item = _Waiting(inputs, self._loop.time(), self._loop.create_future())
        item.answer.add_done_callback(self._forget)
        self._queue[item.answer] = item
        self.waiting_rows += item.rows
        self._schedule()
        return item.answer

    def _forget(self, answer: asyncio.Future[dict[str, Array]]) -> None:
        # Its client has gone, or its time is up: it must not keep others out.
        item = self._queue.pop(answer, None)
        if item is not None:
            self.waiting_rows -= item.rows

    def _schedule(self) -> None:
        # Once per turn of the event loop: what arrives in the same turn is computed together.
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._scheduled = False
        if not self._queue:
            return
        alive = (replica for replica in self._replicas if not replica.gone)
        replica = min(alive, key=lambda r: r.in_flight, default=None)
        if replica is None or replica.in_flight >= SENT_AHEAD:
            return
        if replica.in_flight and self.waiting_rows < self._options.max_batch:
            first = next(iter(self._queue.values()))
            wait_s = first.came + self._options.max_wait_s - self._loop.time()
            if wait_s > 0:
                self._wake_in(wait_s)
                return
        batch = self._take()
        if not batch:
            return
        task = self._loop.create_task(self._compute(replica, batch, crowded=bool(self._queue)))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        # The task has not begun, and the replica's count must rise before the next choice.
        self._loop.call_soon(self._schedule)

    def _wake_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._schedule)

    def _take(self) -> list[_Waiting]:
        """The oldest request, and those after it of its shape, as many as a batch may hold."""
        batch: list[_Waiting] = []
        room = self._options.max_batch
        for item in self._queue.values():
            if item.answer.done():
                continue  # cancelled in this turn of the loop; it is forgotten in the next
            if batch and (item.shape != batch[0].shape or item.rows > room or item.lost_replicas):
                continue
            batch.append(item)
            room -= item.rows
            # What may have killed a replica is computed by itself: it must not take others with it.
            if room == 0 or item.lost_replicas:
                break
        for item in batch:
            del self._queue[item.answer]
            self.waiting_rows -= item.rows
        return batch

    async def _compute(self, replica: BatchExecutor, batch: list[_Waiting], *, crowded: bool) -> None:
        if len(batch) == 1:
            inputs = batch[0].inputs
        else:
            inputs = {name: np.concatenate([item.inputs[name] for item in batch]) for name in batch[0].inputs}
        rows = sum(item.rows for item in batch)
        began = self._loop.time()
        try:
            outputs = await replica.predict(inputs)
            _check_rows(outputs, rows)
        except BatchFailed as error:
            await self._compute_apart(replica, batch, error)
        except ReplicaDied as died:
            self._return(batch, lost=died.computing)
        else:
            _answer(batch, outputs)
            now = self._loop.time()
            self._on_batch(rows, now - began)
            # What was sent ahead has waited for the batch before it.
            seconds = now - max(began, self._answered_at.get(replica, 0.0))
            self._answered_at[replica] = now
            self._speed.note(seconds, rows, large=crowded or 2 * rows >= self._options.max_batch)
            self._most_waiting = self._bound()
        self._schedule()

    async def _compute_apart(self, replica: BatchExecutor, batch: list[_Waiting], error: BatchFailed) -> None:
        """One request that the model cannot compute must not fail the others of its batch."""
        if len(batch) == 1:
            _fail(batch[0], ModelFailed(str(error)))
            return
        for item in batch:
            await self._compute(replica, [item], crowded=False)

    def _return(self, batch: list[_Waiting], *, lost: bool) -> None:
        """Its replica died: each request is tried again before all others, but once only if it may be why."""
        for item in reversed(batch):
            item.lost_replicas += lost
            if item.lost_replicas > 1:
                _fail(item, ReplicaLost())
            elif not item.answer.done():
                self._queue[item.answer] = item
                self._queue.move_to_end(item.answer, last=False)
                self.waiting_rows += item.rows

    async def finish(self) -> None:
        """Wait until everything that was asked is answered."""
        while self._queue or self._running:
            if self._running:
                await asyncio.wait(self._running, timeout=0.05)
            else:
                self._schedule()
                await asyncio.sleep(0.005)


def _check_rows(outputs: Arrays, rows: int) -> None:
    for name, array in outputs.items():
        if array.ndim == 0 or array.shape[0] != rows:
            raise BatchFailed(f"its output {name} has the shape {array.shape} for {rows} rows")


def _answer(batch: Sequence[_Waiting], outputs: dict[str, Array]) -> None:
    at = 0
    for item in batch:
        if not item.answer.done():
            item.answer.set_result({name: array[at : at + item.rows] for name, array in outputs.items()})
        at += item.rows


def _fail(item: _Waiting, failure: RequestFailure) -> None:
    if not item.answer.done():
        item.answer.set_exception(failure)


async def _joined(pieces: Sequence[asyncio.Future[dict[str, Array]]]) -> dict[str, Array]:
    """The answers of a large request's pieces, one after another."""
    answers = await asyncio.gather(*pieces)
    return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}
