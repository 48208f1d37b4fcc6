"""Faults of a server under load: its package is exchanged, it gets SIGTERM, its replicas are killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.serving.load import SteadyLoad, Times
from benchmarks.serving.servers import (
    RECIPE,
    answers,
    end,
    free_port,
    ready_address,
    start_paceline,
    wait,
    write_package,
)
from paceline.core.errors import LaunchError

Request = Callable[[int], bytes]
Report = dict[str, float]

SWAPS = 100
DRAINS = 20
KILLS = 5
_CALM_S = 1.0  # of load before the first fault, between two, and after the last
_POLL_S = 0.01
_LATE_S = 0.1  # a state that is reported this long after its end is wrong
_BACK_TIMEOUT_S = 120.0


async def swaps(request: Request, connections: int, directory: Path, count: int = SWAPS) -> Report:
    """Exchange a server's package so often, for another one and back."""
    from paceline_serving.client import Client

    packages = [directory / "package", directory / "other"]
    for seed, package in enumerate(packages):
        write_package(package, seed)
    port = free_port()
    process = start_paceline(packages[0], port)
    loop = asyncio.get_running_loop()
    took_s = []
    try:
        await asyncio.to_thread(wait, process, ready_address(port))
        with Client(f"http://127.0.0.1:{port}", timeout_s=_BACK_TIMEOUT_S) as client:
            async with SteadyLoad(request, [port], connections) as load:
                await asyncio.sleep(_CALM_S)
                versions = set()
                for number in range(count):
                    began = loop.time()
                    place = str(packages[(number + 1) % 2])
                    answer = await asyncio.to_thread(client.swap, place, RECIPE)
                    took_s.append(loop.time() - began)
                    versions.add(answer["version"])
                await asyncio.sleep(_CALM_S)
    finally:
        end(process)
    if len(versions) != min(count, 2):
        raise LaunchError(f"bench: {count} swaps led to the versions {sorted(versions)}.")
    return {**_report(load), "faults": count, "slowest_s": max(took_s)}


async def drains(request: Request, connections: int, directory: Path, count: int = DRAINS) -> Report:
    """Of two servers, end and start one after the other; clients go where it is ready."""
    write_package(directory / "package")
    ports = [free_port(), free_port()]
    words = ("--drain-delay", "1s")
    running = [start_paceline(directory / "package", port, words) for port in ports]
    loop = asyncio.get_running_loop()
    took_s = []
    try:
        for process, port in zip(running, ports, strict=True):
            await asyncio.to_thread(wait, process, ready_address(port))
        async with SteadyLoad(request, list(ports), connections) as load:
            await asyncio.sleep(_CALM_S)
            for number in range(count):
                which = number % 2
                began = loop.time()
                running[which].send_signal(signal.SIGTERM)
                while await asyncio.to_thread(answers, ready_address(ports[which])):
                    await asyncio.sleep(_POLL_S)
                load.ports.remove(ports[which])
                code = await asyncio.to_thread(running[which].wait, _BACK_TIMEOUT_S)
                took_s.append(loop.time() - began)
                if code != 0:
                    raise LaunchError(f"bench: a server that got a stop request ended with code {code}.")
                running[which] = start_paceline(directory / "package", ports[which], words)
                await asyncio.to_thread(wait, running[which], ready_address(ports[which]))
                load.ports.append(ports[which])
                await asyncio.sleep(_CALM_S)
    finally:
        for process in running:
            end(process)
    return {**_report(load), "faults": count, "slowest_s": max(took_s), "refused": load.refused}


async def kills(request: Request, connections: int, directory: Path, replicas: int, count: int = KILLS) -> Report:
    """Kill a replica so often; each time wait until there are as many as before."""
    write_package(directory / "package")
    port = free_port()
    process = start_paceline(directory / "package", port, ("--replicas", str(replicas)))
    back_s, untrue = [], 0
    loop = asyncio.get_running_loop()
    try:
        await asyncio.to_thread(wait, process, ready_address(port))
        async with SteadyLoad(request, [port], connections) as load:
            for number in range(count):
                await asyncio.sleep(_CALM_S)
                victim = _replicas(process)[0]
                victim.kill()
                killed = loop.time()
                said = []  # when, and whether the server called itself ready
                while not await asyncio.to_thread(_back, port, number + 1, replicas):
                    said.append((loop.time(), await asyncio.to_thread(answers, ready_address(port))))
                    if loop.time() - killed > _BACK_TIMEOUT_S:
                        raise LaunchError(f"bench: no replica was back in {_BACK_TIMEOUT_S:g} s.")
                    await asyncio.sleep(_POLL_S)
                back_s.append(loop.time() - killed)
                # With one replica, an answer shows that it is back; with others, some are always ready.
                later = (at for at in load.answered_at if at > killed + _LATE_S)
                true_from = killed if replicas > 1 else next(later, loop.time())
                untrue += sum(
                    ready != (at >= true_from)
                    for at, ready in said
                    if at > killed + _LATE_S and abs(at - true_from) > _LATE_S
                )
            await asyncio.sleep(_CALM_S)
    finally:
        end(process)
    return {**_report(load), "faults": count, "slowest_s": max(back_s), "untrue": untrue}


def _replicas(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    [forks] = [
        child for child in psutil.Process(process.pid).children() if "paceline_serving.fork_server" in child.cmdline()
    ]
    return forks.children()


def _back(port: int, restarts: int, replicas: int) -> bool:
    """Whether the server has noticed so many deaths, and has all replicas."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    label = f'{{model="{RECIPE}"}}'
    return (
        f"paceline_replica_restarts_total{label} {restarts}.0" in text
        and f"paceline_ready_replicas{label} {replicas}.0" in text
    )


def _report(load: SteadyLoad) -> Report:
    times: Times = load.times
    seconds = load.answered_at[-1] - load.answered_at[0] if len(load.answered_at) > 1 else 0.0
    return {
        "requests_per_s": len(load.answered_at) / seconds if seconds else 0.0,
        "requests": float(sum(map(len, times.by_status.values())) + times.broken),
        "failed": float(load.failed),
        "p99_ms": times.percentile_ms(200, 99),
    }
