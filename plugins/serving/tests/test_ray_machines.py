"""Ray Serve in clusters that are there: what a server leaves in them, and a machine that is lost."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from plugins.serving.tests.conftest import json_request, start_server
from plugins.serving.tests.load import PATH
from tests.lab.machines import Machines, Node
from tests.processes import Processes

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

PATIENCE_S = 300
SMALL = {"RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(80 * 2**20)}
STARTS = (sys.executable, "-m", "paceline_ray.node")
# Asks without a pause until a file tells it to end; says how each request was answered.
CLIENT = f"""
import collections, http.client, json, pathlib, sys

statuses = collections.Counter()
connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=240)
while not pathlib.Path("end").exists():
    connection.request("POST", {PATH!r}, pathlib.Path("request.json").read_bytes())
    answer = connection.getresponse()
    answer.read()
    statuses[answer.status] += 1
    pathlib.Path("answers.new").write_text(json.dumps(statuses))
    pathlib.Path("answers.new").replace("answers")
"""


def serve_processes(processes: list[psutil.Process]) -> list[str]:
    """The actors of Ray Serve among them."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess, IndexError):
            title = process.cmdline()[0]
            if title.startswith(("ray::Serve", "ray::Anchor")):
                found.append(title)
    return found


def test_a_cluster_is_left_as_it_was(
    run_processes: Processes, serving_env: dict[str, str], wait_until: Callable[..., None], tmp_path: Path
) -> None:
    says = "import json, os, signal; print(json.dumps(dict(os.environ)), flush=True); signal.pause()"
    cluster = run_processes.start(
        [*STARTS, "--directory", tmp_path, "--cpus", "2", "--", sys.executable, "-c", says],
        env={**SMALL, **serving_env},  # replicas trust what the cluster's user does
    )
    assert cluster.stdout is not None
    line = cluster.stdout.readline()
    assert line, run_processes.finish(cluster)
    printed = json.loads(line)
    env = {**serving_env, **{name: value for name, value in printed.items() if name.startswith("RAY_")}}
    address = env.pop("RAY_ADDRESS")
    words = ("fashion-mnist@prod", "--on", "ray", "--ray-address", address, "--startup-timeout", "5min")

    def there() -> list[str]:
        return serve_processes(psutil.Process(cluster.pid).children(recursive=True))

    server = start_server(run_processes, env, *words)
    assert httpx.post(f"{server.url}{PATH}", json=json_request(), timeout=60).status_code == 200
    assert any(title.startswith("ray::ServeReplica") for title in there())
    server.popen.terminate()
    assert server.popen.wait(60) == 0
    wait_until(lambda: not there(), "nothing of Ray Serve is left", timeout_s=60)

    server = start_server(run_processes, env, *words)
    server.popen.kill()
    wait_until(
        lambda: not any(title.startswith(("ray::ServeReplica", "ray::Anchor")) for title in there()),
        "a killed server's replicas are gone",
        timeout_s=120,
    )


def test_a_machine_is_lost(machines: Machines, serving_env: dict[str, str], wait_until: Callable[..., None]) -> None:
    nodes = machines(2)
    directory = nodes[0].lab.directory
    (directory / "request.json").write_text(json.dumps(json_request()))
    serve = (sys.executable, "-m", "paceline", "serve", "fashion-mnist@prod", "--on", "ray")
    patient = ("--startup-timeout", "5min", "--hang-timeout", "15s", "--timeout", "4min")
    cluster = [
        node.start(
            [
                *STARTS,
                "--directory",
                directory,
                "--cpus",
                "2",
                "--",
                *serve,
                *patient,
                "--replicas",
                "2",
                "--json",
            ],
            env={
                **serving_env,
                **SMALL,
                "PACELINE_NODE_RANK": str(rank),
                "PACELINE_NODES": "2",
                "PACELINE_HOSTS": ",".join(node.address for node in nodes),
            },
        )
        for rank, node in enumerate(nodes)
    ]

    def until(condition: Callable[[], object], what: str) -> None:
        def holds() -> object:
            assert [process.poll() for process in cluster[:1]] == [None], cluster[0].text
            return condition()

        wait_until(holds, what, timeout_s=PATIENCE_S)

    until(lambda: '"url"' in cluster[0].text, "the server")
    assert [len(replicas_of(node)) for node in nodes] == [1, 1]
    client = nodes[0].start([sys.executable, "-c", CLIENT], cwd=directory)

    def answered() -> dict[str, int]:
        try:
            found: dict[str, int] = json.loads((directory / "answers").read_text())
        except FileNotFoundError:
            return {}
        return found

    until(lambda: answered().get("200", 0) > 50, "answers before")
    nodes[1].kill()
    seen = answered()["200"]
    until(lambda: answered()["200"] > seen + 200, "answers from the machine that is left")
    until(lambda: len(replicas_of(nodes[0])) == 2, "another replica there")
    (directory / "end").touch()
    assert client.wait(120) == 0, client.text
    assert answered().keys() == {"200"}


def replicas_of(node: Node) -> list[psutil.Process]:
    """The replicas on a machine."""
    here = os.readlink(f"/proc/{node.pid}/ns/pid")
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError, IndexError):
            title, space = process.cmdline()[0], os.readlink(f"/proc/{process.pid}/ns/pid")
            if title.startswith("ray::ServeReplica") and space == here:
                found.append(process)
    return found
