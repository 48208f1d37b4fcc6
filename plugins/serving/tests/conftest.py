"""A server that several tests talk to, and ways to start others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from plugins.serving.tests.packages import put
from tests.processes import Processes

START_TIMEOUT_S = 120


@dataclass
class Server:
    """A ``paceline serve`` that is ready."""

    popen: subprocess.Popen[str]
    url: str
    grpc: str | None
    token_file: Path

    @property
    def admin(self) -> dict[str, str]:
        """The header of one who may replace its packages."""
        return {"Authorization": f"Bearer {self.token_file.read_text().strip()}"}

    def replicas(self) -> list[psutil.Process]:
        """Its replicas' processes."""
        return self.fork_server().children()

    def fork_server(self) -> psutil.Process:
        """The process that forks them."""
        children = psutil.Process(self.popen.pid).children()
        [found] = [child for child in children if "paceline_serving.fork_server" in child.cmdline()]
        return found


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry with ``fashion-mnist@prod`` and another version of it, ``@next``, both trusted."""
    home = tmp_path_factory.mktemp("registry")
    for seed, tag in enumerate(("prod", "next")):
        put(home, "fashion-mnist", name="fashion-mnist", seed=seed, tag=tag)
    return home


@pytest.fixture(scope="session")
def serving_env(registry: Path) -> dict[str, str]:
    """What lets a command find the registry and trust its packages."""
    return {"PACELINE_REGISTRY": str(registry), "XDG_CONFIG_HOME": str(registry / "config")}


def start_server(processes: Processes, env: dict[str, str], *words: str | Path, shared: bool = False) -> Server:
    """Start ``paceline serve`` on a free port and wait until it is ready."""
    popen = processes.start(
        [sys.executable, "-m", "paceline", "serve", *words, "--port", "0", "--json"], env=env, shared=shared
    )
    assert popen.stdout is not None
    line = popen.stdout.readline()
    if not line:
        pytest.fail(f"the server did not start: {processes.finish(popen, timeout_s=START_TIMEOUT_S)}")
    ready = json.loads(line)
    return Server(popen, ready["url"], ready["grpc"], Path(ready["token_file"]))


@pytest.fixture
def start(run_processes: Processes, serving_env: dict[str, str]) -> Callable[..., Server]:
    """Start a server that ends with the test."""
    return lambda *words: start_server(run_processes, serving_env, *words)


@pytest.fixture(scope="session")
def server(session_processes: Processes, serving_env: dict[str, str]) -> Server:
    """One that all tests share which leave it as it is."""
    words = ("fashion-mnist@prod", "--max-body", "2", "--grpc-port", "0")
    return start_server(session_processes, serving_env, *words, shared=True)


@pytest.fixture(scope="session")
def ray_server(session_processes: Processes, serving_env: dict[str, str]) -> Server:
    """The same on Ray Serve, in a cluster of its own."""
    words = ("fashion-mnist@prod", "--max-body", "2", "--on", "ray", "--startup-timeout", "5min")
    env = {**serving_env, "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(80 * 2**20)}
    return start_server(session_processes, env, *words, shared=True)


@pytest.fixture(scope="module", params=["embedded", pytest.param("ray", marks=pytest.mark.ray)])
def base_url(request: pytest.FixtureRequest) -> str:
    """Where the protocol is spoken: our own servers, or the one that PACELINE_CONFORMANCE_URL names."""
    other = os.environ.get("PACELINE_CONFORMANCE_URL")
    if other is not None:
        return other
    return request.getfixturevalue("server" if request.param == "embedded" else "ray_server").url


def metrics(server: Server) -> str:
    """What it counts, as Prometheus reads it."""
    return httpx.get(f"{server.url}/metrics", timeout=60).text


def json_request(**changes: Any) -> dict[str, Any]:
    """A request for one black picture, with changes to its only input."""
    tensor = {"name": "image", "datatype": "UINT8", "shape": [1, 1, 28, 28], "data": [0] * 784}
    return {"inputs": [{**tensor, **changes}]}
