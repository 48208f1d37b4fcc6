"""Load over HTTP, cheap enough to share two cores with a server.

Closed loop: each connection asks again when it was answered. Open loop: requests leave at a fixed rate,
whatever becomes of them, each over the connection that is free; where none is, that is counted.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import httptools

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
        times = self.by_status.get(status, [])
        if len(times) < 2:
            return 1000 * sum(times)
        return 1000 * statistics.quantiles(times, n=100, method="inclusive")[percent - 1]


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
    """Ask without a pause over so many connections; what comes in the warm-up is not counted."""
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
