"""The server's models, metrics and HTTP endpoints."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import orjson
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from paceline import __version__
from paceline.core.errors import ConfigError, PacelineError, PackageError
from paceline.core.inference import TensorSpec
from paceline.runs.package import open_package, require_trusted
from paceline.runs.package_manifest import INPUTS
from paceline_serving.access import AccessPolicy
from paceline_serving.batching import (
    DeadlinePassed,
    Deployment,
    DeploymentEvents,
    InvalidRequest,
    LocalDeployment,
    RequestFailure,
)
from paceline_serving.connection import (
    JSON_TYPE,
    LARGE_BYTES,
    Answer,
    ClientGone,
    Headers,
    Request,
    RequestBodies,
    error_answer,
    read_body,
)
from paceline_serving.encodings import Categories, Dates
from paceline_serving.model import (
    DATATYPES,
    NOT_JSON,
    Arrays,
    ModelLocation,
    ModelSpec,
    ServedModel,
    ServingOptions,
    describe_sizes,
    make_spec,
    read_inputs,
)
from paceline_serving.openapi import describe
from paceline_serving.protocol import (
    SERVER_NAME,
    InferRequest,
    build_predictions,
    build_response,
    example_request,
    model_metadata,
    parse_request,
    parse_rows,
    takes_long,
)
from paceline_serving.replica_process import ReplicaStarter
from paceline_serving.static_assets import HEADERS, read_assets
from paceline_serving.tables import CellError, columns_of, to_inputs, to_record

# --- Prometheus metrics ---


CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self, deployments: Mapping[str, Deployment]) -> None:
        self._deployments = deployments
        self._registry = CollectorRegistry()
        counter = partial(Counter, registry=self._registry)
        gauge = partial(Gauge, labelnames=("model",), registry=self._registry)
        histogram = partial(Histogram, labelnames=("model",), registry=self._registry)
        self._requests = counter("paceline_requests", "Inference requests, by status.", ("model", "code"))
        self._counters: dict[tuple[str, int], Counter] = {}  # looking a label up costs more than counting
        help = "Time from a complete request to its answer."
        self._latency = histogram("paceline_request_seconds", help, buckets=_SECONDS)
        self._batch_rows = histogram("paceline_batch_rows", "Rows per batch.", buckets=_ROWS)
        help = "Time from sending a batch to a replica to its answer."
        self._batch_seconds = histogram("paceline_batch_seconds", help, buckets=_SECONDS)
        self._restarts = counter("paceline_replica_restarts", "Replicas that died.", ("model",))
        self.swaps = counter("paceline_swaps", "Packages replaced.", ("model",))
        self._waiting = gauge("paceline_waiting_rows", "Rows that are waiting for a replica.")
        self._ready = gauge("paceline_ready_replicas", "Replicas that are ready.")

    def request(self, model: str, status: int, seconds: float) -> None:
        """Count an inference request, and observe the time of successful ones."""
        counter = self._counters.get((model, status))
        if counter is None:
            counter = self._counters[model, status] = self._requests.labels(model, str(status))
        counter.inc()
        if status == 200:
            self._latency.labels(model).observe(seconds)

    @contextmanager
    def counting(self, model: str) -> Iterator[None]:
        """Count the inference request that is answered in the context."""
        start, status = time.perf_counter(), 500
        try:
            yield
            status = 200
        except RequestFailure as failure:
            status = failure.status
            raise
        except (ClientGone, asyncio.CancelledError):
            status = 499  # nginx's code for a client that is gone; it is never sent
            raise
        finally:
            self.request(model, status, time.perf_counter() - start)

    def observer(self, model: str) -> DeploymentEvents:
        self._waiting.labels(model).set_function(lambda: self._deployments[model].batcher.waiting_rows)
        self._ready.labels(model).set_function(lambda: self._deployments[model].ready_replicas)
        rows_of_model = self._batch_rows.labels(model)
        seconds_of_model = self._batch_seconds.labels(model)

        def count(rows: int, seconds: float) -> None:
            rows_of_model.observe(rows)
            seconds_of_model.observe(seconds)

        return DeploymentEvents(count, self._restarts.labels(model).inc)

    def text(self) -> bytes:
        return generate_latest(self._registry)


# --- The models of a server: opened from packages, and replaced while requests arrive ---


log = logging.getLogger("paceline_serving")

_T = TypeVar("_T")
DeploymentFactory = Callable[[ServedModel, ServingOptions, DeploymentEvents], Deployment]


def open_model(location: str, *, program: Literal["auto", "pt2", "onnx"] = "auto", task: str = "") -> ServedModel:
    """Verify a package and choose which of its programs to run.

    Args:
        program: which of its programs; auto is pt2, or else ONNX.
        task: use the weights with this task's code instead.

    Raises:
        PackageError: the package does not verify, or its pt2 program is not trusted.
        ConfigError: it does not have the program, or cannot be served.
    """
    package = open_package(location)
    manifest = package.manifest
    has_onnx_alone = "onnx" in manifest.programs and "pt2" not in manifest.programs
    chosen: Literal["pt2", "onnx"] = program if program != "auto" else "onnx" if has_onnx_alone else "pt2"
    kind: Literal["pt2", "onnx", "task"] = "task" if task else chosen
    if kind != "task" and kind not in manifest.programs:
        available = ", ".join(manifest.programs) or "none"
        raise ConfigError(
            f"{location} has no {kind} program; it has: {available}. "
            "Use --task TASK to run its weights with the task's code."
        )
    if kind == "pt2":
        require_trusted(package.digest, manifest, package.path)
    spec = make_spec(
        manifest, read_inputs(package), package.digest, "onnxruntime_onnx" if kind == "onnx" else "pytorch"
    )
    try:
        for encoding in spec.encodings.values():
            encoding.encode([])  # a library may be missing
        if spec.example:
            to_inputs(columns_of([to_record(spec, spec.example)]), spec)
    except (CellError, TypeError, ValueError) as error:
        raise PackageError(f"{location}: the example in its {INPUTS} is invalid: {error}.") from error
    path = str(package.path.absolute())
    return ServedModel(ModelLocation(package=path, digest=package.digest, kind=kind, task=task), spec)


class Models:
    """The deployments of a server by model name, which can be replaced while the server runs.

    Attributes:
        deployments: that accept requests.
        bodies: of the requests that the server holds.
    """

    def __init__(self, options: ServingOptions, deploy: DeploymentFactory | None = None) -> None:
        """``deploy`` makes a deployment; by default its replicas are processes of this machine."""
        self._options = options
        self._starter = ReplicaStarter(options.threads)
        self._make_deployment = deploy or partial(LocalDeployment, self._starter)
        self.deployments: dict[str, Deployment] = {}
        self._opened: dict[str, ServedModel] = {}
        self._closing_tasks: set[asyncio.Task[None]] = set()
        self._swapping = asyncio.Lock()
        self.metrics = Metrics(self.deployments)
        self.bodies = RequestBodies(options.max_body_bytes)

    @property
    def ready(self) -> bool:
        return all(deployment.ready_replicas for deployment in self.deployments.values())

    def find(self, name: str, version: str | None = None) -> Deployment:
        """Return the model of this name, and of this version if given; refuse with 404 if it does not exist."""
        deployment = self.deployments.get(name)
        if deployment is None:
            raise RequestFailure(404, f"unknown model {name!r:.80}. This server has: {', '.join(self.deployments)}.")
        if version not in (None, deployment.spec.version):
            raise RequestFailure(404, f"{name} has the version {deployment.spec.version} only.")
        return deployment

    async def start(self, opened: Sequence[ServedModel]) -> None:
        """Load all models, or none if one fails."""
        names = [model.spec.name for model in opened]
        duplicates = {name for name in names if names.count(name) > 1}
        if duplicates:
            raise ConfigError(f"two packages are named {min(duplicates)}, but each model's address needs its own name.")
        try:
            for model in opened:
                self.deployments[model.spec.name] = await self._deploy(model)
                self._opened[model.spec.name] = model
        except BaseException:
            await self.close()
            raise

    async def swap(self, name: str, location: str, *, allow_signature_change: bool = False) -> ModelSpec:
        """Serve ``name`` from another package from now on.

        The old deployment answers requests that it has accepted, and then ends. If the new one cannot be
        loaded, the old one stays. One with another signature would break the clients, so it must be allowed.

        Raises:
            PackageError, ConfigError, ServingError: the new package cannot be served.
        """
        async with self._swapping:
            previous = self._opened[name]
            program: Literal["auto", "onnx"] = "onnx" if previous.source.kind == "onnx" else "auto"
            model = await asyncio.to_thread(open_model, location, program=program, task=previous.source.task)
            model = replace(model, spec=replace(model.spec, name=name))
            if not allow_signature_change and (changes := _signature_changes(previous.spec, model.spec)):
                raise ConfigError(
                    f"{location} has another signature, which clients of {name} do not expect: {'; '.join(changes)}. "
                    "Serve it under another name, or replace the model with --allow-signature-change."
                )
            deployment = await self._deploy(model)
            old = self.deployments[name]
            self.deployments[name] = deployment
            self._opened[name] = model
        self.metrics.swaps.labels(name).inc()
        log.info("%s: %s is served instead of %s", name, model.spec.version, old.spec.version)
        task = asyncio.create_task(old.close())
        self._closing_tasks.add(task)
        task.add_done_callback(self._closing_tasks.discard)
        return model.spec

    async def compute(
        self,
        deployment: Deployment,
        size: int,
        timeout_s: float,
        waiting: set[asyncio.Future[Any]],
        parse: Callable[[], InferRequest],
        build: Callable[[Deployment, InferRequest, Arrays], _T],
    ) -> _T:
        """Parse a request, compute it and build its answer; a thread does the work that takes long.

        Args:
            size: of its body, in bytes.
            waiting: see :func:`await_result`, whose exceptions it raises.
        """
        is_large = takes_long(deployment.spec, size)
        request = await await_result(timeout_s, self.bodies.run(parse), waiting) if is_large else parse()
        limit_s = min(timeout_s, request.timeout_s)
        outputs = await await_result(limit_s, deployment.batcher.submit(request.inputs), waiting)
        if is_large or sum(array.nbytes for array in outputs.values()) > LARGE_BYTES:
            return await self.bodies.run(build, deployment, request, outputs)
        return build(deployment, request, outputs)

    def abandon(self) -> None:
        for deployment in self.deployments.values():
            deployment.abandon()

    async def close(self) -> None:
        """Answer all accepted requests, then end all replicas."""
        await asyncio.gather(*(d.close() for d in self.deployments.values()), *self._closing_tasks)
        self._starter.close()
        self.bodies.close()

    async def _deploy(self, model: ServedModel) -> Deployment:
        deployment = self._make_deployment(model, self._options, self.metrics.observer(model.spec.name))
        await deployment.start()
        return deployment


def _signature_changes(old: ModelSpec, new: ModelSpec) -> list[str]:
    """Return what differs between two models for their clients; versions may differ."""
    changes = []
    for side in ("inputs", "outputs"):
        before, after = getattr(old, side), getattr(new, side)
        for name in sorted(before.keys() | after.keys()):
            was, is_now = (_describe_tensor(specs.get(name)) for specs in (before, after))
            if was != is_now:
                changes.append(f"{side[:-1]} {name} is {is_now} instead of {was}")
    for name, encoding in new.encodings.items():
        if isinstance(encoding, Categories) and encoding.unknown is None:
            refused = [value for value in old.choices(name) if value not in encoding.codes]
            changes += [f"input {name} no longer takes {value!r:.80}" for value in refused[:1]]
        if isinstance(encoding, Dates) and not isinstance(old.encodings.get(name), Dates):
            changes.append(f"input {name} takes only dates")
    for what in ("labels", "label", "probabilities"):
        if getattr(old, what) != getattr(new, what):
            changes.append(f"its {what} differ" if what == "labels" else f"its {what} is another output")
    return changes


def _describe_tensor(spec: TensorSpec | None) -> str:
    """Describe dtype and shape; a value out of an input's range would fail anyway."""
    if spec is None:
        return "absent"
    shape = describe_sizes((None, *spec.shape))
    columns = f" of {', '.join(spec.columns)}" if spec.columns else ""
    return f"{DATATYPES[spec.dtype]} [{shape}]{columns}"


# --- The HTTP side: the addresses of the Open Inference Protocol v2 ---
#
# https://github.com/kserve/open-inference-protocol, with the binary tensor extension and, to replace a package,
# ``POST /v2/repository/models/NAME/load`` as in Triton's model repository extension. ``/`` is a page for people.


access_log = logging.getLogger("paceline_serving.access")

_MAX_ADMIN_BYTES = 64 * 1024
_READ = ("GET", "HEAD")
_MODELS, _INFER = b"/v2/models/", b"/infer"
_PAGE_HEADERS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]


class _Package(msgspec.Struct):
    package: Annotated[str, msgspec.Meta(pattern=r"\A[^\0]+\Z")]
    allow_signature_change: bool = False


class _Change(msgspec.Struct):
    """The body of a request to replace a package."""

    parameters: _Package


class App:
    """The HTTP application for the models of one server.

    Attributes:
        draining: the server will end soon: it reports not ready, and asks clients to close their connections.
    """

    def __init__(self, models: Models, options: ServingOptions, access: AccessPolicy) -> None:
        self.draining = False
        self._models = models
        self._options = options
        self._access = access
        self._assets = read_assets("paceline_serving.page")
        self._documents: dict[str, tuple[Any, bytes]] = {}
        self._logs_access = access_log.isEnabledFor(logging.INFO)

    async def __call__(self, request: Request) -> Answer | None:
        """Answer a request; None if its client has gone."""
        start = time.perf_counter()
        try:
            status, headers, body = await self._answer(request)
        except ClientGone:
            return None
        except RequestFailure as failure:
            status, headers, body = error_answer(failure.status, str(failure), failure.headers)
        except asyncio.CancelledError:
            raise
        except RecursionError:  # nothing else here nests
            status, headers, body = error_answer(400, "the request has values that are nested too deeply.")
        except Exception:
            log.exception("%s %s", request.method, request.path)
            status, headers, body = error_answer(500, "internal server error; see the server's log.")
        headers += self._access.cors_headers(request.headers)
        if status not in (204, 304):  # the Content-Length of 304 would be that of the omitted body
            headers.append((b"content-length", str(len(body)).encode()))
        if self.draining:
            headers.append((b"connection", b"close"))
        if self._logs_access:
            client = f"{request.client or '-'} {request.user}".strip()
            seconds = time.perf_counter() - start
            # A path with line breaks must not start a new line of the log.
            access_log.info("%s %s %.200r %d %.1f ms", client, request.method, request.path, status, 1000 * seconds)
        return status, headers, b"" if request.method == "HEAD" else body

    async def _answer(self, request: Request) -> Answer:
        headers = request.headers
        if request.method == "OPTIONS" and (allowed := self._access.preflight(headers)) is not None:
            return 204, allowed, b""  # browsers send no token with this question
        parts = request.path.strip("/").split("/")
        if parts[:2] == ["v2", "health"] and len(parts) == 3:
            return self._health(request, parts[2])
        if parts == [""] or (parts[0] == "page" and len(parts) == 2):
            # Open without the token, since this page asks for it.
            return _read(request, lambda: self._page(parts[-1] or "index.html", headers))
        request.user = self._access.check_token(headers)
        if request.method not in _READ:
            self._access.check_origin(headers)
        match parts:
            case ["v2", "models", name, *rest]:
                return await self._model(request, name, rest)
            case ["predict", *rest] if len(rest) <= 1:
                return await self._infer(request, self._named(rest), None, LARGE_BYTES, parse_rows, build_predictions)
            case ["v2"]:
                return _read(request, self._server_metadata)
            case ["v2", "models"]:
                return _read(request, lambda: _json({"models": list(self._models.deployments)}))
            case ["metrics"]:
                return _read(request, lambda: (200, [(b"content-type", CONTENT_TYPE)], self._models.metrics.text()))
            case ["openapi.json"]:
                deployments = list(self._models.deployments.values())
                return _read(
                    request, lambda: self._describe("", deployments, lambda: describe(d.spec for d in deployments))
                )
            case ["v2", "repository", "models", name, "load"]:
                _only(request, "POST")
                return await self._load(request, name)
        raise RequestFailure(404, "this address does not exist. /openapi.json lists all addresses.")

    def refuse(self, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> RequestFailure | None:
        """Return why to refuse a POST before its body is read, if the headers suffice to decide."""
        if self.draining or self._logs_access or not (url.startswith(_MODELS) and url.endswith(_INFER)):
            return None
        name = url[len(_MODELS) : -len(_INFER)].decode("latin-1")
        deployment = self._models.deployments.get(name)
        if deployment is None:
            return None
        refusal = deployment.batcher.refusal()
        if refusal is None:
            return None
        by_name = dict(headers)
        try:
            self._access.check_token(by_name)
            self._access.check_origin(by_name)
        except RequestFailure:
            return None
        refusal.headers = (*refusal.headers, *self._access.cors_headers(by_name))
        self._models.metrics.request(name, refusal.status, 0)
        return refusal

    def _health(self, request: Request, what: str) -> Answer:
        if what == "live":
            return _read(request, lambda: _json({"live": True}))
        if what == "ready":
            ready = self._models.ready and not self.draining
            return _read(request, lambda: _json({"ready": ready}, 200 if ready else 503))
        raise RequestFailure(404, "the health addresses are /v2/health/live and /v2/health/ready.")

    def _page(self, name: str, headers: Mapping[bytes, bytes]) -> Answer:
        asset = self._assets.get(name)
        if asset is None:
            raise RequestFailure(404, "the page does not have this file.")
        tag = asset.tag.encode()
        page_headers = [*_PAGE_HEADERS, (b"content-type", asset.content_type.encode()), (b"etag", tag)]
        # A proxy that compresses makes the tag a weak one.
        cached_tags = [tag.strip().removeprefix(b"W/") for tag in headers.get(b"if-none-match", b"").split(b",")]
        return (304, page_headers, b"") if tag in cached_tags else (200, page_headers, asset.content)

    def _describe(self, key: str, deployments: Sequence[Deployment], build: Callable[[], Any]) -> Answer:
        """Return a document that changes with the packages only; writing one with a long example takes a while."""
        versions = [(deployment.spec.name, deployment.spec.version) for deployment in deployments]
        if key not in self._documents or self._documents[key][0] != versions:
            self._documents[key] = (versions, orjson.dumps(build()))
        return 200, [JSON_TYPE], self._documents[key][1]

    def _server_metadata(self) -> Answer:
        extensions = ["binary_tensor_data", "model_repository(load)"]
        return _json({"name": SERVER_NAME, "version": __version__, "extensions": extensions})

    async def _model(self, request: Request, name: str, rest: list[str]) -> Answer:
        version = None
        if rest[:1] == ["versions"]:
            version = rest[1] if len(rest) > 1 else ""
            rest = rest[2:]
        deployment = self._models.find(name, version)
        match rest:
            case ["infer"]:
                length = request.headers.get(b"inference-header-content-length")
                parse = partial(parse_request, json_length=None if length is None else length.decode("latin-1"))
                return await self._infer(request, name, version, self._options.max_body_bytes, parse, build_response)
            case []:
                return _read(request, lambda: self._describe(name, [deployment], lambda: model_metadata(deployment)))
            case ["example"]:
                example = partial(example_request, deployment.spec)
                return _read(request, lambda: self._describe(f"{name} example", [deployment], example))
            case ["ready"]:
                ready = bool(deployment.ready_replicas) and not self.draining
                return _read(request, lambda: _json({"name": name, "ready": ready}, 200 if ready else 503))
        raise RequestFailure(404, "a model has the addresses /ready, /example and /infer only.")

    async def _infer(
        self,
        request: Request,
        name: str,
        version: str | None,
        max_bytes: int,
        parse: Callable[[ModelSpec, bytes | bytearray], InferRequest],
        build: Callable[[Deployment, InferRequest, Arrays], tuple[Headers, bytes]],
    ) -> Answer:
        """Compute the request of a body; refuse it before that is read, since an overloaded server has little time."""
        _only(request, "POST")
        headers, models = request.headers, self._models
        with models.metrics.counting(name), models.bodies.hold() as hold:
            models.find(name, version).batcher.check_room()
            if headers.get(b"content-encoding", b"identity").lower() != b"identity":
                raise RequestFailure(415, "compressed bodies are not supported.")
            timeout_s = self._timeout_s(headers)
            held = [await read_body(request, min(max_bytes, self._options.max_body_bytes), hold)]
            # Look it up again: the package may have been replaced while the client sent the body.
            deployment, size = models.find(name, version), len(held[0])
            # A body that is parsed is needed no more.
            answer = models.compute(
                deployment, size, timeout_s, request.waiting, lambda: parse(deployment.spec, held.pop()), build
            )
            return 200, *await answer

    def _timeout_s(self, headers: Mapping[bytes, bytes]) -> float:
        """Return the time limit of a request: the server's, or a shorter one of its own."""
        text = headers.get(b"request-timeout-ms")
        if text is None:
            return self._options.timeout_s
        if not text.isdigit() or not 0 < int(text[:12]) <= 86_400_000 or len(text) > 12:
            raise InvalidRequest("Request-Timeout-Ms must be a whole number of milliseconds, 1 to 86400000.")
        return min(self._options.timeout_s, int(text) / 1000)

    def _named(self, rest: Sequence[str]) -> str:
        """Return the model of ``/predict/NAME``, or of ``/predict`` the only one."""
        names = list(self._models.deployments)
        if rest or len(names) == 1:
            return self._models.find(rest[0] if rest else names[0]).spec.name
        raise RequestFailure(404, f"this server has several models. Send it to /predict/NAME: {', '.join(names)}.")

    async def _load(self, request: Request, name: str) -> Answer:
        self._access.check_admin(request.client, request.headers)
        if name not in self._models.deployments:
            raise RequestFailure(404, f"unknown model {name!r:.80}.")
        with self._models.bodies.hold() as hold:
            body = await read_body(request, _MAX_ADMIN_BYTES, hold)
        try:
            change = msgspec.json.decode(body, type=_Change).parameters
        except NOT_JSON:
            raise InvalidRequest(
                'the body must be {"parameters": {"package": "NAME@TAG"}}, and may have the parameter '
                '"allow_signature_change": true.'
            ) from None
        try:
            spec = await self._models.swap(name, change.package, allow_signature_change=change.allow_signature_change)
        except PacelineError as error:
            raise RequestFailure(409, f"the model was not replaced: {error}") from error
        return _json({"name": spec.name, "version": spec.version})


async def await_result(timeout_s: float, future: asyncio.Future[Any], waiting: set[asyncio.Future[Any]]) -> Any:
    """Return the future's result; cancel it when time is up.

    Args:
        waiting: futures that are cancelled when the client disconnects; it has this one meanwhile.

    Raises:
        DeadlinePassed: time was up first.
        ClientGone: the client disconnected first.
    """
    timed_out = False

    def expire() -> None:
        nonlocal timed_out
        timed_out = True
        future.cancel()

    timer = asyncio.get_running_loop().call_later(timeout_s, expire)
    waiting.add(future)
    try:
        return await future
    except asyncio.CancelledError:
        if timed_out:
            raise DeadlinePassed(timeout_s) from None
        task = asyncio.current_task()
        if future.cancelled() and not (task is not None and task.cancelling()):
            raise ClientGone from None
        raise
    finally:
        waiting.discard(future)
        timer.cancel()


def _only(request: Request, *methods: str) -> None:
    if request.method not in methods:
        allowed = ", ".join(methods)
        raise RequestFailure(405, f"only {allowed} is allowed here.", [(b"allow", allowed.encode())])


def _read(request: Request, answer: Callable[[], Answer]) -> Answer:
    _only(request, *_READ)
    return answer()


def _json(document: Any, status: int = 200) -> Answer:
    return status, [JSON_TYPE], orjson.dumps(document)
