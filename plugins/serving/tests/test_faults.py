"""A server under load whose replicas die, whose package is exchanged, and that is told to end."""

from __future__ import annotations

import http.client
import json
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import torch
from plugins.serving.tests.conftest import Server, json_request, metrics, start_server
from plugins.serving.tests.load import PATH, Load
from plugins.serving.tests.packages import put_module
from safetensors.torch import save
from tests.processes import Processes
from torch import nn

from paceline.core.inference import InferenceSignature, TensorSpec

LOAD_PATH = "/v2/repository/models/fashion-mnist/load"


@pytest.fixture(scope="module")
def faulty(module_processes: Processes, serving_env: dict[str, str]) -> Server:
    return start_server(module_processes, serving_env, "fashion-mnist@prod", "--replicas", "2", shared=True)


def ready(server: Server) -> bool:
    return httpx.get(f"{server.url}/v2/health/ready", timeout=60).status_code == 200


def test_a_killed_replica_fails_no_request(faulty: Server, wait_until: Callable[..., None]) -> None:
    with Load(faulty.url) as load:
        wait_until(lambda: load.statuses[200] > 50, "answers before", timeout_s=120)
        victim = faulty.replicas()[0]
        victim.send_signal(signal.SIGKILL)
        seen = load.statuses[200]
        wait_until(lambda: load.statuses[200] > seen + 50, "answers from the other", timeout_s=120)
        wait_until(lambda: len(faulty.replicas()) == 2, "another process", timeout_s=120)
        wait_until(
            lambda: 'ready_replicas{model="fashion-mnist"} 2.0' in metrics(faulty),
            "both ready",
            timeout_s=120,
        )
    assert load.statuses.keys() == {200}
    assert load.broken == []
    assert 'replica_restarts_total{model="fashion-mnist"} 1.0' in metrics(faulty)


def test_a_server_that_is_killed_during_a_swap_leaves_no_process(
    start: Callable[..., Server], wait_until: Callable[..., None]
) -> None:
    server = start("fashion-mnist@prod")
    before = set(server.replicas())
    body = {"parameters": {"package": "fashion-mnist@next"}}
    answers: list[int] = []

    def swap() -> None:
        with suppress(httpx.TransportError):
            answer = httpx.post(f"{server.url}{LOAD_PATH}", json=body, headers=server.admin, timeout=120)
            answers.append(answer.status_code)

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        wait_until(lambda: set(server.replicas()) - before or answers, "the other package's replica", timeout_s=120)
        processes = psutil.Process(server.popen.pid).children(recursive=True)
        server.popen.kill()
        server.popen.wait(60)
    finally:
        swapping.join(120)
    assert len(processes) >= 2, "of the one package or of both"
    wait_until(lambda: not any(process.is_running() for process in processes), "the end of all", timeout_s=60)
    again = start("fashion-mnist@prod")
    assert httpx.post(f"{again.url}{PATH}", json=json_request(), timeout=60).status_code == 200


def test_a_package_that_is_damaged_while_it_is_served(
    run_processes: Processes, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """A replica that has it answers; another one begins only with the package's own bytes."""
    inputs, outputs = ({name: TensorSpec(dtype="float32", shape=(3,))} for name in ("x", "y"))
    signature = InferenceSignature(module=Doubled(), inputs=inputs, outputs=outputs)
    put_module(tmp_path, signature, Doubled().eval(), save({"none": torch.zeros(1)}), name="doubled")
    [program] = tmp_path.glob("packages/*/program.pt2")
    whole = program.read_bytes()
    env = {"PACELINE_REGISTRY": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    server = start_server(run_processes, env, "doubled@prod")

    def ask(limit_ms: int) -> httpx.Response:
        document = {"rows": [{"x": [1, 2, 3]}]}
        headers = {"Request-Timeout-Ms": str(limit_ms)}
        return httpx.post(f"{server.url}/predict", json=document, headers=headers, timeout=120)

    program.write_bytes(whole[:-1] + b"x")
    assert ask(60_000).status_code == 200
    server.replicas()[0].send_signal(signal.SIGKILL)
    wait_until(lambda: not ready(server), "not ready", timeout_s=60)
    answer = ask(500)
    assert (answer.status_code, "time limit of 500 ms" in answer.json()["error"]) == (504, True)
    program.write_bytes(whole)
    wait_until(lambda: ready(server), "ready again", timeout_s=60)
    assert ask(60_000).json()["predictions"] == [{"y": [2, 4, 6]}]


@pytest.mark.slow
def test_a_stopped_replica_is_replaced(start: Callable[..., Server]) -> None:
    server = start("fashion-mnist@prod", "--hang-timeout", "2s", "--timeout", "2min")
    server.replicas()[0].send_signal(signal.SIGSTOP)
    answer = httpx.post(f"{server.url}{PATH}", json=json_request(), timeout=150)
    assert answer.status_code == 200


class Doubled(nn.Module):
    """Numbers (B, 3) -> twice them (B, 3)."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": 2 * x}


def test_a_package_with_another_signature_is_refused_unless_it_is_asked_for(
    faulty: Server, registry: Path, run_processes: Processes, serving_env: dict[str, str]
) -> None:
    tensor = TensorSpec(dtype="float32", shape=(3,))
    signature = InferenceSignature(module=Doubled(), inputs={"x": tensor}, outputs={"y": tensor})
    put_module(registry, signature, Doubled().eval(), save({}), name="doubled")
    words = ("deploy", faulty.url, "doubled@prod", "--model", "fashion-mnist")
    refused = run_processes.paceline(*words, env=serving_env, timeout_s=240)
    assert refused.returncode != 0
    assert "input image is absent instead of UINT8 [any, 1, 28, 28]" in refused.stderr
    assert "input x is FP32 [any, 3] instead of absent" in refused.stderr
    assert "--allow-signature-change" in refused.stderr
    assert httpx.post(f"{faulty.url}{PATH}", json=json_request(), timeout=60).status_code == 200
    for package, name in (("doubled@prod", "x"), ("fashion-mnist@prod", "image")):
        words = ("deploy", faulty.url, package, "--model", "fashion-mnist", "--allow-signature-change")
        done = run_processes.paceline(*words, env=serving_env, timeout_s=240)
        assert done.returncode == 0, done.stderr
        metadata = httpx.get(f"{faulty.url}/v2/models/fashion-mnist", timeout=60).json()
        assert [tensor["name"] for tensor in metadata["inputs"]] == [name]


def test_another_package_without_a_failed_request(
    faulty: Server, run_processes: Processes, serving_env: dict[str, str], wait_until: Callable[..., None]
) -> None:
    with Load(faulty.url) as load:
        wait_until(lambda: load.statuses[200] > 20, "answers before", timeout_s=120)
        done = run_processes.paceline("deploy", faulty.url, "fashion-mnist@next", env=serving_env, timeout_s=240)
        assert done.returncode == 0, done.stderr
        assert "is now version" in done.stdout
        wait_until(lambda: len(load.versions) == 2, "answers of the other", timeout_s=120)
        wait_until(lambda: len(faulty.replicas()) == 2, "the old replicas' end", timeout_s=120)
    assert load.statuses.keys() == {200}
    assert load.broken == []
    assert len(load.versions) == 2

    done = run_processes.paceline("deploy", faulty.url, "fashion-mnist@none", env=serving_env, timeout_s=240)
    assert done.returncode == 1
    assert "the model was not replaced" in done.stderr
    assert ready(faulty)


def test_a_package_that_is_exchanged_while_a_client_sends(
    faulty: Server, run_processes: Processes, serving_env: dict[str, str]
) -> None:
    body = json.dumps(json_request()).encode()
    connection = http.client.HTTPConnection(urlsplit(faulty.url).netloc, timeout=60)
    try:
        connection.putrequest("POST", PATH)
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body[:100])
        before = httpx.get(f"{faulty.url}/v2/models/fashion-mnist", timeout=60).json()["versions"]
        for tag in ("prod", "next"):
            done = run_processes.paceline("deploy", faulty.url, f"fashion-mnist@{tag}", "--json", env=serving_env)
            assert done.returncode == 0, done.stderr
            if [json.loads(done.stdout)["version"]] != before:
                break
        connection.send(body[100:])
        answer = connection.getresponse()
        assert answer.status == 200
        assert [json.loads(answer.read())["model_version"]] != before
    finally:
        connection.close()


@pytest.mark.chaos
def test_readiness_and_the_end(start: Callable[..., Server], wait_until: Callable[..., None]) -> None:
    server = start("fashion-mnist@prod", "--drain-delay", "10s", "--timeout", "2min")
    assert ready(server)
    with Load(server.url) as load:
        wait_until(lambda: load.statuses[200] > 50, "answers before", timeout_s=120)
        # Its successor is forked at once, unless the process that does it is stopped.
        forks = server.fork_server()
        forks.send_signal(signal.SIGSTOP)
        forks.children()[0].send_signal(signal.SIGKILL)
        wait_until(lambda: not ready(server), "not ready without replicas")
        assert httpx.get(f"{server.url}/v2/health/live", timeout=60).status_code == 200
        seen = load.statuses[200]
        forks.send_signal(signal.SIGCONT)
        # Every client's request has waited.
        wait_until(lambda: load.statuses[200] > seen + 50, "answers after", timeout_s=120)
        assert ready(server)
    assert load.statuses.keys() == {200}
    assert load.broken == []
    # SIGTERM: what was asked is answered.
    with Load(server.url) as load:
        wait_until(lambda: load.statuses[200] > 50, "answers before", timeout_s=120)
        server.popen.send_signal(signal.SIGTERM)
        load.join()
    assert load.statuses.keys() == {200}
    assert load.broken == []
    assert server.popen.wait(60) == 0
