"""Load that goes on while servers come and go, as behind a balancer that looks at their readiness."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from paceline.insight.bench.serving.load import LoadConnection, Times

_RETRY_S = 0.01


class SteadyLoad:
    """Closed loops over connections; a context manager.

    A connection that its server closes after an answer is opened again, to whichever server is ready then.

    Attributes:
        ports: of the servers that are ready; whoever starts and ends them keeps it.
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
