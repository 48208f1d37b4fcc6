"""Load over HTTP, cheap enough to share two cores with a server.

Closed loop: each connection asks again when it was answered. Open loop: requests leave at a fixed rate,
whatever becomes of them, each over the connection that is free; where none is, that is counted.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import cast

import httptools
import numpy as np

_RETRY_S = 0.01

Answered = Callable[["LoadConnection", int, float], None]


@dataclass
class Times:
    """Seconds from a request to its answer, by status; and requests that got none."""

    by_status: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    broken: int = 0
    not_sent: int = 0

    def count(self, status: int) -> int:
        """How many had this status."""
        return len(self.by_status.get(status, ()))

    def percentile_ms(self, status: int, percent: int) -> float:
        """Of those with this status; 0 where there are none."""
        times = self.by_status.get(status)
        return 1000 * float(np.percentile(times, percent)) if times else 0.0


class LoadConnection(asyncio.Protocol):
    """One connection, with at most one request on it.

    Attributes:
        closed: it takes no other request; its server has asked for that, or we have.
    """

    def __init__(self, request: bytes, on_answer: Answered, on_broken: Callable[[LoadConnection], None]) -> None:
        self._request = request
        self._on_answer = on_answer
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._sent: float | None = None
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # uvloop's transports are one, but do not say so.
        self._transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpResponseParser(self)

    def ask(self) -> None:
        """Send the request."""
        assert self._transport is not None
        self._sent = self._loop.time()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Parse the answer."""
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """Httptools has seen an answer's end."""
        status = self._parser.get_status_code()
        sent, self._sent = self._sent, None
        if not self._parser.should_keep_alive():
            self.close()
        if sent is not None:
            self._on_answer(self, status, self._loop.time() - sent)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell of a request that will not be answered."""
        if self._sent is not None:
            self._on_broken(self)

    def close(self) -> None:
        """Close the connection."""
        self.closed = True
        if self._transport is not None:
            self._transport.close()


def http_request(port: int, path: str, body: bytes, headers: Sequence[str] = ()) -> bytes:
    """A POST as it is on the wire."""
    lines = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", f"Content-Length: {len(body)}", *headers]
    if not any(line.lower().startswith("content-type") for line in headers):
        lines.append("Content-Type: application/json")
    return "\r\n".join([*lines, "", ""]).encode() + body


async def closed_loop(port: int, request: bytes, connections: int, warmup_s: float, seconds: float) -> Times:
    """Send requests without a pause over this many connections; those of the warm-up do not count."""
    times = Times()
    counting = False
    running = True

    def on_answer(connection: LoadConnection, status: int, took_s: float) -> None:
        if counting:
            times.by_status[status].append(took_s)
        if running:
            connection.ask()

    def on_broken(connection: LoadConnection) -> None:
        times.broken += 1

    clients = await _connect(port, request, connections, on_answer, on_broken)
    for client in clients:
        client.ask()
    await asyncio.sleep(warmup_s)
    counting = True
    await asyncio.sleep(seconds)
    counting = running = False
    await asyncio.sleep(0.2)
    for client in clients:
        client.close()
    return times


async def open_loop(
    port: int,
    request: bytes,
    connections: int,
    rate: float,
    seconds: float,
    settled: Callable[[], None] = lambda: None,
) -> Times:
    """Send ``rate`` requests a second, whatever becomes of them.

    ``settled`` is called when a fifth of the time is over.
    """
    times = Times()

    def on_answer(connection: LoadConnection, status: int, took_s: float) -> None:
        times.by_status[status].append(took_s)
        free.append(connection)

    def on_broken(connection: LoadConnection) -> None:
        times.broken += 1

    free = deque(await _connect(port, request, connections, on_answer, on_broken))
    clients = list(free)
    loop = asyncio.get_running_loop()
    began = loop.time()
    loop.call_later(seconds / 5, settled)
    due = 0
    while (elapsed := loop.time() - began) < seconds:
        while due < elapsed * rate:
            due += 1
            if free:
                free.popleft().ask()
            else:
                times.not_sent += 1
        await asyncio.sleep(0.001)
    await asyncio.sleep(1)
    for client in clients:
        client.close()
    return times


async def _connect(
    port: int,
    request: bytes,
    connections: int,
    on_answer: Answered,
    on_broken: Callable[[LoadConnection], None],
) -> list[LoadConnection]:
    loop = asyncio.get_running_loop()
    clients = []
    for _ in range(connections):
        _, client = await loop.create_connection(
            lambda: LoadConnection(request, on_answer, on_broken), "127.0.0.1", port
        )
        clients.append(client)
    return clients


class SteadyLoad:
    """Closed loops that run on while servers come and go, as behind a balancer that polls their readiness.

    A connection that its server closes after an answer is opened again, to a server that is ready then.

    Attributes:
        ports: of the servers that are ready; the caller keeps it up to date.
        times: of what was answered; ``broken`` are requests that got no answer.
        answered_at: when each 200 came, by the event loop's clock.
        refused: connections that could not be opened; nothing was asked over them.
    """

    def __init__(self, request: Callable[[int], bytes], ports: list[int], connections: int) -> None:
        """``request`` makes what is sent to a port."""
        self.ports = ports
        self.times = Times()
        self.answered_at: list[float] = []
        self.refused = 0
        self._requests = {port: request(port) for port in ports}
        self._count = connections
        self._turn = 0
        self._open: set[LoadConnection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._running = True

    @property
    def failed(self) -> int:
        """Requests that were not answered with 200."""
        answered = sum(map(len, self.times.by_status.values()))
        return answered - self.times.count(200) + self.times.broken

    async def __aenter__(self) -> SteadyLoad:
        for _ in range(self._count):
            self._connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running = False
        for task in self._opening:
            task.cancel()
        # What was asked is waited for, some seconds: it counts as broken else.
        deadline = asyncio.get_running_loop().time() + 10
        while self._open and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_RETRY_S)
        self.times.broken += len(self._open)
        for connection in self._open:
            connection.close()

    def _connect(self) -> None:
        task = asyncio.create_task(self._connect_somewhere())
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect_somewhere(self) -> None:
        while self._running:
            if self.ports:
                self._turn += 1
                try:
                    connection = await self._connect_to(self.ports[self._turn % len(self.ports)])
                except OSError:
                    self.refused += 1
                else:
                    self._open.add(connection)
                    connection.ask()
                    return
            await asyncio.sleep(_RETRY_S)

    async def _connect_to(self, port: int) -> LoadConnection:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: LoadConnection(self._requests[port], self._on_answer, self._on_broken), "127.0.0.1", port
        )
        return connection

    def _on_answer(self, connection: LoadConnection, status: int, took_s: float) -> None:
        self.times.by_status[status].append(took_s)
        if status == 200:
            self.answered_at.append(asyncio.get_running_loop().time())
        if self._running and not connection.closed:
            connection.ask()
            return
        self._open.discard(connection)
        connection.close()
        if self._running:
            self._connect()

    def _on_broken(self, connection: LoadConnection) -> None:
        self.times.broken += 1
        self._open.discard(connection)
        if self._running:
            self._connect()
