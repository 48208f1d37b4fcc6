"""One round of one contender: ``python -m paceline.bench.serving.round NAME DIRECTORY SECONDS``."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import uvloop

from paceline.bench.serving.load import Times, closed_loop, http_request, open_loop
from paceline.bench.serving.model import PIXELS, RECIPE, build_classifier, write_package
from paceline.bench.workload import REPORT
from paceline.errors import LaunchError

CONNECTIONS = 32
BATCH = 32
BINARY_CONNECTIONS = 4
OVERLOAD = 5
ROWS_PER_S = 45_000
"""Of each second that is asked for: a file so large that the start, some seconds, is a small part."""

_OVERLOAD_CONNECTIONS = 1000
_WARMUP_S = 3.0
_START_TIMEOUT_S = 240.0
_INFER = f"/v2/models/{RECIPE}/infer"


def main(name: str, directory: Path, seconds: float) -> None:
    """Measure, and leave the report in the directory."""
    if name == "in-process":
        report = _in_process(seconds)
    elif name.startswith("predict-"):
        report = _predict(directory, int(name.removeprefix("predict-")), int(ROWS_PER_S * seconds))
    else:
        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        with _server(name, directory) as (port, pid), runner:
            report = runner.run(_load(name, port, pid, seconds))
    (directory / REPORT).write_text(json.dumps(report), encoding="utf-8")


def _in_process(seconds: float) -> dict[str, float]:
    """Rows a second of the model alone: one thread, batches of 32."""
    import torch

    classifier, _ = build_classifier()
    pixels = torch.from_numpy(_pictures(BATCH))
    rows = 0
    with torch.inference_mode():
        for _ in range(20):
            classifier(pixels)
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            classifier(pixels)
            rows += BATCH
    return {"rows_per_s": rows / (time.perf_counter() - began)}


def _predict(directory: Path, processes: int, rows: int) -> dict[str, float]:
    """Rows a second of ``paceline predict``, from the command to its result, and what CPU time they took."""
    write_package(directory / "package")
    np.save(directory / "rows.npy", _pictures(rows))
    output = directory / "out.npz"
    argv = [sys.executable, "-m", "paceline", "predict", str(directory / "package"), "--task", RECIPE]
    argv += [str(directory / "rows.npy"), "--output", str(output), "--nproc", str(processes)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise LaunchError(f"bench: paceline predict ended with code {done.returncode}; see above.")
    with np.load(output) as result:
        if len(result["label"]) != rows:
            raise LaunchError(f"bench: {rows} rows were predicted, and {len(result['label'])} came out.")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"rows_per_s": rows / seconds, "cpu_us_per_row": 1e6 * cpu / rows}


def _pictures(rows: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, (rows, 1, 28, 28), dtype=np.uint8)


async def _load(name: str, port: int, pid: int, seconds: float) -> dict[str, float]:
    if name == "paceline-binary":
        times = await closed_loop(port, _binary(port), BINARY_CONNECTIONS, _WARMUP_S, seconds)
        return {**_report(times, seconds), "rows_per_s": BATCH * times.count(200) / seconds}
    request = _json(name, port)
    times = await closed_loop(port, request, CONNECTIONS, _WARMUP_S, seconds)
    report = _report(times, seconds)
    if name != "paceline-overload":
        return report
    memory = psutil.Process(pid).memory_info().rss
    flood = await open_loop(
        port, request, _OVERLOAD_CONNECTIONS, OVERLOAD * report["requests_per_s"], seconds
    )
    return {
        "requests_per_s": report["requests_per_s"],
        "unloaded_p99_ms": report["p99_ms"],
        "accepted_per_s": flood.count(200) / seconds,
        "accepted_p99_ms": flood.percentile_ms(200, 99),
        "refused_per_s": flood.count(429) / seconds,
        "refused_p99_ms": flood.percentile_ms(429, 99),
        "not_sent_per_s": flood.not_sent / seconds,
        "broken": float(flood.broken),
        "growth_mib": (psutil.Process(pid).memory_info().rss - memory) / 2**20,
    }


def _report(times: Times, seconds: float) -> dict[str, float]:
    if times.broken or set(times.by_status) != {200}:
        found = {status: len(taken) for status, taken in times.by_status.items()}
        raise LaunchError(f"bench: not all requests were answered: {found}, {times.broken} broken.")
    return {
        "requests_per_s": times.count(200) / seconds,
        "p50_ms": times.percentile_ms(200, 50),
        "p99_ms": times.percentile_ms(200, 99),
    }


def _json(name: str, port: int) -> bytes:
    data = _pictures(1).ravel().tolist()
    assert len(data) == PIXELS
    if name in ("fastapi", "litserve"):
        return http_request(port, "/predict", json.dumps({"data": data}).encode())
    tensor = {"name": "image", "datatype": "UINT8", "shape": [1, 1, 28, 28], "data": data}
    return http_request(port, _INFER, json.dumps({"inputs": [tensor]}).encode())


def _binary(port: int) -> bytes:
    from paceline.serving.client import encode_binary

    body, json_length = encode_binary({"image": _pictures(BATCH)})
    headers = ["Content-Type: application/octet-stream", f"Inference-Header-Content-Length: {json_length}"]
    return http_request(port, _INFER, body, headers)


@contextmanager
def _server(name: str, directory: Path) -> Iterator[tuple[int, int]]:
    """A server that answers; its port and its process."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    if name in ("fastapi", "litserve"):
        argv = [sys.executable, "-m", f"paceline.bench.serving.{name}_peer", str(port)]
        address = f"http://127.0.0.1:{port}/docs"
    else:
        write_package(directory / "package")
        argv = [sys.executable, "-m", "paceline", "serve", str(directory / "package"), "--task", RECIPE]
        argv += ["--port", str(port), "--drain-notice", "1ms"]
        address = f"http://127.0.0.1:{port}/v2/health/ready"
    server = subprocess.Popen(argv, stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        _wait(server, address)
        yield port, server.pid
    finally:
        _end(server)


def _wait(server: subprocess.Popen[bytes], address: str) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise LaunchError(f"bench: the server ended with code {server.returncode}; see above.")
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise LaunchError(f"bench: the server did not answer within {_START_TIMEOUT_S:g} s.")


def _end(server: subprocess.Popen[bytes]) -> None:
    tree = [psutil.Process(server.pid)] if server.poll() is None else []
    tree += [child for process in tree for child in process.children(recursive=True)]
    server.terminate()
    _, alive = psutil.wait_procs(tree, timeout=10)
    for process in alive:
        process.kill()
    server.wait()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
