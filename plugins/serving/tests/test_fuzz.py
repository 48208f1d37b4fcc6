"""Requests that nobody would think of: from our own OpenAPI document, and binary tensors that are damaged.

None of them may end in a 5xx, and the server must still be there and its memory not grown.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import httpx
import psutil
import pytest
import schemathesis
import schemathesis.specs.openapi.schemas
from hypothesis import HealthCheck, Phase, given, settings
from plugins.serving.tests.conftest import Server
from plugins.serving.tests.load import PATH
from schemathesis.specs.openapi.checks import positive_data_acceptance
from tests.processes import Processes

HEADER = {"name": "image", "datatype": "UINT8", "shape": [2, 1, 28, 28]}


def try_schema(server: Server, examples: int) -> int:
    """Send requests that fit the document and ones that do not, and hold the answers against it.

    A request that fits may be refused: the document cannot say that the shape has to fit the data.
    """
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    # A text that is too long may make the whole body too large, which is said first.
    schema.config.checks.negative_data_rejection.expected_statuses = ["400", "403", "404", "405", "413", "415"]
    sent = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        modes = [schemathesis.GenerationMode.POSITIVE]
        if operation.method == "post":  # of a GET without parameters, nothing can be wrong
            modes.append(schemathesis.GenerationMode.NEGATIVE)
        for mode in modes:
            strategy = operation.as_strategy(generation_mode=mode)

            @settings(
                max_examples=examples,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(strategy)
            def send(case: schemathesis.Case) -> None:
                nonlocal sent
                sent += 1
                case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=60, headers=server.admin)

            send()
    return sent


def damaged(rng: random.Random) -> tuple[bytes, dict[str, str]]:
    """A binary request with something wrong, most of the time."""
    entry = {**HEADER, "parameters": {"binary_data_size": 1568}}
    odd = [0, -1, 2**31, 2**63, 2**70, 1.5, "1568", None, [], {}, True, 1567, 784]
    for _ in range(rng.randrange(3)):
        match rng.randrange(4):
            case 0:
                entry["parameters"] = {"binary_data_size": rng.choice(odd)}
            case 1:
                entry["shape"] = [rng.choice(odd) for _ in range(rng.randrange(6))]
            case 2:
                entry[rng.choice(["name", "datatype", "shape", "parameters", "data"])] = rng.choice(odd)
            case 3:
                entry.pop(rng.choice(list(entry)))
    text = bytearray(json.dumps({"inputs": [entry] * rng.choice([1, 1, 1, 0, 2, 100])}).encode())
    length = str(len(text))
    for _ in range(rng.choice([0, 0, 0, 1, 5])):
        text[rng.randrange(len(text))] = rng.randrange(256)
    if rng.random() < 0.2:
        length = rng.choice(["0", "-1", "", "99999999", "9" * 40, "0x10", "1 1", "é", length + "0"])
    body = bytes(text) + rng.randbytes(rng.choice([1568, 1568, 1568, 0, 1, 1567, 1569, 5000]))
    return body, {"Inference-Header-Content-Length": length.encode("latin-1")}  # type: ignore[dict-item]


def try_binary(server: Server, count: int) -> set[int]:
    """Send damaged binary requests; the statuses that came back."""
    rng = random.Random(0)
    seen = set()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for number in range(count):
            body, headers = damaged(rng)
            status = client.post(PATH, content=body, headers=headers).status_code
            assert status < 500, f"request {number} of seed 0"
            seen.add(status)
    return seen


def test_some_hundred_requests(server: Server) -> None:
    for path, operations in httpx.get(f"{server.url}/openapi.json", timeout=60).json()["paths"].items():
        body = operations.get("post", {}).get("requestBody", {"content": {}})["content"]
        if "example" in body.get("application/json", {}):
            example = body["application/json"]["example"]
            assert httpx.post(server.url + path, json=example, timeout=60).status_code == 200
    assert try_schema(server, 12) > 40
    assert {200, 400} <= try_binary(server, 300)
    assert httpx.get(f"{server.url}/v2/health/ready", timeout=60).status_code == 200
    assert "replica_restarts_total{" not in httpx.get(f"{server.url}/metrics", timeout=60).text.replace(
        'replica_restarts_total{model="fashion-mnist"} 0.0', ""
    )


@pytest.mark.slow
def test_another_generator_finds_no_failure(server: Server, run_processes: Processes, tmp_path: Path) -> None:
    """Schemathesis with all its phases: examples, the limits of each rule, random requests, and sequences of them."""
    command = [str(Path(sys.executable).with_name("st")), "run", f"{server.url}/openapi.json", "--no-color", "-n", "30"]
    command += ["-H", f"Authorization: {server.admin['Authorization']}"]
    command += ["--exclude-checks", "positive_data_acceptance", "--generation-deterministic"]
    done = run_processes.finish(run_processes.start(command, cwd=tmp_path), timeout_s=600)
    assert done.returncode == 0, done.stdout
    paths = httpx.get(f"{server.url}/openapi.json", timeout=60).json()["paths"]
    del paths["/openapi.json"]  # it does not test where it read the document
    assert f"Tested: {sum(map(len, paths.values()))}" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_requests(server: Server) -> None:
    process = psutil.Process(server.popen.pid)
    try_binary(server, 500)
    before = process.memory_info().rss
    assert try_schema(server, 1320) >= 10_000
    try_binary(server, 5_000)
    assert httpx.get(f"{server.url}/v2/health/ready", timeout=60).status_code == 200
    assert process.memory_info().rss - before < 64 * 2**20
