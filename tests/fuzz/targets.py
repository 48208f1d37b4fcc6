"""What is fuzzed: each target makes one case of a seed, and fails where Paceline does.

A failure is an exception that is not a :class:`~paceline.core.errors.PacelineError`, an answer of 5xx that is not one
of the limits, an error of gRPC that does not blame the request, or a case that does not end.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import FrameType

import grpc
import httpx
import numpy as np
from plugins.serving.tests.conftest import Server
from plugins.serving.tests.load import PATH
from plugins.serving.tests.test_fuzz import damaged
from tests.fuzz.damage import ODD_VALUES, copy_tree, damage_bytes, damage_json, damage_tree
from tritonclient.grpc import service_pb2

from paceline.cli import _run
from paceline.core.config import RunConfig, all_options
from paceline.core.errors import PacelineError
from paceline.core.job import WorkerConfig
from paceline.runs.checkpoint_manifest import MANIFEST
from paceline_pages.run_index import Index

CASE_S = 120.0
"""A case that takes longer hangs."""


class CaseHangs(BaseException):
    """A case did not end; no handler of errors takes it."""


_LIMITS = (503, 504)
_GRPC_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_BLAMES_THE_REQUEST = (
    *(grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED),
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


@dataclasses.dataclass(frozen=True)
class World:
    """What targets work on.

    Attributes:
        run: a finished run's directory.
        registry: a registry with one package.
        scratch: a folder for the cases.
        server: of the package, with gRPC.
    """

    run: Path
    registry: Path
    scratch: Path
    server: Server


def fuzz_run_directory(rng: random.Random, world: World) -> None:
    """Read a damaged run by every command that only reads."""
    run = world.scratch / "runs" / "damaged"
    copy_tree(world.run, run)
    damage_tree(rng, run)
    read_run(run)


def read_run(run: Path) -> None:
    """Read a run by every command that only reads, and as the dashboard does."""
    for words in (
        ("runs", run.parent),
        ("runs", run.parent, "--json"),
        ("runs", "show", run),
        ("audit", run),
        ("logs", run),
        ("checkpoint", "ls", run),
        ("checkpoint", "verify", run),
        ("gc", run.parent, "--keep-last", "1"),
    ):
        _command(*map(str, words))
    rows = Index([run.parent]).rows()
    json.dumps(rows)


def fuzz_package(rng: random.Random, world: World) -> None:
    """Open a package of an author who damaged it, and either did or did not correct the digests."""
    packages = world.scratch / "packages"
    copy_tree(world.registry, packages)
    [package] = [path.parent for path in packages.rglob(MANIFEST)]
    chosen = damage_tree(rng, package)
    if rng.random() < 0.7:
        _correct_digests(package)
    assert chosen
    with _variable("PACELINE_REGISTRY", str(packages)):
        _command("registry", "show", str(package))
        _command("registry", "ls")


def fuzz_registry(rng: random.Random, world: World) -> None:
    """List and resolve in a registry with damaged tags and folders."""
    registry = world.scratch / "registry"
    copy_tree(world.registry, registry)
    damage_tree(rng, registry)
    with _variable("PACELINE_REGISTRY", str(registry)):
        read_registry()


def read_registry() -> None:
    """Read the registry of the environment, and tag a package there."""
    _command("registry", "ls")
    _command("registry", "ls", "--json")
    _command("registry", "show", "fashion-mnist@prod")
    _command("registry", "tag", "fashion-mnist@prod", "other")


def fuzz_job(rng: random.Random, world: World) -> None:
    """Read a damaged job file."""
    path = world.scratch / "job.toml"
    config = RunConfig(task="fashion-mnist", max_steps=3)
    path.write_bytes(damage_bytes(rng, WorkerConfig(config=config, world_size=2).to_toml().encode()))
    with suppress(PacelineError):
        WorkerConfig.from_toml(path)


def fuzz_options(rng: random.Random, world: World) -> None:
    """Give options of ``train`` values that they may not have, and print what would start."""
    words: list[str] = []
    for name in rng.sample(list(all_options()), rng.choice((1, 2, 4))):
        value = rng.choice(ODD_VALUES)
        text = rng.choice((str(value), "1", "0", "-1", "2", "auto", "8,4", "1:2", "5min", "x=y", "1e9"))
        words.append(f"--{name.replace('_', '-')}={text.replace(chr(0), '')[:500]}")
    run = world.scratch / "never"
    _command("train", "fashion-mnist-mlp", "--run-dir", str(run), *words, "--dry-run")
    assert not run.exists()


def fuzz_http(rng: random.Random, world: World) -> None:
    """Send a damaged request."""
    with httpx.Client(base_url=world.server.url, timeout=CASE_S) as client:
        if rng.random() < 0.4:
            body, headers = damaged(rng)
            status = client.post(PATH, content=body, headers=headers).status_code
        elif rng.random() < 0.5:
            rows = {"rows": [{"id": 1, "image": [[[0] * 28] * 28]}]}
            status = client.post("/predict", content=_json_bytes(rng, rows)).status_code
        else:
            tensor = {"name": "image", "datatype": "UINT8", "shape": [1, 1, 28, 28], "data": [0] * 784}
            request = {"id": "a", "inputs": [tensor], "outputs": [{"name": "label"}], "parameters": {"timeout": 10**6}}
            status = client.post(PATH, content=_json_bytes(rng, request)).status_code
    assert status < 500 or status in _LIMITS, f"the server answered {status}"


def fuzz_grpc(rng: random.Random, world: World) -> None:
    """Send a damaged message."""
    tensor = {"name": "image", "datatype": "UINT8", "shape": [1, 1, 28, 28]}
    request = service_pb2.ModelInferRequest(
        model_name="fashion-mnist", inputs=[tensor], raw_input_contents=[np.zeros(784, np.uint8).tobytes()]
    )
    with grpc.insecure_channel(world.server.grpc) as channel:
        call = channel.unary_unary(_GRPC_METHOD)
        message = damage_bytes(rng, request.SerializeToString())
        failure = call.future(message, timeout=CASE_S).exception()
    assert failure is None or failure.code() in _BLAMES_THE_REQUEST, f"{failure.code()}: {failure.details()}"


TARGETS: dict[str, Callable[[random.Random, World], None]] = {
    "run-directory": fuzz_run_directory,
    "package": fuzz_package,
    "registry": fuzz_registry,
    "job": fuzz_job,
    "options": fuzz_options,
    "http": fuzz_http,
    "grpc": fuzz_grpc,
}


def run_case(target: str, seed: int, world: World) -> None:
    """Run the case of a seed.

    Raises:
        Exception: it failed.
        CaseHangs: it did not end.
    """
    with time_limit():
        TARGETS[target](random.Random(f"{target} {seed}"), world)


def _command(*words: str) -> None:
    """Run a command of Paceline in this process; it may refuse, with one of its exit codes."""
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        code = _run(list(words))
    assert code in (0, 1, 2, 3), f"{' '.join(words)} ended with {code}: {errors.getvalue()[-500:]}"
    assert "Traceback" not in errors.getvalue(), f"{' '.join(words)}: {errors.getvalue()[-2000:]}"


def _json_bytes(rng: random.Random, document: object) -> bytes:
    text = json.dumps(damage_json(rng, document)).encode("utf-8", "surrogatepass")
    return damage_bytes(rng, text) if rng.random() < 0.3 else text


def _correct_digests(package: Path) -> None:
    try:
        if not (package / MANIFEST).is_file():
            return
        manifest = json.loads((package / MANIFEST).read_bytes())
        for name, record in manifest["files"].items():
            if (package / name).is_file() and not (package / name).is_symlink():
                content = (package / name).read_bytes()
                record |= {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        (package / MANIFEST).write_text(json.dumps(manifest))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # it is too damaged to be corrected


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def time_limit() -> Iterator[None]:
    """Raise :class:`CaseHangs` where the context takes too long."""

    def expire(signum: int, frame: FrameType | None) -> None:
        raise CaseHangs(f"the case did not end within {CASE_S:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, CASE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.stdout.flush()
