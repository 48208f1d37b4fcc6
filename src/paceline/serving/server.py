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

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from paceline.core.access import is_loopback
from paceline.core.errors import ConfigError
from paceline.serving.access import AccessPolicy
from paceline.serving.app import ON_DISCONNECT, App, DeploymentFactory, Models, error_answer
from paceline.serving.batching import RequestFailure
from paceline.serving.grpc_server import GrpcServer
from paceline.serving.model import ServedModel, ServingOptions

# --- uvicorn's HTTP connection; it also ends slow clients, tells of those that went away, and refuses early


Refuse = Callable[[bytes, Sequence[tuple[bytes, bytes]]], RequestFailure | None]
"""Why a POST is to be refused, by its URL and its headers."""

_TOO_SLOW = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b'content-length: 41\r\n\r\n{"error":"the request came too slowly."}\n'
)


class _RequestFlow(FlowControl):
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

    class HttpConnection(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.flow = _RequestFlow(transport, self.pipeline)
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

    return HttpConnection


@lru_cache(maxsize=256)  # one that is asked for too much says the same thousands of times a second
def _rendered(status: int, headers: Sequence[tuple[bytes, bytes]], message: str) -> bytes:
    _, all_headers, body = error_answer(status, message, headers)
    lines = [b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode())]
    lines += [b"%s: %s" % header for header in all_headers]
    return b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", body])


# --- One server process, from its socket to its end ---


_BACKLOG = 2048
_KEEP_ALIVE_S = 75


@dataclass(frozen=True, kw_only=True)
class ListenAddress:
    """Where a server listens, and who may talk to it; gRPC only where it has a port."""

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    token: str | None = None

    def __post_init__(self) -> None:
        for name, port in (("port", self.port), ("grpc-port", self.grpc_port)):
            if port is not None and not 0 <= port <= 65535:
                raise ConfigError(f"--{name} must be between 0 and 65535, but is {port}.")
        if self.token is None and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} can be reached from other machines, so it needs --token-file. "
                "Without one, listen on 127.0.0.1."
            )


def bind(address: ListenAddress) -> socket.socket:
    """A socket at the address; it does not listen yet.

    Raises:
        ConfigError: the port is in use, or the host is not this machine's.
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(place)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        raise _cannot_listen(address.host, address.port, error) from error
    return bound


def listen(bound: socket.socket) -> None:
    """Take connections from now on.

    Raises:
        ConfigError: another server, which was started at the same time, was faster.
    """
    try:
        bound.listen(_BACKLOG)
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {host}, port {port}: {error.strerror}. --port 0 takes a free one.")


log = logging.getLogger("paceline.serving")


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers: ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Stop:
    """What signals ask for: to drain; without a notice; to break off."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.skip_delay = asyncio.Event()
        self.force = asyncio.Event()

    def on_signal(self, number: int) -> None:
        if self.skip_delay.is_set():
            self.force.set()
        # Whoever presses Ctrl-C waits for no load balancer.
        if self.requested.is_set() or number == signal.SIGINT:
            self.skip_delay.set()
        self.requested.set()


async def serve(
    opened: Sequence[ServedModel],
    address: ListenAddress,
    options: ServingOptions,
    on_ready: Callable[[str, str | None], None],
    deploy: DeploymentFactory | None = None,
) -> None:
    """Serve packages until SIGTERM or SIGINT, then drain.

    After SIGTERM the server says that it is not ready, and asks each client to close its connection, for
    ``drain_delay_s``; then it takes no connections any more, answers what it was asked, and ends.

    Args:
        opened: the packages.
        address: where.
        options: how.
        on_ready: called with the server's URL, and where it speaks gRPC, when all replicas are ready.
        deploy: what makes a model's deployment; default: processes of this machine.

    Raises:
        ConfigError: it cannot listen there.
        ServingError: a package cannot be loaded.
    """
    loop = asyncio.get_running_loop()
    stop = _Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.on_signal, number)
    with bind(address) as bound:
        models = Models(options, deploy)
        app = App(models, options, AccessPolicy(address.token))
        async with _grpc(app, models, address, options) as grpc:
            if not await _unless(stop.requested, models.start(opened)):
                return
            try:
                if grpc is not None:
                    await grpc.start()
                where = None if grpc is None else grpc.address
                await _serve(app, bound, options, stop, lambda url: on_ready(url, where))
                if grpc is not None:
                    await grpc.close()
            finally:
                await models.close()


@contextlib.asynccontextmanager
async def _grpc(
    app: App, models: Models, address: ListenAddress, options: ServingOptions
) -> AsyncIterator[GrpcServer | None]:
    """The gRPC server that was asked for; its port is taken, and given back in the end."""
    if address.grpc_port is None:
        yield None
        return
    access = AccessPolicy(address.token)
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


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work, or give it up when the event comes first; whether it was done."""
    doing = asyncio.create_task(work)
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait((doing, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not doing.done():
        doing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await doing
        return False
    doing.result()
    return True


async def _serve(
    app: App, bound: socket.socket, options: ServingOptions, stop: _Stop, on_ready: Callable[[str], None]
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
    running = asyncio.create_task(server.serve(sockets=[bound]))
    while not server.started and not running.done():
        await asyncio.sleep(0.01)
    if running.done():
        running.result()
    # What is here now stays: it need not be looked at whenever garbage is collected.
    gc.collect()
    gc.freeze()
    on_ready(url_of(bound))
    await stop.requested.wait()
    app.draining = True
    if not stop.skip_delay.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.skip_delay.wait(), options.drain_delay_s)
    server.should_exit = True
    # Until then all is sent and answered, but for clients that do not read what they asked for.
    longest_s = options.receive_timeout_s + options.timeout_s
    await _first(running, stop.force.wait(), longest_s)
    for connection in list(server.server_state.connections):
        peer = connection.transport.get_extra_info("peername")
        log.warning("broke off the connection of %s", peer)
        connection.transport.abort()
    await running


async def _first(running: asyncio.Task[None], other: Coroutine[Any, Any, Any], longest_s: float) -> None:
    waiting = asyncio.create_task(other)
    await asyncio.wait((running, waiting), timeout=longest_s, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


def url_of(bound: socket.socket) -> str:
    """The address as clients write it."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if bound.family == socket.AF_INET6 else f"http://{host}:{port}"
