"""uvicorn's HTTP connection; it also ends slow clients, tells of those that went away, and refuses early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from paceline.serving.app import ON_DISCONNECT, Answer

Refuse = Callable[[bytes, Sequence[tuple[bytes, bytes]]], Answer | None]
"""The answer to a POST that is to be refused, by its URL and its headers."""

_TOO_SLOW = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b'content-length: 41\r\n\r\n{"error":"the request came too slowly."}\n'
)


def connection_class(receive_timeout_s: float, refuse: Refuse) -> type[asyncio.Protocol]:
    """A protocol for uvicorn whose clients must have sent a request within so many seconds.

    What ``refuse`` answers is sent before a task is made and the body is read: a server that is asked for
    five times what it can do has little time for four of them.
    """

    class Connection(HttpToolsProtocol):
        _receiving: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._waiting: set[asyncio.Future[Any]] = set()
            self._before: RequestResponseCycle | None = None
            self._refused = False
            self._await_request()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._before = self.cycle
            self._refused = False
            scope: dict[str, Any] = cast("dict[str, Any]", self.scope)
            scope["extensions"] = {ON_DISCONNECT: self._waiting}
            self._await_request()

        def on_headers_complete(self) -> None:
            # One that sends and does not read is left to uvicorn, which stops reading.
            idle = (self._before is None or self._before.response_complete) and not self.flow.write_paused
            parser = self.parser
            if idle and parser.get_method() == b"POST" and parser.should_keep_alive():
                answer = None if self.expect_100_continue else refuse(self.url, self.headers)
                if answer is not None:
                    self._refused = True
                    self.transport.write(_rendered(answer, self.server_state.default_headers))
                    return
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if not self._refused:
                super().on_body(body)

        def on_message_complete(self) -> None:
            self._received()
            if not self._refused:
                super().on_message_complete()
                return
            # As uvicorn does when it has answered.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

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
            if self._refused:
                self.transport.close()
                return
            # uvicorn declares it as always there. It is the last request's until this one's headers are here.
            cycle = cast("RequestResponseCycle | None", self.cycle)
            if cycle is self._before or cycle is None or not cycle.response_started:
                self.transport.write(_TOO_SLOW)
            self.transport.close()

    return Connection


def _rendered(answer: Answer, default_headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    status, headers, body = answer
    lines = [b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode())]
    lines += [b"%s: %s" % header for header in (*default_headers, *headers)]
    return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", body])
