"""The server's process: its connections, signals and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.environment import is_loopback
from paceline.core.errors import ConfigError
from paceline.core.plugins import import_library, install_command
from paceline_serving.access import AccessPolicy, BearerTokens, check_cors_origins
from paceline_serving.app import App, DeploymentFactory, Models
from paceline_serving.connection import BACKLOG, HttpServer
from paceline_serving.model import ServedModel, ServingOptions

# --- One server process, from binding its socket to its end ---


@dataclass(frozen=True, kw_only=True)
class ListenAddress:
    """Where a server listens, and the access to it; gRPC only if it has a port."""

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    tokens: BearerTokens | None = None
    admin_token: str | None = None
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
        bound.listen(BACKLOG)
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {host}, port {port}: {error.strerror}. --port 0 picks a free one.")


log = logging.getLogger("paceline_serving")


class ServerShutdown:
    """The requested kind of shutdown, by SIGTERM and SIGINT: drain, drain without delay, or force."""

    def __init__(self) -> None:
        self.force = asyncio.Event()
        self.requested = asyncio.Event()
        self._skip_delay = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._skip_delay.is_set():
            self.force.set()
        # Ctrl-C need not wait for a load balancer.
        if self.requested.is_set() or number == signal.SIGINT:
            self._skip_delay.set()
        self.requested.set()

    async def allows(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run the work, or cancel it when a shutdown is requested first; return whether it was finished."""
        task = asyncio.create_task(work)
        await _first(task, self.requested)
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            return False
        task.result()
        return True

    async def delay(self, delay_s: float) -> None:
        """Return when the server must refuse connections, at most ``delay_s`` after the request."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._skip_delay.wait(), delay_s)

    async def unless_forced(self, task: asyncio.Task[None], timeout_s: float | None = None) -> None:
        """Wait for a task, until it is done, the time is up, or the shutdown is forced."""
        await _first(task, self.force, timeout_s)


async def _first(task: asyncio.Task[None], event: asyncio.Event, timeout_s: float | None = None) -> None:
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait((task, waiting), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


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
        on_ready: called with the URL, and the gRPC address if any, when all replicas are ready.
        deploy: makes a model's deployment; by default of processes of this machine.

    Raises:
        ConfigError: it cannot listen on the address.
        ServingError: a package cannot be loaded.
    """
    stop = ServerShutdown()
    with bind(address) as bound:
        models = Models(options, deploy)
        app = App(models, options, AccessPolicy(address.tokens, address.cors_origins, address.admin_token))
        async with contextlib.AsyncExitStack() as stack:
            grpc = None
            if address.grpc_port is not None:
                _import_grpc()
                from paceline_serving.grpc_service import GrpcServer

                access = AccessPolicy(address.tokens)
                grpc = GrpcServer(address.host, address.grpc_port, models, options, access, lambda: app.draining)
                stack.push_async_callback(grpc.close)
            if not await stop.allows(models.start(served_models)):
                return
            stack.push_async_callback(models.close)
            if grpc is not None:
                await grpc.start()
            grpc_address = None if grpc is None else grpc.address
            await _serve(app, bound, options, stop, lambda url: on_ready(url, grpc_address))
            if stop.force.is_set():
                models.abandon()
            if grpc is not None:
                await grpc.close(at_once=stop.force.is_set())


def _import_grpc() -> None:
    # Otherwise its C core prints failures that are raised anyway, and warnings at each start of a replica.
    for name, value in (("GRPC_VERBOSITY", "NONE"), ("GRPC_ENABLE_FORK_SUPPORT", "0")):
        os.environ.setdefault(name, value)
    for library in ("grpc", "google.protobuf", "tritonclient.grpc"):
        try:
            import_library(library, "--grpc-port", "grpc")
        except RuntimeError as error:  # of tritonclient, where another library is missing or too old
            why = " ".join(str(error).split())
            raise ConfigError(f"--grpc-port needs {library} ({why}). Install it: {install_command('grpc')}") from error


async def _serve(
    app: App, bound: socket.socket, options: ServingOptions, stop: ServerShutdown, on_ready: Callable[[str], None]
) -> None:
    server = HttpServer(app, app.refuse, options.receive_timeout_s)
    listen(bound)
    await server.start(bound)
    # Exempt the objects that exist now from later garbage collections.
    gc.collect()
    gc.freeze()
    on_ready(url_of(bound))
    await stop.requested.wait()
    app.draining = True
    await stop.delay(options.drain_delay_s)
    # Normally everything is answered and sent within this time, except to clients that do not read.
    closing = asyncio.create_task(server.close())
    await stop.unless_forced(closing, options.receive_timeout_s + options.timeout_s)
    for connection in tuple(server.connections):
        log.warning("aborted the connection of %s", connection.abort())
    await closing


def url_of(bound: socket.socket) -> str:
    """Return the address as clients write it."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if bound.family == socket.AF_INET6 else f"http://{host}:{port}"
