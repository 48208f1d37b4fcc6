"""One round of one contender: ``python -m benchmarks.serving.round NAME DIRECTORY SECONDS``."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import uvloop

from benchmarks.rounds import REPORT
from benchmarks.serving import engine, faults
from benchmarks.serving.load import Times, closed_loop, http_request, open_loop
from benchmarks.serving.servers import RECIPE, build_classifier, server, write_package
from paceline.core.errors import LaunchError
from paceline_serving.model import ServingOptions

CONNECTIONS = 32
BATCH = 32
BINARY_CONNECTIONS = 4
OVERLOAD = 5
ROWS_PER_S = 45_000
"""Of each second that is asked for: a file so large that the start, some seconds, is a small part."""

_OVERLOAD_CONNECTIONS = 1000
_WARMUP_S = 3.0
_TURN_S, _TURN_WARMUP_S = 1.0, 0.3
_INFER = f"/v2/models/{RECIPE}/infer"


def main(name: str, directory: Path, seconds: float) -> None:
    """Measure, and leave the report in the directory."""
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with runner:
        match name:
            case "in-process":
                report = _in_process(seconds)
            case "predict-1" | "predict-2":
                report = _predict(directory, int(name[-1]), int(ROWS_PER_S * seconds))
            case "paceline-swap":
                report = runner.run(faults.swaps(_infer_one, CONNECTIONS, directory))
            case "paceline-drain":
                report = runner.run(faults.drains(_infer_one, CONNECTIONS, directory))
            case "paceline-kill-1" | "paceline-kill-2":
                replicas = int(name[-1])
                report = runner.run(faults.kills(_infer_one, CONNECTIONS, directory, replicas))
            case "paceline-engine":
                report = engine.measure(directory, seconds)
            case "paceline-overload":
                ours, theirs = _two_cores()
                os.sched_setaffinity(0, theirs)  # the server will have it of us
                with server(name, directory) as (port, pid):
                    os.sched_setaffinity(0, ours)
                    report = runner.run(_overload(port, pid, seconds))
            case "paceline-exact":
                for folder in (free := directory / "free", exact := directory / "exact"):
                    folder.mkdir()
                with server(name, free) as (free_port, _), server(name, exact, "--exact") as (exact_port, _):
                    report = runner.run(_take_turns(free_port, exact_port, seconds))
            case _:
                with server(name, directory) as (port, _):
                    report = runner.run(_load(name, port, seconds))
    (directory / REPORT).write_text(json.dumps(report), encoding="utf-8")


def _two_cores() -> tuple[set[int], set[int]]:
    """One for the load and one for the server; where there is one only, they share it."""
    cores = sorted(os.sched_getaffinity(0))
    return {cores[-1]}, {cores[0]}


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
    """Rows a second of ``paceline predict``, from the command to its result."""
    write_package(directory / "package")
    np.save(directory / "rows.npy", _pictures(rows))
    output = directory / "out.npz"
    argv = [sys.executable, "-m", "paceline", "predict", str(directory / "package"), "--task", RECIPE]
    argv += [str(directory / "rows.npy"), "--output", str(output), "--nproc", str(processes)]
    began = time.perf_counter()
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise LaunchError(f"bench: paceline predict ended with code {done.returncode}; see above.")
    with np.load(output) as result:
        if len(result["label"]) != rows:
            raise LaunchError(f"bench: {rows} rows were predicted, and {len(result['label'])} came out.")
    return {"rows_per_s": rows / seconds}


def _pictures(rows: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, (rows, 1, 28, 28), dtype=np.uint8)


async def _load(name: str, port: int, seconds: float) -> dict[str, float]:
    if name == "paceline-binary":
        times = await closed_loop(port, _binary(port), BINARY_CONNECTIONS, _WARMUP_S, seconds)
        return {**_report(times, seconds), "rows_per_s": BATCH * times.count(200) / seconds}
    request = _infer_one(port) if name == "paceline" else _predict_one(port)
    return _report(await closed_loop(port, request, CONNECTIONS, _WARMUP_S, seconds), seconds)


async def _take_turns(free_port: int, exact_port: int, seconds: float) -> dict[str, float]:
    """Load two servers in turns, each for ``seconds`` in all: the machine's speed changes less within a turn."""
    answered = {free_port: 0, exact_port: 0}
    turns = max(2, round(seconds / _TURN_S))
    for turn in range(turns):
        for port in list(answered) if turn % 2 else reversed(answered):
            times = await closed_loop(port, _infer_one(port), CONNECTIONS, _TURN_WARMUP_S, _TURN_S)
            _report(times, _TURN_S)
            answered[port] += times.count(200)
    measured_s = turns * _TURN_S
    return {"requests_per_s": answered[exact_port] / measured_s, "free_per_s": answered[free_port] / measured_s}


async def _overload(port: int, pid: int, seconds: float) -> dict[str, float]:
    request = _infer_one(port)
    below = _report(await closed_loop(port, request, CONNECTIONS, _WARMUP_S, seconds), seconds)
    rate = OVERLOAD * below["requests_per_s"]
    process = psutil.Process(pid)
    memory: list[int] = []
    times = await open_loop(
        *(port, request, _OVERLOAD_CONNECTIONS, rate, seconds),
        settled=lambda: memory.append(process.memory_info().rss),
    )
    memory.append(process.memory_info().rss)
    # A request that is taken may find a full queue before it.
    queue_ms = 1000 * ServingOptions().max_queue / below["requests_per_s"]
    due = times.not_sent + times.broken + sum(map(len, times.by_status.values()))
    return {
        "requests_per_s": below["requests_per_s"],
        "unloaded_p99_ms": below["p99_ms"],
        "accepted_per_s": times.count(200) / seconds,
        "accepted_p99_ms": times.percentile_ms(200, 99),
        "accepted_bound_ms": 2 * below["p99_ms"] + queue_ms,
        "refused_per_s": times.count(429) / seconds,
        "refused_p99_ms": times.percentile_ms(429, 99),
        "not_sent_percent": 100 * times.not_sent / due,
        "broken": float(due - times.not_sent - times.count(200) - times.count(429)),
        "growth_mib": (memory[-1] - memory[0]) / 2**20,
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


def _predict_one(port: int) -> bytes:
    """One picture, as FastAPI's and LitServe's applications take it."""
    return http_request(port, "/predict", json.dumps({"data": _pictures(1).ravel().tolist()}).encode())


def _infer_one(port: int) -> bytes:
    """One picture, as the Open Inference Protocol says it."""
    data = _pictures(1).ravel().tolist()
    tensor = {"name": "image", "datatype": "UINT8", "shape": [1, 1, 28, 28], "data": data}
    return http_request(port, _INFER, json.dumps({"inputs": [tensor]}).encode())


def _binary(port: int) -> bytes:
    from paceline_serving.client import encode_binary

    body, json_length = encode_binary({"image": _pictures(BATCH)})
    headers = ["Content-Type: application/octet-stream", f"Inference-Header-Content-Length: {json_length}"]
    return http_request(port, _INFER, body, headers)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
