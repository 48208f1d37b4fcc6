"""One server process, from its socket to its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn

from paceline.errors import ConfigError
from paceline.serving.access import Access, is_loopback
from paceline.serving.app import App
from paceline.serving.connection import connection_class
from paceline.serving.grpc_server import GrpcServer
from paceline.serving.models import DeploymentFactory, Models
from paceline.serving.options import ServingOptions
from paceline.serving.servable import Opened

_BACKLOG = 2048
_KEEP_ALIVE_S = 75


@dataclass(frozen=True, kw_only=True)
class Address:
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


def bind(address: Address) -> socket.socket:
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
        self.asked = asyncio.Event()
        self.hurry = asyncio.Event()
        self.now = asyncio.Event()

    def on_signal(self, number: int) -> None:
        if self.hurry.is_set():
            self.now.set()
        # Whoever presses Ctrl-C waits for no load balancer.
        if self.asked.is_set() or number == signal.SIGINT:
            self.hurry.set()
        self.asked.set()


async def serve(
    opened: Sequence[Opened],
    address: Address,
    options: ServingOptions,
    on_ready: Callable[[str, str | None], None],
    deploy: DeploymentFactory | None = None,
) -> None:
    """Serve packages until SIGTERM or SIGINT, then drain.

    After SIGTERM the server says that it is not ready, and asks each client to close its connection, for
    ``drain_notice_s``; then it takes no connections any more, answers what it was asked, and ends.

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
        app = App(models, options, Access(address.token))
        async with _grpc(app, models, address, options) as grpc:
            if not await _unless(stop.asked, models.start(opened)):
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
    app: App, models: Models, address: Address, options: ServingOptions
) -> AsyncIterator[GrpcServer | None]:
    """The gRPC server that was asked for; its port is taken, and given back in the end."""
    if address.grpc_port is None:
        yield None
        return
    access = Access(address.token)
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
    await stop.asked.wait()
    app.draining = True
    if not stop.hurry.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.hurry.wait(), options.drain_notice_s)
    server.should_exit = True
    # Until then all is sent and answered, but for clients that do not read what they asked for.
    longest_s = options.receive_timeout_s + options.timeout_s
    await _first(running, stop.now.wait(), longest_s)
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
