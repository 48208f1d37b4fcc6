"""The front of ``paceline serve --engine``: access, readiness, drain, hot swap and metrics of an engine's HTTP API.

An engine's answer passes through; only the model has the gateway's name in it. No answer is cut without an error: when
an engine dies, a stream of events ends with an error event, and any other answer with a status of 502 or a broken
connection. An engine that stands still is killed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from paceline.core.errors import PacelineError
from paceline_serving.access import AccessPolicy
from paceline_serving.app import CONTENT_TYPE
from paceline_serving.batching import RequestFailure
from paceline_serving.engines import EngineName, EngineProcess
from paceline_serving.server import ListenAddress, bind, url_of

_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "date", "server"})
_PRIVATE = frozenset({"host", "authorization", "content-length", "accept-encoding", *_HOP_BY_HOP})
_RETRY = ((b"retry-after", b"1"),)
_LONGEST_PAUSE_S = 30.0
_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_TAIL_BYTES = 4096
_KEY, _MAX_SPACES = b'"model":', 16
_BUSY = 0.05
"""The share of one CPU that an engine uses at least while it computes an answer."""

log = logging.getLogger("paceline_serving")


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    """How a gateway runs its engine.

    Attributes:
        engine: its name.
        arguments: further words of its command.
        open_model: a run's or a model's directory -> the directory that the engine loads.
        max_requests: that may be in flight; further ones get 429.
        max_body_bytes: the largest request.
        startup_timeout_s: how long an engine may take until its first answer.
        hang_timeout_s: how long it may answer no probe, or have requests without sending or computing anything.
        drain_delay_s: how long to report "not ready" after SIGTERM before refusing connections.
    """

    engine: EngineName
    arguments: Sequence[str]
    open_model: Callable[[Path], Path]
    max_requests: int
    max_body_bytes: int
    receive_timeout_s: float
    startup_timeout_s: float
    hang_timeout_s: float
    drain_delay_s: float


class _GatewayMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("paceline_requests", "Requests, by status.", ("code",), registry=self.registry)
        self.tokens = Counter("paceline_tokens", "Generated tokens.", registry=self.registry)
        self.in_flight = Gauge("paceline_requests_in_flight", "Unanswered requests.", registry=self.registry)
        self.restarts = Counter("paceline_engine_restarts", "Engines that died or hung.", registry=self.registry)
        self.swaps = Counter("paceline_swaps", "Models replaced.", registry=self.registry)
        self.first_byte = Histogram(
            "paceline_first_byte_seconds", "Time to the first byte of an answer.", registry=self.registry
        )


class Gateway:
    """Sends requests to the current engine, starts another when it dies, and replaces it without losing a request."""

    def __init__(self, name: str, options: GatewayOptions, access: AccessPolicy) -> None:
        self.draining = False
        self._name = name
        self._options = options
        self._access = access
        self._engine: EngineProcess | None = None
        self._engines: set[EngineProcess] = set()  # with those that finish their answers
        self._metrics = _GatewayMetrics()
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=5.0), limits=httpx.Limits(), trust_env=False
        )
        self._swapping = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def app(self) -> Starlette:
        """The HTTP application."""
        return Starlette(
            routes=[
                Route("/v2/health/live", self._live),
                Route("/v2/health/ready", self._ready),
                Route("/health", self._ready),
                Route("/metrics", self._show_metrics),
                Route("/v2/models", self._models),
                Route("/v1/models", self._openai_models),
                Route("/v2/repository/models/{name}/load", self._load, methods=["POST"]),
                Route("/v1/{path:path}", self._preflight, methods=["OPTIONS"]),
                Route("/v1/{path:path}", self._forward, methods=["GET", "POST"]),
            ],
            exception_handlers={RequestFailure: _refuse},
        )

    # --- Engines

    async def start(self, model: Path) -> None:
        """Start the engine of a model, and wait until it answers.

        Raises:
            ServingError: it does not.
        """
        self._engine = await self._start(model)

    async def close(self) -> None:
        """End all engines."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(engine.stop() for engine in self._engines))
        await self._client.aclose()

    async def _start(self, model: Path) -> EngineProcess:
        return await self._launch(await asyncio.to_thread(self._options.open_model, model))

    async def _launch(self, directory: Path) -> EngineProcess:
        engine = EngineProcess(self._options.engine, directory, self._options.arguments)
        await engine.start(self._client, self._options.startup_timeout_s)
        self._engines.add(engine)
        self._spawn(self._watch(engine))
        self._spawn(engine.probe(self._client, self._options.hang_timeout_s))
        self._spawn(self._kill_if_hung(engine))
        return engine

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, engine: EngineProcess) -> None:
        """Start an engine again when it dies while it is the current one."""
        code = await engine.wait()
        self._engines.discard(engine)
        pause_s = 1.0
        while self._engine is engine and not self.draining:
            self._metrics.restarts.inc()
            log.warning("--engine %s died (exit code %s); another one is started", self._options.engine, code)
            try:
                replacement = await self._launch(engine.model)
            except PacelineError as error:
                log.warning("%s The next try is in %g s.", error, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            if self._engine is not engine:  # a model was loaded meanwhile
                await replacement.stop()
                return
            self._engine = replacement
            log.info("the engine is ready again")

    async def _kill_if_hung(self, engine: EngineProcess) -> None:
        """Kill an engine that stands still: its requests fail, and :meth:`_watch` starts another one."""
        limit_s, cpu_s = self._options.hang_timeout_s, engine.cpu_s()
        before = time.monotonic()
        while engine.is_alive:
            await asyncio.sleep(limit_s / 8)
            now, used_s = time.monotonic(), engine.cpu_s() - cpu_s
            if not engine.in_flight or used_s > _BUSY * (now - before):
                engine.moved_at = now
            before, cpu_s = now, cpu_s + used_s
            still_s = now - min(engine.heard_at, engine.moved_at)
            if still_s > limit_s and engine.is_alive:
                log.warning("--engine %s has stood still for %.0f s, and is killed", self._options.engine, still_s)
                engine.kill()

    async def _retire(self, engine: EngineProcess) -> None:
        while engine.in_flight:
            await asyncio.sleep(0.1)
        await engine.stop()

    # --- Answers

    async def _live(self, request: Request) -> Response:
        return JSONResponse({"live": True})

    async def _ready(self, request: Request) -> Response:
        engine, now = self._engine, time.monotonic()
        ready = engine is not None and engine.is_alive and not self.draining
        if engine is not None and now - min(engine.heard_at, engine.moved_at) > self._options.hang_timeout_s / 2:
            ready = False
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def _show_metrics(self, request: Request) -> Response:
        self._check(request)
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE.decode())

    async def _models(self, request: Request) -> Response:
        self._check(request)
        return JSONResponse({"models": [self._name]})

    async def _openai_models(self, request: Request) -> Response:
        self._check(request)
        return JSONResponse(
            {"object": "list", "data": [{"id": self._name, "object": "model", "created": 0, "owned_by": "paceline"}]}
        )

    async def _load(self, request: Request) -> Response:
        """Replace the model, as ``paceline deploy`` asks: new requests go to the new engine, old ones are finished."""
        headers = self._check(request)
        self._access.check_admin(request.client.host if request.client else "", headers)
        try:
            location = json.loads(await request.body())["parameters"]["package"]
        except (ValueError, KeyError, TypeError):
            raise RequestFailure(400, 'the body must be {"parameters": {"package": "DIRECTORY"}}.') from None
        async with self._swapping:
            try:
                engine = await self._start(Path(location))
            except PacelineError as error:
                raise RequestFailure(409, f"the model was not replaced: {error}") from error
            previous, self._engine = self._engine, engine
            self._metrics.swaps.inc()
            if previous is not None:
                self._spawn(self._retire(previous))
        return JSONResponse({"name": self._name, "version": str(location)})

    async def _preflight(self, request: Request) -> Response:
        """Answer a browser's question before a request."""
        allowed = self._access.preflight(dict(request.headers.raw))
        if allowed is None:
            raise RequestFailure(405, "only GET and POST are allowed here.")
        return Response(headers=self._cors_headers(request) | _texts(allowed))

    def _cors_headers(self, request: Request) -> dict[str, str]:
        return _texts(self._access.cors_headers(dict(request.headers.raw)))

    async def _forward(self, request: Request) -> Response:
        self._check(request)
        self._access.check_origin(dict(request.headers.raw))
        engine = self._engine
        if engine is None or not engine.is_alive:
            raise RequestFailure(503, "the engine is not ready.", _RETRY)
        if engine.in_flight >= self._options.max_requests:
            raise RequestFailure(429, "too many requests are in flight.", _RETRY)
        engine.in_flight += 1
        engine.moved_at = max(engine.moved_at, time.monotonic() if engine.in_flight == 1 else 0.0)
        self._metrics.in_flight.inc()
        start = time.perf_counter()
        try:
            answer = await self._send(engine, request)
        except BaseException:
            self._done(engine, 502)
            raise
        self._metrics.first_byte.observe(time.perf_counter() - start)
        headers = {name: value for name, value in answer.headers.items() if name not in _HOP_BY_HOP}
        if _is_text(answer):
            headers.pop("content-length", None)  # the model's name has another length
        headers |= self._cors_headers(request)
        return StreamingResponse(self._pass_on(engine, answer), answer.status_code, headers)

    async def _send(self, engine: EngineProcess, request: Request) -> httpx.Response:
        """Send a request to the engine; return its answer at the first byte, or drop it if the client leaves."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._options.receive_timeout_s):
                async for piece in request.stream():
                    body += piece
                    if len(body) > self._options.max_body_bytes:
                        raise RequestFailure(413, f"the request is larger than {self._options.max_body_bytes} bytes.")
        except TimeoutError:
            raise RequestFailure(408, "the request came too slowly.") from None
        content = self._addressed(bytes(body), engine) if request.method == "POST" else bytes(body)
        headers = {name: value for name, value in request.headers.items() if name not in _PRIVATE}
        headers["accept-encoding"] = "identity"
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        forwarded = self._client.build_request(request.method, engine.url + path, content=content, headers=headers)
        sending = asyncio.create_task(self._client.send(forwarded, stream=True))
        leaving = asyncio.ensure_future(request.receive())  # after the body, only that the client has left
        await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not sending.done():
            sending.cancel()
            raise RequestFailure(499, "the client has left.")
        try:
            return sending.result()
        except httpx.TransportError as error:
            raise RequestFailure(502, "the engine ended before it answered. Send the request again.") from error

    def _addressed(self, body: bytes, engine: EngineProcess) -> bytes:
        """Return a request with the engine's name of the model in place of the gateway's, which outlives a swap."""
        try:
            document = json.loads(body)
        except ValueError:
            raise RequestFailure(400, "the body must be JSON.") from None
        if not isinstance(document, dict):
            raise RequestFailure(400, "the body must be a JSON object.")
        if document.get("model", self._name) != self._name:
            raise RequestFailure(404, f"there is no model {document['model']!r:.80}; this server has {self._name!r}.")
        return json.dumps({**document, "model": engine.name}).encode()

    async def _pass_on(self, engine: EngineProcess, answer: httpx.Response) -> AsyncIterator[bytes]:
        status, tail, held = answer.status_code, b"", bytearray()
        is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
        its_name = json.dumps(engine.answers_as, ensure_ascii=False).encode()
        name = json.dumps(self._name).encode()

        is_text = _is_text(answer)
        # Within a string of an answer, the quotes have a backslash.
        named = re.compile(rb"(%b\s{0,%d})%b" % (_KEY, _MAX_SPACES, re.escape(its_name)))

        def renamed(text: bytes) -> bytes:
            return named.sub(lambda match: match[1] + name, text)

        try:
            async for piece in answer.aiter_raw():
                engine.moved_at = time.monotonic()
                tail = (tail + piece)[-_TAIL_BYTES:]
                if not is_text:
                    yield piece
                    continue
                held += piece
                if is_stream:  # whole lines, so that an error can follow
                    end = held.rfind(b"\n", len(held) - len(piece)) + 1
                else:
                    end = _start_of_name(held, its_name)
                if end:
                    yield renamed(bytes(held[:end]))
                    del held[:end]
            if held:
                yield renamed(bytes(held))
        except httpx.TransportError:
            status = 502
            if not is_stream:
                raise  # the connection breaks: the client sees that the answer is not whole
            error = {"message": "the engine ended in the middle of this answer", "type": "server_error", "code": 502}
            yield f"\n\ndata: {json.dumps({'error': error})}\n\n".encode()
        except asyncio.CancelledError:
            status = 499
            raise
        finally:
            if tokens := _TOKENS.findall(tail):
                self._metrics.tokens.inc(int(tokens[-1]))
            self._done(engine, status)
            await answer.aclose()

    def _done(self, engine: EngineProcess, status: int) -> None:
        engine.in_flight -= 1
        self._metrics.in_flight.dec()
        self._metrics.requests.labels(str(status)).inc()

    def _check(self, request: Request) -> dict[bytes, bytes]:
        headers = dict(request.headers.raw)
        self._access.check_token(headers)
        return headers


def _is_text(answer: httpx.Response) -> bool:
    """Return whether it is JSON, or events of JSON."""
    kind: str = answer.headers.get("content-type", "")
    return kind.startswith(("application/json", "text/event-stream"))


def _start_of_name(text: bytearray, its_name: bytes) -> int:
    """Return where the model's name begins, with its key, that may continue after the text; else the text's length."""
    longest = len(_KEY) + _MAX_SPACES + len(its_name)
    for quote in re.compile(b'"').finditer(text, max(0, len(text) - longest)):
        key, rest = text[quote.start() :][: len(_KEY)], text[quote.start() + len(_KEY) :]
        if _KEY.startswith(key) and its_name.startswith(rest.lstrip()):
            return quote.start()
    return len(text)


def _texts(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in headers}


async def _refuse(request: Request, failure: Exception) -> Response:
    """Answer as OpenAI's API does."""
    assert isinstance(failure, RequestFailure)
    error = {"message": str(failure), "type": "invalid_request_error", "code": failure.status}
    return JSONResponse({"error": error}, failure.status, _texts(failure.headers))


class _GatewayServer(uvicorn.Server):
    """A server whose signals are the gateway's."""

    def capture_signals(self) -> Any:
        return nullcontext()


async def serve_engine(
    model: Path, name: str, address: ListenAddress, options: GatewayOptions, on_ready: Callable[[str], None]
) -> None:
    """Serve a model by an engine until SIGTERM or SIGINT; then finish the accepted requests. A second signal cuts them.

    Args:
        model: a run's or a model's directory.
        name: of the model, for clients.
        on_ready: called with the URL when the engine has answered.

    Raises:
        ConfigError: it cannot listen on the address.
        ServingError: the engine cannot serve the model.
    """
    loop = asyncio.get_running_loop()
    stop, force = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (force if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    gateway = Gateway(name, options, AccessPolicy(address.tokens, address.cors_origins, address.admin_token))
    with bind(address) as bound:
        try:
            starting = asyncio.create_task(gateway.start(model))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                with suppress(asyncio.CancelledError):
                    await starting
                return
            starting.result()
            await _listen(gateway, bound, options, (stop, force), on_ready)
        finally:
            await gateway.close()


async def _listen(
    gateway: Gateway,
    bound: socket.socket,
    options: GatewayOptions,
    signals: tuple[asyncio.Event, asyncio.Event],
    on_ready: Callable[[str], None],
) -> None:
    stop, force = signals
    config = uvicorn.Config(gateway.app, log_config=None, access_log=False, lifespan="off", server_header=False)
    server = _GatewayServer(config)
    serving = asyncio.create_task(server.serve([bound]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    on_ready(url_of(bound))
    await stop.wait()
    gateway.draining = True
    with suppress(TimeoutError):
        await asyncio.wait_for(force.wait(), options.drain_delay_s)
    server.should_exit = True
    forcing = asyncio.create_task(force.wait())
    await asyncio.wait((serving, forcing), return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        server.force_exit = True
    forcing.cancel()
    await serving
