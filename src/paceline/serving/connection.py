"""uvicorn's HTTP connection; it also ends slow clients, tells of those that went away, and refuses early."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence, Sized
from functools import lru_cache
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from paceline.serving.app import ON_DISCONNECT, error_answer
from paceline.serving.failures import RequestFailure

Refuse = Callable[[bytes, Sequence[tuple[bytes, bytes]]], RequestFailure | None]
"""Why a POST is to be refused, by its URL and its headers."""

_TOO_SLOW = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b'content-length: 41\r\n\r\n{"error":"the request came too slowly."}\n'
)


class _Flow(FlowControl):
    """Reads no further while a request waits that was read before.

    uvicorn reads on whenever it has answered one: a client that sends thousands and reads slowly would
    fill the memory with them.
    """

    def __init__(self, transport: asyncio.Transport, waiting: Sized) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if not self._waiting:
            super().resume_reading()


def connection_class(receive_timeout_s: float, refuse: Refuse) -> type[asyncio.Protocol]:
    """A protocol for uvicorn whose clients must have sent a request within so many seconds.

    What ``refuse`` answers is sent before a task is made and the body is read: a server that is asked for
    five times what it can do has little time for four of them.
    """

    class Connection(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.flow = _Flow(transport, self.pipeline)
            self._waiting: set[asyncio.Future[Any]] = set()
            self._before: RequestResponseCycle | None = None
            self._refused = False
            self._timer: asyncio.TimerHandle | None = None
            self._await_request()

        def on_message_begin(self) -> None:
            # What uvicorn makes for a request comes later: it is not needed to refuse one.
            self.url = b""
            self.headers = []
            self.expect_100_continue = False
            self._before = self.cycle
            self._refused = False
            self._await_request()

        def on_headers_complete(self) -> None:
            # One that sends and does not read is left to uvicorn, which stops reading.
            parser = self.parser
            if (
                not self.flow.write_paused
                and not self._owes_answer()
                and parser.get_method() == b"POST"
                and parser.should_keep_alive()
                and parser.get_http_version() == "1.1"
            ):
                refusal = None if self.expect_100_continue else refuse(self.url, self.headers)
                if refusal is not None:
                    self._refused = True
                    headers = (*self.server_state.default_headers, *refusal.headers)
                    self.transport.write(_rendered(refusal.status, headers, str(refusal)))
                    return
            found = self.url, self.headers, self.expect_100_continue
            super().on_message_begin()
            self.url, self.headers, self.expect_100_continue = found
            scope: dict[str, Any] = cast("dict[str, Any]", self.scope)
            scope["headers"] = self.headers
            scope["extensions"] = {ON_DISCONNECT: self._waiting}
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if not self._refused:
                super().on_body(body)

        def on_message_complete(self) -> None:
            self._expected_by = math.inf
            if self._refused:
                self._await_another()
                return
            if self.cycle.response_complete:  # before its body was all here
                self._await_another()
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.timeout_keep_alive_task is not None:
                # uvicorn's timer ends with the next byte, be it of what was answered already, or of nothing.
                self._unset_keepalive_if_required()
                if math.isinf(self._expected_by):
                    self._await_another()
            elif not math.isinf(self._expected_by):
                # While this answer was owed we did not read on: only now can its client send the rest.
                self._await_request()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            for future in tuple(self._waiting):
                future.cancel()

        def _owes_answer(self) -> bool:
            """Whether the request before this one is not answered yet."""
            return self._before is not None and not self._before.response_complete

        def _await_request(self) -> None:
            self._expect(receive_timeout_s, self._give_up)

        def _await_another(self) -> None:
            self._expect(self.timeout_keep_alive, self.timeout_keep_alive_handler)

        def _expect(self, within_s: float, otherwise: Callable[[], None]) -> None:
            """Call ``otherwise`` then, unless something else is expected before.

            The timer stays as it is while it goes off early enough: two for each request would cost as
            much as to refuse it.
            """
            self._expected_by = self.loop.time() + within_s
            self._otherwise = otherwise
            if self._timer is not None and self._timer.when() > self._expected_by:
                self._timer.cancel()
                self._timer = None
            if self._timer is None:
                self._timer = self.loop.call_at(self._expected_by, self._on_timer)

        def _on_timer(self) -> None:
            self._timer = None
            if math.isinf(self._expected_by) or self.transport.is_closing():
                return
            if self.loop.time() < self._expected_by:
                self._timer = self.loop.call_at(self._expected_by, self._on_timer)
                return
            self._expected_by = math.inf
            self._otherwise()

        def _give_up(self) -> None:
            if self._owes_answer():
                # Perhaps it is we who do not read on.
                self._await_request()
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


@lru_cache(maxsize=256)  # one that is asked for too much says the same thousands of times a second
def _rendered(status: int, headers: Sequence[tuple[bytes, bytes]], message: str) -> bytes:
    _, all_headers, body = error_answer(status, message, headers)
    lines = [b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode())]
    lines += [b"%s: %s" % header for header in all_headers]
    return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", body])
