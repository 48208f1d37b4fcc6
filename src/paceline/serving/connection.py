"""uvicorn's HTTP connection, which here also ends slow clients and tells of those that went away."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from paceline.serving.app import ON_DISCONNECT

_TOO_SLOW = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b'content-length: 41\r\n\r\n{"error":"the request came too slowly."}\n'
)


def connection_class(receive_timeout_s: float) -> type[asyncio.Protocol]:
    """A protocol for uvicorn whose clients must have sent a request within so many seconds."""

    class Connection(HttpToolsProtocol):
        _receiving: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._waiting: set[asyncio.Future[Any]] = set()
            self._await_request()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            scope: dict[str, Any] = cast("dict[str, Any]", self.scope)
            scope["extensions"] = {ON_DISCONNECT: self._waiting}
            self._await_request()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._received()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._received()
            for future in tuple(self._waiting):
                future.cancel()

        def _await_request(self) -> None:
            self._received()
            self._receiving = self.loop.call_later(receive_timeout_s, self._give_up)

        def _received(self) -> None:
            if self._receiving is not None:
                self._receiving.cancel()
                self._receiving = None

        def _give_up(self) -> None:
            if self.transport.is_closing():
                return
            # uvicorn declares it as always there.
            cycle = cast("RequestResponseCycle | None", self.cycle)
            if cycle is None or not cycle.response_started or cycle.response_complete:
                self.transport.write(_TOO_SLOW)
            self.transport.close()

    return Connection
