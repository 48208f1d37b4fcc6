"""``paceline serve PACKAGE...`` over the Open Inference Protocol v2, and ``paceline deploy URL PACKAGE``."""

from __future__ import annotations

import json as json_module
import logging
import secrets
import shlex
import sys
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from cyclopts import Parameter

from paceline.cli.options import ARGUMENTS, COMMON, explicit_options, group
from paceline.core.access import TOKEN_BYTES
from paceline.core.environment import is_loopback
from paceline.core.errors import ConfigError
from paceline.core.files import write_atomically
from paceline.core.options import parse_duration_s
from paceline.core.plugins import import_library
from paceline.core.standard_streams import escape_controls

if TYPE_CHECKING:
    from paceline_serving.model import ModelSpec, ServingOptions
    from paceline_serving.server import ListenAddress

_COMMON = Parameter(group=group(COMMON), negative="")
_REQUESTS = Parameter(group=group("Requests"), negative="")
_REPLICAS = Parameter(group=group("Replicas"))
_PROGRAM = Parameter(group=group("Program"))
_LOADING_TIMEOUT_S = 600.0
_TOKEN_HEADER = ' -H "Authorization: Bearer $TOKEN"'
_HOST, _PORT = "127.0.0.1", 8000
_MAX_SHOWN = 500  # characters of an example of a request
_MAX_FIELDS = 20  # of a row, that are listed


def _kserve(help: str) -> Parameter:
    return Parameter(help=help, group=group("--on kserve"), show_default=False, negative="")


@dataclass(frozen=True, kw_only=True)
class KServeOptions:
    """Options of an InferenceService."""

    image: Annotated[str | None, _kserve("Container image that contains Paceline.")] = None
    token_secret: Annotated[
        str | None, _kserve("SECRET/KEY, the Kubernetes secret with the token that clients send.")
    ] = None
    name: Annotated[str | None, _kserve("Name of the service. Default: the last part of the package's.")] = None
    namespace: Annotated[str, _kserve("Kubernetes namespace. Default: default.")] = "default"
    volume: Annotated[
        tuple[str, ...],
        _kserve("CLAIM:/PATH, a persistent volume claim and its mount point; may be repeated."),
    ] = ()
    memory: Annotated[str | None, _kserve("Memory of each pod, such as 4Gi.")] = None
    service_account: Annotated[str | None, _kserve("Service account of the pods.")] = None
    dry_run: Annotated[bool, _kserve("Print the InferenceService.")] = False


def serve(
    package: Annotated[tuple[str, ...], Parameter(negative="", group=group(ARGUMENTS))],
    *,
    host: Annotated[str, _COMMON] = _HOST,
    port: Annotated[int, _COMMON] = _PORT,
    replicas: Annotated[str, _COMMON] = "1",
    devices: Annotated[str, _COMMON] = "cpu",
    token_file: Annotated[Path | None, _COMMON] = None,
    max_batch: Annotated[int, _COMMON] = 32,
    max_queue: Annotated[int, _COMMON] = 256,
    timeout: Annotated[str, _COMMON] = "30s",
    exact: Annotated[bool, _COMMON] = False,
    trust: Annotated[bool, _COMMON] = False,
    on: Annotated[Literal["embedded", "ray", "kserve"], _COMMON] = "embedded",
    engine: Annotated[Literal["embedded", "transformers", "vllm"], _COMMON] = "embedded",
    json: Annotated[bool, _COMMON] = False,
    grpc_port: Annotated[int | None, _REQUESTS] = None,
    max_body: Annotated[int, _REQUESTS] = 64,
    receive_timeout: Annotated[str, _REQUESTS] = "10s",
    cors_origin: Annotated[tuple[str, ...], _REQUESTS] = (),
    access_log: Annotated[bool, _REQUESTS] = False,
    threads: Annotated[int, _REPLICAS] = 1,
    max_wait: Annotated[str, _REPLICAS] = "2ms",
    startup_timeout: Annotated[str, _REPLICAS] = "2min",
    hang_timeout: Annotated[str, _REPLICAS] = "1min",
    drain_delay: Annotated[str, _REPLICAS] = "1s",
    program: Annotated[Literal["auto", "pt2", "onnx"], _PROGRAM] = "auto",
    task: Annotated[str, _PROGRAM] = "",
    engine_args: Annotated[str, Parameter(group=group("--engine"), allow_leading_hyphen=True)] = "",
    ray_address: Annotated[str | None, Parameter(group=group("--on ray"))] = None,
    kserve: Annotated[KServeOptions | None, Parameter(name="*")] = None,
) -> int:
    """Serve each PACKAGE until SIGTERM; then answer the accepted requests, and exit.

    To replace a package while the server runs: paceline deploy URL PACKAGE.

    Args:
        package: Directories, or references such as fashion-mnist@prod.
        host: Address to listen on. An address that other machines can reach needs --token-file.
        port: Port to listen on; 0 picks a free one.
        replicas: Processes per package. With --on ray or kserve, MIN:MAX scales with the load.
        devices: Devices of the replicas, in turn: cpu, or cuda:0,cuda:1.
        token_file: File with the token that clients send (Authorization: Bearer TOKEN), or a line with a name and a
            token for each client; readable only by you. The server reads it again when it changes.
        max_batch: Largest number of rows in a batch.
        max_queue: Rows that may wait, fewer while the server is slow; further requests get 429 and Retry-After.
        timeout: Time limit of a request; a request may set a shorter one (Request-Timeout-Ms).
        exact: Answer a row with the same bits whatever else the server computes with it: batches have sizes at which
            that was proved when the model was loaded.
        trust: Trust these packages' pt2 programs from now on; loading one can run any code.
        on: Where replicas run. embedded: on this machine; ray: Ray Serve, on many nodes; kserve: on Kubernetes
            (--dry-run prints the InferenceService).
        engine: What computes the answers. transformers and vllm serve one language model by OpenAI's API: a run, which
            is exported as --format hf first, or a directory of transformers.
        json: Print one line of JSON when the server is ready.
        grpc_port: Also serve gRPC, on this port of the same address.
        max_body: Largest request, in MiB.
        receive_timeout: How long a client may take to send a request.
        cors_origin: Origin of a site whose pages may send requests and read answers, such as https://example.org; may
            be given several times. Default: none, only the server's own page.
        access_log: Log each request, without its contents.
        threads: CPU threads of each replica.
        max_wait: How long to wait for a batch to fill while all replicas are busy.
        startup_timeout: How long a replica may take to load its model.
        hang_timeout: How long a replica may compute one batch, or an engine stand still, before it is replaced.
        drain_delay: After SIGTERM, how long to report "not ready" before refusing connections.
        program: Which of a package's programs to run. auto: pt2, else onnx.
        task: Use the weights with this task's code instead of the package's program.
        engine_args: Further options of the engine's own command, such as '--tensor-parallel-size 2'.
        ray_address: HOST:PORT of a Ray cluster, or auto. Default: RAY_ADDRESS; without it, a cluster on this machine.
    """
    if ray_address is not None and on != "ray":
        raise ConfigError("--ray-address is only for --on ray. Add --on ray.")
    from paceline_serving.model import ServingOptions, parse_replicas

    min_replicas, max_replicas = parse_replicas(replicas)
    options = ServingOptions(
        replicas=min_replicas,
        devices=tuple(word.strip() for word in devices.split(",")),
        threads=threads,
        max_batch=max_batch,
        max_wait_s=parse_duration_s(max_wait, "max_wait"),
        max_queue=max_queue,
        timeout_s=parse_duration_s(timeout, "timeout"),
        max_body_bytes=max_body * 2**20,
        receive_timeout_s=parse_duration_s(receive_timeout, "receive_timeout"),
        startup_timeout_s=parse_duration_s(startup_timeout, "startup_timeout"),
        hang_timeout_s=parse_duration_s(hang_timeout, "hang_timeout"),
        drain_delay_s=parse_duration_s(drain_delay, "drain_delay"),
        exact=exact,
    )
    if on == "kserve":
        if grpc_port is not None or token_file is not None or (host, port) != (_HOST, _PORT):
            raise ConfigError(
                "a server in a pod listens on 0.0.0.0:8080 and takes its token from --token-secret: "
                "--host, --port, --grpc-port and --token-file are not supported by --on kserve."
            )
        words = (
            *(("--program", program) if program != "auto" else ()),
            *(("--task", task) if task else ()),
            *(word for origin in cors_origin for word in ("--cors-origin", origin)),
            *(word for word, is_set in (("--trust", trust), ("--access-log", access_log)) if is_set),
        )
        return _print_service(
            kserve or KServeOptions(), package, words, (min_replicas, max_replicas), options, json=json
        )
    if explicit_options(kserve):
        raise ConfigError(f"--{min(explicit_options(kserve)).replace('_', '-')} is only for --on kserve.")
    if engine != "embedded":
        address = _listen_address(host, port, None, token_file, cors_origin)
        return _serve_engine(engine, shlex.split(engine_args), package, address, options, token_file, json=json)
    if engine_args:
        raise ConfigError("--engine-args is only for --engine transformers or vllm.")
    for library in ("httptools", "orjson", "prometheus_client"):
        import_library(library, "paceline serve", "serve")
    from paceline_serving.app import DeploymentFactory, open_model
    from paceline_serving.server import serve as serve_packages

    address = _listen_address(host, port, grpc_port, token_file, cors_origin)
    ray_options = None
    if on == "ray":
        from paceline_serving.ray_serve import RayServeOptions

        ray_options = RayServeOptions.make(ray_address, replicas, options)
    elif min_replicas < max_replicas:
        raise ConfigError(
            f"--replicas {replicas}: the number of replicas follows the load only with --on ray. Give one number."
        )
    if trust:
        from paceline.runs import package as packages

        for package_name in package:
            packages.trust(packages.open_package(package_name).digest)
    models = [open_model(package_name, program=program, task=task) for package_name in package]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LogFormatter("%(asctime)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("paceline_serving.access").setLevel(logging.INFO if access_log else logging.WARNING)
    names = [model.spec.name for model in models]

    stack = ExitStack()

    def on_ready(url: str, grpc: str | None) -> None:
        admin_file = _admin_file(stack, url, address.admin_token) or token_file
        if json:
            ready = {"url": url, "grpc": grpc, "models": names, "token_file": admin_file and str(admin_file)}
            print(json_module.dumps(ready), flush=True)
        else:
            for model in models:
                print(f"{url}/v2/models/{model.spec.name} is ready.", flush=True)
                path = "predict" if len(models) == 1 else f"predict/{model.spec.name}"
                token = "" if token_file is None else _TOKEN_HEADER
                _print_inputs(model.spec, url, path, token)
            if grpc is not None:
                print(f"{grpc} serves gRPC.", flush=True)
            print(f"Try it in a browser: {url}/", flush=True)
            if admin_file is not None:
                print(f"Replace a package: paceline deploy {url} PACKAGE (the token is in {admin_file})", flush=True)

    with stack:
        deploy: DeploymentFactory | None = None
        if ray_options is not None:
            from paceline_serving.ray_serve import RayDeployment, ray_serve

            deploy = partial(RayDeployment, ray_options, stack.enter_context(ray_serve(ray_options)))
        _run(stack, serve_packages(models, address, options, on_ready, deploy))
    return 0


def _serve_engine(
    engine: Literal["transformers", "vllm"],
    arguments: Sequence[str],
    packages: Sequence[str],
    address: ListenAddress,
    options: ServingOptions,
    token_file: Path | None,
    *,
    json: bool,
) -> int:
    for library in ("httpx", "prometheus_client", "starlette", "uvicorn", "uvloop"):
        import_library(library, "--engine", "serve" if library == "uvloop" else "engine")
    from paceline_serving.gateway import engine_command, serve_engine

    if len(packages) != 1:
        raise ConfigError(f"--engine {engine} serves one model; start a server for each.")
    model = Path(packages[0])
    engine_command(engine, model.name, 0)  # what is not installed is said before the model is exported
    place = model.resolve()
    name = (place.parent if (place.parent / "run.toml").is_file() else place).name  # of the run, also for its hf/
    with ExitStack() as stack:

        def on_ready(url: str) -> None:
            admin_file = _admin_file(stack, url, address.admin_token) or token_file
            if json:
                ready = {"url": url, "models": [name], "token_file": admin_file and str(admin_file)}
                print(json_module.dumps(ready), flush=True)
                return
            token = "" if token_file is None else _TOKEN_HEADER
            body = shlex.quote(json_module.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]}))
            print(f"{url}/v1 serves {name} with {engine}, by OpenAI's API.", flush=True)
            print(f"  curl {url}/v1/chat/completions{token} -H 'Content-Type: application/json' -d {body}", flush=True)
            if admin_file is not None:
                print(f"Replace the model: paceline deploy {url} RUN (the token is in {admin_file})", flush=True)

        _run(stack, serve_engine(engine, arguments, model, name, address, options, on_ready))
    return 0


def _run(stack: ExitStack, server: Coroutine[Any, Any, None]) -> None:
    import asyncio

    import uvloop

    stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop)).run(server)


def _listen_address(
    host: str, port: int, grpc_port: int | None, token_file: Path | None, cors_origins: tuple[str, ...]
) -> ListenAddress:
    """Return the address with the tokens of its clients, or with one for changes by programs of this machine."""
    from paceline_serving.access import BearerTokens
    from paceline_serving.server import ListenAddress

    tokens = None if token_file is None else BearerTokens(token_file)
    admin_token = None if tokens is not None else secrets.token_hex(TOKEN_BYTES)
    return ListenAddress(
        host=host, port=port, grpc_port=grpc_port, tokens=tokens, cors_origins=cors_origins, admin_token=admin_token
    )


def _admin_file(stack: ExitStack, url: str, token: str | None) -> Path | None:
    """Make the file of mode 600 in which ``paceline deploy`` finds the token, if any; it goes with the stack."""
    from paceline_serving.access import admin_token_path

    if token is None:
        return None
    try:
        path = admin_token_path(urlsplit(url).port or 80)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, f"{token}\n".encode(), private=True)
    except (OSError, ConfigError) as error:
        logging.getLogger("paceline_serving").warning("no package can be replaced without --token-file: %s", error)
        return None
    stack.callback(path.unlink, missing_ok=True)
    return path


def _print_inputs(spec: ModelSpec, url: str, path: str, token: str) -> None:
    from paceline.core.inference import name_with_unit
    from paceline_serving.protocol import example_rows

    fields = spec.fields
    for field in fields[:_MAX_FIELDS]:
        about = ", ".join(filter(None, (field.type_text, field.unit, field.values_text)))
        print(f"  {field.name}: {about}", flush=True)
    if len(fields) > _MAX_FIELDS:
        print(f"  and {len(fields) - _MAX_FIELDS} more: paceline predict {url} --describe", flush=True)
    measured = [name_with_unit(field.name, field.unit) for field in spec.output_fields if field.unit]
    if measured:
        print(f"  It answers with {', '.join(measured[:_MAX_FIELDS])}.", flush=True)
    request = example_rows(spec)
    command = f"curl {url}/{path}{token} -d {shlex.quote(request)}"
    if len(request) > _MAX_SHOWN:  # an image's numbers would fill the terminal
        address = f"{url}/v2/models/{spec.name}"
        command = f"curl -s {address}/example{token} | curl {address}/infer{token} -d @-"
    print(f"  Ask it in a terminal: {command}", flush=True)


class _LogFormatter(logging.Formatter):
    """A formatter whose messages are one line each, whatever a client or a package puts into them."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escape_controls(super().formatMessage(record))


def _print_service(
    kserve: KServeOptions,
    packages: tuple[str, ...],
    words: tuple[str, ...],
    replicas: tuple[int, int],
    options: ServingOptions,
    *,
    json: bool,
) -> int:
    """Print the manifest of a server in pods, started with ``options`` and the arguments ``words``.

    Raises:
        ConfigError: Kubernetes would refuse the manifest, or the server its options.
    """
    from paceline_kubernetes.manifests import InferenceService

    if not kserve.dry_run:
        raise ConfigError(
            "--on kserve only prints an InferenceService, which kubectl applies: "
            "add --dry-run, and | kubectl apply -f -"
        )
    if kserve.image is None or kserve.token_secret is None:
        raise ConfigError(
            "--on kserve needs --image, a container image that contains Paceline, and --token-secret "
            "SECRET/KEY: other machines reach the server, so clients must send a token."
        )
    if not ({"--trust", "--task", "onnx"} & set(words)):
        raise ConfigError(
            "a new pod trusts no package. Add --trust if you trust these packages' programs, --program onnx "
            "for programs that cannot run code, or --task TASK to use the weights alone."
        )
    gpus = [device for device in options.devices if device != "cpu"]
    if gpus and len(set(options.devices)) != len(gpus):
        raise ConfigError(
            f"--devices {','.join(options.devices)}: the pods of --on kserve use either CPUs or GPUs. "
            "Name each GPU once, and no CPU together with GPUs."
        )
    service = InferenceService(
        packages=packages,
        words=(*options.words(), *words),
        replicas=replicas,
        gpus=len(gpus),
        threads=options.threads,
        timeout_s=options.timeout_s,
        startup_s=options.startup_timeout_s,
        drain_s=options.drain_delay_s,
        **{option.name: getattr(kserve, option.name) for option in fields(kserve) if option.name != "dry_run"},
    )
    print(json_module.dumps(service.manifest()) if json else service.text, end="\n" if json else "")
    return 0


def deploy(
    url: str,
    package: str,
    *,
    model: str | None = None,
    allow_signature_change: Annotated[bool, Parameter(negative="")] = False,
    token_file: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Replace the package that the server at URL serves by PACKAGE; no request fails.

    Args:
        url: Address of the server, such as http://127.0.0.1:8000.
        package: A directory, or a reference such as fashion-mnist@prod; the server must be able to read it.
        model: The model's name on the server. Default: the package's.
        allow_signature_change: Replace the model also if inputs, outputs or labels differ, which may break its clients.
        token_file: File with the server's token; readable only by you. Default: that of your own server on this
            machine.
        json: Print the server's answer as one line of JSON.
    """
    from paceline_serving.client import Client

    token_file = token_file or _own_token_file(url)
    location = str(Path(package).absolute()) if Path(package).is_dir() else package
    # The server answers when the package's replicas have loaded it.
    with Client(url, token_file=token_file, timeout_s=_LOADING_TIMEOUT_S) as client:
        answer = client.swap(location, model, allow_signature_change=allow_signature_change)
    print(json_module.dumps(answer) if json else f"{answer['name']} is now version {answer['version']}.")
    return 0


def _own_token_file(url: str) -> Path | None:
    from paceline_serving.access import admin_token_path

    try:
        host, port = urlsplit(url).hostname, urlsplit(url).port
    except ValueError:
        return None  # the client names what is wrong
    path = None if port is None or host is None or not is_loopback(host) else admin_token_path(port)
    return path if path is not None and path.exists() else None
