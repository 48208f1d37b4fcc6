"""The front of ``paceline serve --engine``: access, readiness, drain, hot swap and metrics of an engine's HTTP API.

An engine's answer passes through; only the model has the gateway's name in it. No answer is cut without an error: when
an engine dies, a stream of events ends with an error event, and any other answer with a status of 502 or a broken
connection. An engine that stands still is killed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil
import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from paceline.core.built_in import DIRECTORY_FORMATS
from paceline.core.errors import ConfigError, PacelineError, ServingError
from paceline.core.parent_death import kill_with_parent_command
from paceline.core.plugins import import_object, install_command
from paceline.core.sockets import free_loopback_port
from paceline_serving.access import AccessPolicy
from paceline_serving.app import CONTENT_TYPE
from paceline_serving.batching import RequestFailure
from paceline_serving.model import ServingOptions
from paceline_serving.server import ListenAddress, ServerShutdown, bind, url_of

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


# --- Engines: each a process that Paceline starts and ends ---


EngineName = Literal["transformers", "vllm"]

_POLL_S, _STOP_S = 0.2, 10.0


def _transformers(model: str, port: int) -> list[str]:
    # Its command line, run by this interpreter: the one that PATH finds may be of another environment.
    main = "from transformers.cli.transformers import main; main()"
    return [sys.executable, "-c", main, "serve", model, "--host", "127.0.0.1", "--port", str(port)]


def _vllm(model: str, port: int) -> list[str]:
    program = shutil.which("vllm")
    if program is None:
        raise ConfigError("--engine vllm needs vLLM, whose command is not on PATH. Install it: pip install vllm")
    return [program, "serve", model, "--host", "127.0.0.1", "--port", str(port)]


_COMMANDS: Mapping[EngineName, Callable[[str, int], list[str]]] = {"transformers": _transformers, "vllm": _vllm}


def engine_command(name: EngineName, model: str, port: int, arguments: Sequence[str] = ()) -> list[str]:
    """Return the command of an engine that serves the model of a directory in its own, on a port of this machine.

    Raises:
        ConfigError: its program or libraries are not installed.
    """
    if name == "transformers":
        try:
            import fastapi  # noqa: F401
            import openai  # noqa: F401
            import uvicorn  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"--engine transformers: {error}. Install it: {install_command('engine')}") from error
    return [*_COMMANDS[name](model, port), *arguments]


def open_language_model(location: Path) -> Path:
    """Return the directory of transformers for a run, which is exported, or for a directory that is one.

    Raises:
        UserError: it is neither, or the run cannot be exported.
        ExportError: what was exported does not compute the same as the trained model.
    """
    if (location / "config.json").is_file():
        return location
    if not (location / "run.toml").is_file():
        raise ConfigError(f"{location} is neither a run nor a directory of transformers: it has no config.json.")
    from paceline.export.export import ExportedDirectory, ExportRequest

    export_hf: Callable[[ExportRequest], ExportedDirectory] = import_object(DIRECTORY_FORMATS["hf"])

    log.info("exporting %s", location)
    with redirect_stdout(sys.stderr):  # which libraries print to when they are imported
        return Path(export_hf(ExportRequest(run=location)).directory)


class EngineProcess:
    """One process of an engine, with the requests that it is answering.

    Attributes:
        model: the directory that it serves.
        name: by which it knows the model.
        url: where it listens, on loopback.
        answers_as: its name of the model in answers.
        in_flight: requests that have no whole answer yet.
        heard_at: when it last answered a probe, by ``time.monotonic``.
        moved_at: when it last sent a part of an answer, or computed one, or had none to compute.
    """

    def __init__(self, kind: EngineName, model: Path, arguments: Sequence[str]) -> None:
        self.model = model.resolve()
        self.name = self.model.name
        self.answers_as = f"{self.name}@main" if kind == "transformers" else self.name
        self.in_flight = 0
        self.heard_at = 0.0
        self.moved_at = 0.0
        self._kind = kind
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None
        self.url = ""

    async def start(self, client: httpx.AsyncClient, timeout_s: float) -> None:
        """Start the process, and wait until it has answered a request; a ServingError says why it has not."""
        port = free_loopback_port()
        self.url = f"http://127.0.0.1:{port}"
        command = kill_with_parent_command(engine_command(self._kind, self.name, port, self._arguments))
        # A session of its own: Ctrl-C reaches Paceline alone, which lets the engine finish its answers.
        self._process = await asyncio.create_subprocess_exec(
            *command,
            cwd=self.model.parent,  # so answers name the model, and not where it is
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._answers(client):
                    if self._process.returncode is not None:
                        raise ServingError(
                            f"--engine {self._kind} ended with exit code {self._process.returncode} before it was "
                            "ready; its output above has the cause."
                        )
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            await self.stop()
            raise ServingError(
                f"--engine {self._kind} was not ready after {timeout_s:g} s. Allow more: --startup-timeout."
            ) from None
        except BaseException:
            await self.stop()
            raise
        self.heard_at = time.monotonic()
        self.moved_at = self.heard_at

    async def _answers(self, client: httpx.AsyncClient) -> bool:
        """Return whether it generates a token; the first one may take many seconds more than the next ones."""
        body = {"model": self.name, "prompt": "a", "max_tokens": 1}
        with suppress(httpx.TransportError):
            if (await client.get(f"{self.url}/health")).status_code != 200:
                return False
            answer = await client.post(f"{self.url}/v1/completions", json=body)
            if answer.status_code == 200:
                return True
            raise ServingError(f"--engine {self._kind} cannot generate with {self.model}: {answer.text:.500}")
        return False

    async def probe(self, client: httpx.AsyncClient, limit_s: float) -> None:
        """Ask again and again whether it is well; an answer within ``limit_s`` is noted in ``heard_at``."""
        while self.is_alive:
            await asyncio.sleep(limit_s / 8)
            with suppress(httpx.TransportError):
                if (await client.get(f"{self.url}/health", timeout=limit_s)).status_code == 200:
                    self.heard_at = time.monotonic()

    def cpu_s(self) -> float:
        """Return the CPU time that it and what it has started have used."""
        assert self._process is not None
        used_s = 0.0
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            for each in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    used_s += sum(each.cpu_times()[:2])
        return used_s

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.returncode is None

    async def wait(self) -> int:
        """Return its exit code when it has ended."""
        assert self._process is not None
        return await self._process.wait()

    def kill(self) -> None:
        """End it at once, also if it is stopped."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """End the process and all that it has started."""
        if self._process is None or not self.is_alive:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _STOP_S)
                break


# --- The gateway ---


class _GatewayMetrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("paceline_requests", "Requests, by status.", ("code",), registry=registry)
        self.tokens = Counter("paceline_tokens", "Generated tokens.", registry=registry)
        self.in_flight = Gauge("paceline_requests_in_flight", "Unanswered requests.", registry=registry)
        self.restarts = Counter("paceline_engine_restarts", "Engines that died or hung.", registry=registry)
        self.swaps = Counter("paceline_swaps", "Models replaced.", registry=registry)
        help = "Time to the first byte of an answer."
        self.first_byte = Histogram("paceline_first_byte_seconds", help, registry=registry)


class Gateway:
    """Sends requests to the current engine, starts another when it dies, and replaces it without losing a request.

    Args:
        name: of the model, for clients.
        kind: of the engine.
        arguments: further words of its command.
    """

    def __init__(
        self, name: str, kind: EngineName, arguments: Sequence[str], options: ServingOptions, access: AccessPolicy
    ) -> None:
        self.draining = False
        self._name = name
        self._kind = kind
        self._arguments = arguments
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
                *(Route(path, self._show) for path in ("/metrics", "/v2/models", "/v1/models")),
                Route("/v2/repository/models/{name}/load", self._load, methods=["POST"]),
                Route("/v1/{path:path}", self._preflight, methods=["OPTIONS"]),
                Route("/v1/{path:path}", self._forward, methods=["GET", "POST"]),
            ],
            exception_handlers={RequestFailure: _refuse},
        )

    # --- Engines

    async def start(self, model: Path) -> None:
        """Start the engine of a model, and wait until it answers; a ServingError says why it does not."""
        self._engine = await self._start(model)

    async def close(self) -> None:
        """End all engines."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(engine.stop() for engine in self._engines))
        await self._client.aclose()

    async def _start(self, model: Path) -> EngineProcess:
        return await self._launch(await asyncio.to_thread(open_language_model, model))

    async def _launch(self, directory: Path) -> EngineProcess:
        engine = EngineProcess(self._kind, directory, self._arguments)
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
            log.warning("--engine %s died (exit code %s); another one is started", self._kind, code)
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
                log.warning("--engine %s has stood still for %.0f s, and is killed", self._kind, still_s)
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

    async def _show(self, request: Request) -> Response:
        self._check(request)
        match request.url.path:
            case "/metrics":
                return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE.decode())
            case "/v2/models":
                return JSONResponse({"models": [self._name]})
        entry = {"id": self._name, "object": "model", "created": 0, "owned_by": "paceline"}
        return JSONResponse({"object": "list", "data": [entry]})

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
        if engine.in_flight >= self._options.max_queue:
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
    kind: EngineName,
    arguments: Sequence[str],
    model: Path,
    name: str,
    address: ListenAddress,
    options: ServingOptions,
    on_ready: Callable[[str], None],
) -> None:
    """Serve a model by an engine until SIGTERM or SIGINT; then finish the accepted requests.

    Args:
        model: a run's or a model's directory.
        on_ready: called with the URL when the engine has answered.

    Raises:
        ConfigError: it cannot listen on the address.
        ServingError: the engine cannot serve the model.
    """
    stop = ServerShutdown()
    access = AccessPolicy(address.tokens, address.cors_origins, address.admin_token)
    gateway = Gateway(name, kind, arguments, options, access)
    with bind(address) as bound:
        try:
            if not await stop.allows(gateway.start(model)):
                return
            config = uvicorn.Config(gateway.app, log_config=None, access_log=False, lifespan="off", server_header=False)
            server = _GatewayServer(config)
            serving = asyncio.create_task(server.serve([bound]))
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
            on_ready(url_of(bound))
            await stop.requested.wait()
            gateway.draining = True
            await stop.delay(options.drain_delay_s)
            server.should_exit = True
            await stop.unless_forced(serving)
            server.force_exit = not serving.done()
            await serving
        finally:
            await gateway.close()
