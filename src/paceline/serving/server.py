"""The server's process: its connections, signals and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from paceline.core.access import BearerTokens, is_loopback
from paceline.core.errors import ConfigError
from paceline.serving.access import AccessPolicy, check_cors_origins
from paceline.serving.app import ON_DISCONNECT, App, DeploymentFactory, Models, error_answer
from paceline.serving.batching import RequestFailure
from paceline.serving.grpc_server import GrpcServer
from paceline.serving.model import ServedModel, ServingOptions

# --- HTTP connections: uvicorn's, with timeouts for slow clients, bounded heads, disconnect events and early refusal


Refuse = Callable[[bytes, Sequence[tuple[bytes, bytes]]], RequestFailure | None]
"""Returns why to refuse a POST, by its URL and its headers."""

_MAX_HEAD_BYTES = 64 * 1024  # of the request line, header fields and trailer fields
_MAX_FIELDS = 100
_LINGER_S = 1.0
_HEAD_TOO_LARGE = f"the request's head is too large: at most {_MAX_FIELDS} fields and {_MAX_HEAD_BYTES:,} bytes."


class _HeadTooLarge(Exception):
    """A request has too many header fields, or too long ones."""


class _RequestFlow(FlowControl):
    """A flow control that stops reading while an earlier request is waiting, and for good after :meth:`stop`.

    uvicorn reads on after each answer, so a client that sends thousands of requests and reads answers slowly
    would fill the memory.
    """

    def __init__(self, transport: asyncio.Transport, waiting: Sized) -> None:
        super().__init__(transport)
        self._waiting = waiting
        self._stopped = False

    def stop(self) -> None:
        self.pause_reading()
        self._stopped = True

    def resume_reading(self) -> None:
        if not self._waiting and not self._stopped:
            super().resume_reading()


def connection_class(receive_timeout_s: float, refuse: Refuse) -> type[asyncio.Protocol]:
    """Return a protocol for uvicorn whose clients must send a request within ``receive_timeout_s``.

    A request that cannot be parsed, has too large a head or comes too slowly is rejected: the server answers the
    earlier requests of the connection, then this one, and reads nothing more. A refusal is sent before a task is
    created and the body is read, because an overloaded server has little time for the requests that it refuses.
    """

    class HttpConnection(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.flow = _RequestFlow(transport, self.pipeline)
            self._waiting: set[asyncio.Future[Any]] = set()
            self._previous: RequestResponseCycle | None = None
            self._refused = False
            self._rejection: bytes | None = None
            self._awaited: RequestResponseCycle | None = None  # the answer that a rejection waits for
            self._in_body = False
            self._head_bytes = self._fields = self._unparsed_bytes = 0
            self._timer: asyncio.TimerHandle | None = None
            self._await_request()

        def data_received(self, data: bytes) -> None:
            if self._rejection is not None:
                return
            self._unset_keepalive_if_required()
            # The parser keeps what it has read of a field, and reports a field only when it is complete.
            while data:
                piece, data = data[:_MAX_HEAD_BYTES], data[_MAX_HEAD_BYTES:]
                self._unparsed_bytes += len(piece)
                try:
                    self.parser.feed_data(piece)
                except httptools.HttpParserUpgrade as upgrade:
                    # No other protocol is supported, so the connection stays as it is.
                    data = piece[max(1, upgrade.args[0]) :] + data
                except httptools.HttpParserError as error:
                    if isinstance(error.__context__, _HeadTooLarge):
                        self._reject(431, _HEAD_TOO_LARGE)
                    else:
                        self._reject(400, "this is not a valid HTTP request.")
                    return
                if self._unparsed_bytes > _MAX_HEAD_BYTES:
                    self._reject(431, _HEAD_TOO_LARGE)
                    return

        def on_url(self, url: bytes) -> None:
            self.url += url
            self._count_head(len(url))

        def on_header(self, name: bytes, value: bytes) -> None:
            self._fields += 1
            self._count_head(len(name) + len(value) + len(b": \r\n"))
            if self._in_body:
                return  # a trailer must not look like a header, which may have been checked already
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            self.headers.append((name, value))

        def _count_head(self, size: int) -> None:
            self._head_bytes += size
            if self._head_bytes > _MAX_HEAD_BYTES or self._fields > _MAX_FIELDS:
                raise _HeadTooLarge

        def on_message_begin(self) -> None:
            self._head_bytes = self._fields = self._unparsed_bytes = 0
            self._in_body = False
            # Skip what uvicorn prepares for a request, which a refusal does not need.
            self.url = b""
            self.headers = []
            self.expect_100_continue = False
            self._previous = self.cycle
            self._refused = False
            self._await_request()

        def on_headers_complete(self) -> None:
            self._unparsed_bytes = 0
            self._in_body = True
            # A client that sends without reading is left to uvicorn, which stops reading from it.
            parser = self.parser
            if (
                not self.flow.write_paused
                and not self._has_unanswered_request()
                and parser.get_method() == b"POST"
                and parser.should_keep_alive()
                and parser.get_http_version() == "1.1"
            ):
                refusal = None if self.expect_100_continue else refuse(self.url, self.headers)
                if refusal is not None:
                    self._refused = True
                    headers = (*self.server_state.default_headers, *refusal.headers)
                    self.transport.write(_render(refusal.status, headers, str(refusal)))
                    return
            request_head = self.url, self.headers, self.expect_100_continue
            super().on_message_begin()
            self.url, self.headers, self.expect_100_continue = request_head
            scope: dict[str, Any] = cast("dict[str, Any]", self.scope)
            scope["headers"] = self.headers
            scope["extensions"] = {ON_DISCONNECT: self._waiting}
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._unparsed_bytes = 0
            if not self._refused:
                super().on_body(body)

        def on_message_complete(self) -> None:
            self._unparsed_bytes = 0
            self._in_body = False
            self._deadline = math.inf
            if self._refused:
                self._await_next_request()
                return
            if self.cycle.response_complete:  # before its body was complete
                self._await_next_request()
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._rejection is not None:
                self._unset_keepalive_if_required()
                self._send_rejection()
            elif self.timeout_keep_alive_task is not None:
                # uvicorn's timer ends with the next byte, even if it belongs to an answered request.
                self._unset_keepalive_if_required()
                if math.isinf(self._deadline):
                    self._await_next_request()
            elif not math.isinf(self._deadline):
                # Reading was paused until this answer was sent, so the client can send the rest only now.
                self._await_request()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            for future in tuple(self._waiting):
                future.cancel()

        def _has_unanswered_request(self) -> bool:
            """Return whether the previous request is unanswered."""
            return self._previous is not None and not self._previous.response_complete

        def _await_request(self) -> None:
            self._set_deadline(receive_timeout_s, self._give_up)

        def _await_next_request(self) -> None:
            self._set_deadline(self.timeout_keep_alive, self.timeout_keep_alive_handler)

        def _set_deadline(self, within_s: float, on_expired: Callable[[], None]) -> None:
            """Call ``on_expired`` after ``within_s`` unless another deadline is set before.

            A timer that fires earlier is kept, since two timers per request would cost as much as a refusal.
            """
            self._deadline = self.loop.time() + within_s
            self._on_expired = on_expired
            if self._timer is not None and self._timer.when() > self._deadline:
                self._timer.cancel()
                self._timer = None
            if self._timer is None:
                self._timer = self.loop.call_at(self._deadline, self._on_timer)

        def _on_timer(self) -> None:
            self._timer = None
            if math.isinf(self._deadline) or self.transport.is_closing():
                return
            if self.loop.time() < self._deadline:
                self._timer = self.loop.call_at(self._deadline, self._on_timer)
                return
            self._deadline = math.inf
            self._on_expired()

        def _give_up(self) -> None:
            if self._has_unanswered_request():
                # The client may be waiting because this server has paused reading.
                self._await_request()
                return
            self._reject(408, "the request came too slowly.")

        def _reject(self, status: int, message: str) -> None:
            """Answer the request that is being read, after the earlier ones, and close the connection."""
            self._deadline = math.inf
            if self.transport.is_closing():
                return
            cast("_RequestFlow", self.flow).stop()
            self._rejection = _render(status, (*self.server_state.default_headers, _CLOSE), message)
            # uvicorn's type is not optional. It is the previous request's cycle until this request's headers arrive.
            cycle = cast("RequestResponseCycle | None", self.cycle)
            if self._in_body and self._refused:
                self._rejection = b""
            elif self._in_body and cycle is not None:
                if cycle.response_started:
                    self._rejection = b""
                cycle.disconnected = True
                cycle.message_event.set()
                if self.pipeline and self.pipeline[0][0] is cycle:
                    self.pipeline.popleft()
                cycle = self._previous
            self._awaited = cycle
            self._send_rejection()

        def _send_rejection(self) -> None:
            if self.transport.is_closing() or (self._awaited is not None and not self._awaited.response_complete):
                return
            if self._rejection:
                self.transport.write(self._rejection)
            # A client that is still sending would not see the answer if the connection were closed at once.
            self.transport.write_eof()
            self._set_deadline(_LINGER_S, self.transport.close)

    return HttpConnection


_CLOSE = (b"connection", b"close")


@lru_cache(maxsize=256)  # an overloaded server sends the same answer thousands of times a second
def _render(status: int, headers: Sequence[tuple[bytes, bytes]], message: str) -> bytes:
    _, all_headers, body = error_answer(status, message, headers)
    lines = [b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode())]
    lines += [b"%s: %s" % header for header in all_headers]
    return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", body])


# --- One server process, from binding its socket to its end ---


_BACKLOG = 2048
_KEEP_ALIVE_S = 75


@dataclass(frozen=True, kw_only=True)
class ListenAddress:
    """Where a server listens, and the access to it; gRPC only if it has a port.

    Attributes:
        tokens: of its clients.
        cors_origins: of the pages in a browser that may use it.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    tokens: BearerTokens | None = None
    cors_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, port in (("port", self.port), ("grpc-port", self.grpc_port)):
            if port is not None and not 0 <= port <= 65535:
                raise ConfigError(f"--{name} must be between 0 and 65535, but is {port}.")
        check_cors_origins(self.cors_origins)
        if self.tokens is None and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} can be reached from other machines, so it needs --token-file. "
                "Without a token, listen on 127.0.0.1."
            )


def bind(address: ListenAddress) -> socket.socket:
    """Bind a socket to the address, without listening.

    Raises:
        ConfigError: the port is in use, or the host is not this machine's.
    """
    try:
        family, kind, protocol, _, socket_address = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(socket_address)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        raise _cannot_listen(address.host, address.port, error) from error
    return bound


def listen(bound: socket.socket) -> None:
    """Accept connections from now on.

    Raises:
        ConfigError: another server took the port first.
    """
    try:
        bound.listen(_BACKLOG)
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {host}, port {port}: {error.strerror}. --port 0 picks a free one.")


log = logging.getLogger("paceline.serving")


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers, since ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Shutdown:
    """The requested kind of shutdown: drain, drain without delay, or force."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.skip_delay = asyncio.Event()
        self.force = asyncio.Event()

    def on_signal(self, number: int) -> None:
        if self.skip_delay.is_set():
            self.force.set()
        # Ctrl-C need not wait for a load balancer.
        if self.requested.is_set() or number == signal.SIGINT:
            self.skip_delay.set()
        self.requested.set()


async def serve(
    served_models: Sequence[ServedModel],
    address: ListenAddress,
    options: ServingOptions,
    on_ready: Callable[[str, str | None], None],
    deploy: DeploymentFactory | None = None,
) -> None:
    """Serve packages until SIGTERM or SIGINT, then drain.

    After SIGTERM the server reports that it is not ready, and asks each client to close its connection, for
    ``drain_delay_s``; then it refuses connections, answers the accepted requests, and ends.

    Args:
        served_models: opened from packages.
        address: to listen on.
        options: of the server.
        on_ready: called with the URL, and the gRPC address if any, when all replicas are ready.
        deploy: makes a model's deployment; by default of processes of this machine.

    Raises:
        ConfigError: it cannot listen on the address.
        ServingError: a package cannot be loaded.
    """
    loop = asyncio.get_running_loop()
    stop = _Shutdown()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.on_signal, number)
    with bind(address) as bound:
        models = Models(options, deploy)
        app = App(models, options, AccessPolicy(address.tokens, address.cors_origins))
        async with _grpc(app, models, address, options) as grpc:
            if not await _run_unless(stop.requested, models.start(served_models)):
                return
            try:
                if grpc is not None:
                    await grpc.start()
                grpc_address = None if grpc is None else grpc.address
                await _serve(app, bound, options, stop, lambda url: on_ready(url, grpc_address))
                if grpc is not None:
                    await grpc.close()
            finally:
                await models.close()


@contextlib.asynccontextmanager
async def _grpc(
    app: App, models: Models, address: ListenAddress, options: ServingOptions
) -> AsyncIterator[GrpcServer | None]:
    """Take the port of the gRPC server, if requested, and release it at the end."""
    if address.grpc_port is None:
        yield None
        return
    access = AccessPolicy(address.tokens)
    server = GrpcServer(
        *(address.host, address.grpc_port),
        models=models,
        options=options,
        access=access,
        is_draining=lambda: app.draining,
    )
    try:
        yield server
    finally:
        await server.close()


async def _run_unless(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run the work, or cancel it when the event comes first; return whether it was finished."""
    task = asyncio.create_task(work)
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return False
    task.result()
    return True


async def _serve(
    app: App, bound: socket.socket, options: ServingOptions, stop: _Shutdown, on_ready: Callable[[str], None]
) -> None:
    config = uvicorn.Config(
        app,
        http=connection_class(options.receive_timeout_s, app.refuse),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    server = _Uvicorn(config)
    listen(bound)
    server_task = asyncio.create_task(server.serve(sockets=[bound]))
    while not server.started and not server_task.done():
        await asyncio.sleep(0.01)
    if server_task.done():
        server_task.result()
    # Exempt the objects that exist now from later garbage collections.
    gc.collect()
    gc.freeze()
    on_ready(url_of(bound))
    await stop.requested.wait()
    app.draining = True
    if not stop.skip_delay.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.skip_delay.wait(), options.drain_delay_s)
    server.should_exit = True
    # Normally everything is answered and sent within this time, except to clients that do not read.
    timeout_s = options.receive_timeout_s + options.timeout_s
    await _wait_for_first(server_task, stop.force.wait(), timeout_s)
    for connection in list(server.server_state.connections):
        peer = connection.transport.get_extra_info("peername")
        log.warning("aborted the connection of %s", peer)
        connection.transport.abort()
    await server_task


async def _wait_for_first(server_task: asyncio.Task[None], other: Coroutine[Any, Any, Any], timeout_s: float) -> None:
    waiting = asyncio.create_task(other)
    await asyncio.wait((server_task, waiting), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


def url_of(bound: socket.socket) -> str:
    """Return the address as clients write it."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if bound.family == socket.AF_INET6 else f"http://{host}:{port}"
