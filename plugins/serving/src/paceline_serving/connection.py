"""HTTP/1.1 connections: requests from bytes, answers to bytes, with timeouts for slow clients and bounded heads.

llhttp (by httptools) finds where each request ends. This file decides which bytes it gets, how many a connection holds,
and when a request is refused.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any, TypeVar, cast
from urllib.parse import unquote

import httptools
import orjson

from paceline_serving.batching import RequestFailure

# --- Requests and answers ---


Headers = list[tuple[bytes, bytes]]
JSON_TYPE = (b"content-type", b"application/json")

Answer = tuple[int, Headers, bytes]
"""Status, header fields and body."""

App = Callable[["Request"], Awaitable[Answer | None]]
"""Answers a request; None if the client has gone."""

Refuse = Callable[[bytes, Sequence[tuple[bytes, bytes]]], RequestFailure | None]
"""Returns why to refuse a POST, by its URL and its headers."""

_MAX_BUFFERED_BYTES = 64 * 1024  # of a body that the application has not read
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class ClientGone(Exception):
    """The client has disconnected."""


class Request:
    """A request whose head has arrived, and whose body may still arrive.

    Attributes:
        path: of the URL, without escapes.
        headers: by name in lower case; the last of several of the same name.
        user: the name of the client's token, once it is known.
        waiting: futures that are cancelled when the client disconnects.
        is_answered: the answer was sent, maybe before the body was complete.
        is_gone: the client has disconnected, or its request was rejected.
    """

    def __init__(
        self,
        connection: HttpConnection,
        method: str,
        path: str,
        headers: dict[bytes, bytes],
        *,
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.client = connection.client
        self.user = ""
        self.waiting: set[asyncio.Future[Any]] = set()
        self.keep_alive = keep_alive
        self.is_answered = False
        self.is_gone = False
        self._connection = connection
        self._expects_continue = expects_continue
        self._pieces: list[bytes] = []
        self._is_whole = False
        self._arrived = asyncio.Event()
        self.buffered_bytes = 0

    @property
    def has_more(self) -> bool:
        """Whether :meth:`read` has something to return, or to wait for."""
        return bool(self._pieces) or not self._is_whole

    async def read(self) -> bytes:
        """Return what has arrived of the body, after waiting for some of it; empty at its end.

        Raises:
            ClientGone: it will not arrive.
        """
        while not self._pieces and not self._is_whole and not self.is_gone:
            if self._expects_continue:
                self._expects_continue = False
                self._connection.send_continue()
            self._arrived.clear()
            await self._arrived.wait()
        if self.is_gone:
            raise ClientGone
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self.buffered_bytes = 0
        if not self._is_whole:
            self._connection.update_reading()
        return body

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.buffered_bytes += len(piece)
        self._arrived.set()

    def complete(self) -> None:
        self._is_whole = True
        self._arrived.set()

    def disconnect(self) -> None:
        """Compute no more of the answer."""
        self.is_gone = True
        self._pieces.clear()
        self._arrived.set()
        for future in tuple(self.waiting):
            future.cancel()


def error_answer(status: int, message: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> Answer:
    """Return the answer for a failure."""
    # A client's text may contain invalid Unicode, and orjson accepts no lone surrogates.
    text = message.encode("utf-8", "replace").decode()
    return status, [JSON_TYPE, *headers], orjson.dumps({"error": text})


_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_CLOSE = (b"connection", b"close")


def _render(status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bytes:
    lines = [b"%s: %s\r\n" % header for header in headers]
    return b"".join([_STATUS_LINES[status], *lines, b"\r\n", body])


@lru_cache(maxsize=256)  # an overloaded server sends the same answer thousands of times a second
def _render_error(status: int, message: str, headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
    _, all_headers, body = error_answer(status, message, headers)
    return _render(status, [*all_headers, (b"content-length", b"%d" % len(body))], body)


# --- Connections ---


_MAX_HEAD_BYTES = 64 * 1024  # of the request line, header fields and trailer fields
_MAX_FIELDS = 100
_KEEP_ALIVE_S = 75
_LINGER_S = 1.0
_HEAD_TOO_LARGE = f"the request's head is too large: at most {_MAX_FIELDS} fields and {_MAX_HEAD_BYTES:,} bytes."


class _HeadTooLarge(Exception):
    """A request has too many header fields, or too long ones."""


class _NoRequest(Exception):
    """A request for something that is not a server of pages: a tunnel."""


class HttpConnection(asyncio.Protocol):
    """One client's connection: a request is answered after the one before it.

    A request that cannot be parsed, has too large a head or comes too slowly is rejected: the server answers the
    earlier requests of the connection, then this one, and reads nothing more. A refusal is sent before a task is
    created and the body is read, because an overloaded server has little time for the requests that it refuses.

    Reading stops while an earlier request is waiting: a client that sends thousands of requests and reads answers
    slowly would fill the memory.
    """

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._requests: deque[Request] = deque()  # unanswered, in order; the first one is being answered
        self._arriving: Request | None = None  # whose body is arriving; None if it was refused
        self._in_body = False
        self._is_last = False  # no request follows
        self._is_reading = True
        self._rejection: bytes | None = None
        self._drained: asyncio.Future[None] | None = None  # while the client reads more slowly than we write
        self._head_bytes = 0
        self._fields = 0
        self._unparsed_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self.client = ""

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.client = (transport.get_extra_info("peername") or ("",))[0]
        self._server.connections.add(self)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for request in self._requests:
            request.disconnect()
        self._requests.clear()
        self.resume_writing()
        self._server.forget(self)

    def pause_writing(self) -> None:
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    def data_received(self, data: bytes) -> None:
        # The parser keeps what it has read of a field, and reports a field only when it is complete.
        while data and self._rejection is None and not self._ignores_more():
            piece, data = data[:_MAX_HEAD_BYTES], data[_MAX_HEAD_BYTES:]
            self._unparsed_bytes += len(piece)
            try:
                self._parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + piece[upgrade.args[0] :] + data
            except httptools.HttpParserError as error:
                if self._ignores_more():
                    return
                if isinstance(error.__context__, _HeadTooLarge):
                    self._reject(431, _HEAD_TOO_LARGE)
                else:
                    self._reject(400, "this is not a valid HTTP request.")
                return
            if self._unparsed_bytes > _MAX_HEAD_BYTES:
                self._reject(431, _HEAD_TOO_LARGE)
                return

    def shut_down(self) -> None:
        """Answer what has arrived, and close."""
        self._is_last = True
        if self._requests:
            self._requests[-1].keep_alive = False
        else:
            self._transport.close()

    def abort(self) -> Any:
        """Close at once; return the client's address."""
        self._transport.abort()
        return self._transport.get_extra_info("peername")

    # The parser's side

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._fields = 0
        self._unparsed_bytes = 0
        self._in_body = False
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._expects_continue = False
        self._await_request()

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        self._count_head(len(name) + len(value) + len(b": \r\n"))
        if self._in_body:
            return  # a trailer must not look like a header, which may have been checked already
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._unparsed_bytes = 0
        parser = self._parser
        method = parser.get_method()
        if parser.should_upgrade():
            if method == b"CONNECT":
                raise _NoRequest
            return  # it comes again, see _head_without_upgrade
        keep_alive = parser.should_keep_alive() and parser.get_http_version() == "1.1" and not self._is_last
        # A client that sends without reading gets no refusal.
        if method == b"POST" and keep_alive and not self._requests and self._drained is None:
            refusal = None if self._expects_continue else self._server.refuse(self._url, self._headers)
            if refusal is not None:
                self._arriving = None
                self._in_body = True
                headers = (self._server.date(), *refusal.headers)
                self._transport.write(_render_error(refusal.status, str(refusal), headers))
                return
        path = httptools.parse_url(self._url).path.decode("ascii")
        request = Request(
            self,
            method.decode("ascii"),
            unquote(path) if "%" in path else path,
            dict(self._headers),
            keep_alive=keep_alive,
            expects_continue=self._expects_continue,
        )
        self._arriving = request
        self._in_body = True
        self._is_last = not keep_alive
        self._requests.append(request)
        if len(self._requests) == 1:
            self._server.keep(self._respond(request))
        else:
            self.update_reading()

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        request = self._arriving
        if request is not None and not request.is_answered:
            request.add(body)
            self.update_reading()

    def on_message_complete(self) -> None:
        if not self._in_body:
            return  # it offers an upgrade
        self._unparsed_bytes = 0
        self._in_body = False
        self._deadline = math.inf
        request, self._arriving = self._arriving, None
        if request is None or request.is_answered:
            self._await_next_request()
        else:
            request.complete()

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > _MAX_HEAD_BYTES or self._fields > _MAX_FIELDS:
            raise _HeadTooLarge

    def _head_without_upgrade(self) -> bytes:
        """Return the head that has just arrived, without its offer to change to another protocol.

        httptools takes what follows such a head for the other protocol, and so it would lose the body. A server may
        ignore the offer: https://www.rfc-editor.org/rfc/rfc9110#section-7.8.
        """
        line = b"%s %s HTTP/%s\r\n" % (
            self._parser.get_method(),
            self._url,
            self._parser.get_http_version().encode(),
        )
        fields = [b"%s: %s\r\n" % (name, value) for name, value in self._headers if name != b"upgrade"]
        self._parser = httptools.HttpRequestParser(self)
        return b"".join([line, *fields, b"\r\n"])

    def _ignores_more(self) -> bool:
        """Return whether the last request has arrived."""
        return self._is_last and not self._in_body

    # Answers

    async def _respond(self, request: Request) -> None:
        answer = await self._server.app(request)
        while self._drained is not None:
            await self._drained
        if request.is_gone:
            return
        if answer is None:
            self._transport.close()
            return
        status, headers, body = answer
        if _CLOSE in headers or self._server.is_closing:
            request.keep_alive = False
        ending = [] if request.keep_alive or _CLOSE in headers else [_CLOSE]
        self._transport.write(_render(status, [self._server.date(), *headers, *ending], body))
        request.is_answered = True
        self._requests.popleft()
        if not request.keep_alive:
            self._transport.close()
            return
        self.update_reading()
        if self._requests:
            self._server.keep(self._respond(self._requests[0]))
        elif self._rejection is not None:
            self._send_rejection()
        elif math.isinf(self._deadline):
            self._await_next_request()
        else:
            # Reading was paused until this answer was sent, so the client can send the rest only now.
            self._await_request()

    def send_continue(self) -> None:
        self._transport.write(_CONTINUE)

    def update_reading(self) -> None:
        """Read from the client, unless it has sent enough."""
        arriving = self._arriving
        is_full = arriving is not None and not arriving.is_answered and arriving.buffered_bytes > _MAX_BUFFERED_BYTES
        should_read = len(self._requests) < 2 and not is_full and self._rejection is None
        if should_read is self._is_reading or self._transport.is_closing():
            return
        self._is_reading = should_read
        if should_read:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    # Timeouts and rejections

    def _await_request(self) -> None:
        self._set_deadline(self._server.receive_timeout_s, self._give_up)

    def _await_next_request(self) -> None:
        self._set_deadline(_KEEP_ALIVE_S, self._transport.close)

    def _set_deadline(self, within_s: float, on_expired: Callable[[], None]) -> None:
        """Call ``on_expired`` after ``within_s`` unless another deadline is set before.

        A timer that fires earlier is kept, since two timers per request would cost as much as a refusal.
        """
        self._deadline = self._loop.time() + within_s
        self._on_expired = on_expired
        if self._timer is not None and self._timer.when() > self._deadline:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if math.isinf(self._deadline) or self._transport.is_closing():
            return
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._on_timer)
            return
        self._deadline = math.inf
        self._on_expired()

    def _give_up(self) -> None:
        if any(request is not self._arriving for request in self._requests):
            # The client may be waiting because this server has paused reading.
            self._await_request()
            return
        self._reject(408, "the request came too slowly.")

    def _reject(self, status: int, message: str) -> None:
        """Answer the request that is being read, after the earlier ones, and close the connection."""
        self._deadline = math.inf
        if self._transport.is_closing():
            return
        self._rejection = _render_error(status, message, (self._server.date(), _CLOSE))
        if self._in_body:
            if self._arriving is None or self._arriving.is_answered:
                self._rejection = b""
            else:
                self._requests.remove(self._arriving)
                self._arriving.disconnect()
        self.update_reading()
        if not self._requests:
            self._send_rejection()

    def _send_rejection(self) -> None:
        if self._transport.is_closing():
            return
        if self._rejection:
            self._transport.write(self._rejection)
        # A client that is still sending would not see the answer if the connection were closed at once.
        self._transport.write_eof()
        self._set_deadline(_LINGER_S, self._transport.close)


BACKLOG = 2048
"""Connections that may wait to be accepted."""


class HttpServer:
    """The connections of one server.

    Args:
        refuse: called with the head of a POST.

    Attributes:
        is_closing: each connection is closed after its next answer.
    """

    def __init__(self, app: App, refuse: Refuse, receive_timeout_s: float) -> None:
        self.app = app
        self.refuse = refuse
        self.receive_timeout_s = receive_timeout_s
        self.connections: set[HttpConnection] = set()
        self.is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._forgotten = asyncio.Event()
        self._date = (0, b"")
        self._server: asyncio.Server | None = None

    async def start(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: HttpConnection(self), sock=bound, backlog=BACKLOG)

    async def close(self) -> None:
        """Accept no more connections, and return when all accepted requests are answered and sent."""
        self.is_closing = True
        if self._server is not None:
            self._server.close()
        for connection in tuple(self.connections):
            connection.shut_down()
        while self.connections:
            self._forgotten.clear()
            await self._forgotten.wait()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def keep(self, response: Coroutine[Any, Any, None]) -> None:
        """Start a task, and keep it until it is done; the event loop does not."""
        task = asyncio.get_running_loop().create_task(response)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget(self, connection: HttpConnection) -> None:
        self.connections.discard(connection)
        self._forgotten.set()

    def date(self) -> tuple[bytes, bytes]:
        """Return the header field with the time in seconds."""
        now = int(time.time())
        if self._date[0] != now:
            self._date = (now, formatdate(now, usegmt=True).encode())
        return b"date", self._date[1]


# --- The bodies of requests that a server holds: read with bounds, and parsed outside of the event loop if large ---


LARGE_BYTES = 256 * 1024
"""What is at most as large is parsed in the event loop, where it takes a few milliseconds."""

_T = TypeVar("_T")
_BODIES = 4  # of the largest size, at the same time
_UNCOUNTED_BYTES = 64 * 1024  # of each body; a connection holds as much anyway
_RETRY_AFTER_S = 1


class RequestBodies:
    """The bodies that one server holds, over all connections and protocols.

    Small bodies are always accepted, so that clients with large ones cannot keep others out.

    Attributes:
        held_bytes: of all bodies, without the first 64 KiB of each.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self.held_bytes = 0
        self.max_held_bytes = _BODIES * max_body_bytes
        # One thread: several would compete with the event loop for the interpreter.
        self._thread = ThreadPoolExecutor(1, "paceline-parse")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts bytes of one body, and refuses them if the server would hold too many."""
        size = counted = 0

        def add(more: int) -> None:
            nonlocal size, counted
            size += more
            uncounted = max(0, size - _UNCOUNTED_BYTES) - counted
            if self.held_bytes + uncounted > self.max_held_bytes:
                raise RequestFailure(
                    503,
                    f"the server holds requests of {self.held_bytes:,} bytes, and accepts at most "
                    f"{self.max_held_bytes:,}. Try again in {_RETRY_AFTER_S} s.",
                    [(b"retry-after", str(_RETRY_AFTER_S).encode())],
                )
            self.held_bytes += uncounted
            counted += uncounted

        try:
            yield add
        finally:
            self.held_bytes -= counted

    def run(self, function: Callable[..., _T], *arguments: Any) -> asyncio.Future[_T]:
        """Call a function of a large body in the thread."""
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


async def read_body(request: Request, limit: int, hold: Callable[[int], None]) -> bytes | bytearray:
    """Read a request's body.

    Args:
        hold: counts its bytes.

    Raises:
        RequestFailure: it has more than ``limit`` bytes, or the server holds too many.
        ClientGone: the client has disconnected.
    """
    # Its parser takes up to 20 digits after any number of zeros.
    declared = int(request.headers.get(b"content-length", b"").lstrip(b"0") or b"0")
    if declared > limit:
        raise RequestFailure(413, f"the body has {declared:,} bytes; at most {limit:,} are allowed.")
    first = await request.read()
    hold(len(first))
    if not request.has_more:
        return first
    body = bytearray(first)
    while piece := await request.read():
        if len(body) + len(piece) > limit:
            await _discard(request, limit)
            raise RequestFailure(413, f"the body has more than {limit:,} bytes.", [(b"connection", b"close")])
        hold(len(piece))
        body += piece
    return body


async def _discard(request: Request, limit: int) -> None:
    """Read on for a while: a client that is still sending when the connection closes does not see the answer."""
    discarded = 0
    while discarded < limit and (piece := await request.read()):
        discarded += len(piece)
