"""Nodes killed and frozen under each coordinator: the time until the other node has done a step without it."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import psutil

from benchmarks.faults import FaultScript
from benchmarks.results import BenchResult, Progress, Spread, significant
from benchmarks.rounds import end_processes
from paceline.core.errors import ConfigError, LaunchError
from paceline.core.signals import handle_signals
from paceline.runs.directory import RunDirectory
from paceline_checks.bench_report import ReportTable

Coordinator = Literal["embedded", "etcd"]
_COORDINATORS: tuple[Coordinator, ...] = ("embedded", "etcd")
_LOSSES = {
    "the other node is killed": (1, signal.SIGKILL),
    "the leading node is killed": (0, signal.SIGKILL),
    "the leading node freezes": (0, signal.SIGSTOP),
}
_STEP_S = 0.02
_STEPS_BEFORE = 20
_LIMIT_S = 120.0
_POLL_S = 0.02


def bench_coordinators(*, rounds: int, progress: Progress) -> BenchResult:
    """Lose one of two nodes of a run, under each coordinator in turn.

    Args:
        rounds: how often each loss is tried under each.
        progress: shows each loss.

    Raises:
        ConfigError: there is no etcd.
        LaunchError: a run does not continue.
    """
    if shutil.which("etcd") is None:
        raise ConfigError("etcd is missing. On Debian: apt-get install etcd-server")
    seconds: dict[tuple[str, Coordinator], list[float]] = {}
    with (
        handle_signals((signal.SIGTERM,), signal.default_int_handler),
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as name,
        _etcd_cluster(Path(name)) as url,
    ):
        for number in range(rounds):
            order = _COORDINATORS if number % 2 == 0 else _COORDINATORS[::-1]
            for (loss, (node, signal_number)), coordinator in itertools.product(_LOSSES.items(), order):
                directory = Path(name) / f"{number}-{node}-{signal_number}-{coordinator}"
                took = _lose_node(directory, node, signal_number, url if coordinator == "etcd" else None)
                seconds.setdefault((loss, coordinator), []).append(took)
                progress(f"round {number + 1}/{rounds}  {loss}, {coordinator}: {took:.2f} s")
    return _result(seconds, rounds)


def _lose_node(directory: Path, node: int, signal_number: int, url: str | None) -> float:
    """Start a run on two nodes, end one of them, and return the seconds until the other has done a step."""
    directory.mkdir()
    script = FaultScript.write(directory, [], world_size=2, step_s=_STEP_S)
    [port] = _free_ports(1)
    run = RunDirectory(directory / "run")
    processes = []
    try:
        for rank in range(2):
            with (directory / f"node-{rank}.log").open("wb") as log:
                command = [
                    *(sys.executable, "-m", "paceline", "train", "benchmarks.recovery_jobs:RecoveryWorkload"),
                    *("--quiet", "--set", f"script={directory}", "--run-dir", str(run.path), "--device", "cpu"),
                    *("--nproc", "1", "--microbatches", "2", "--threads", "1"),
                    *("--max-steps", "100000", "--eval-every", "never"),
                    *("--nodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--node-rank", str(rank)),
                    *(("--coordinator", url) if url else ()),
                ]
                processes.append(
                    subprocess.Popen(
                        command,
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        process_group=0,
                    )
                )
        _wait_until(lambda: max((step for _, step in script.steps()), default=0) >= _STEPS_BEFORE, directory)
        lost_at = time.time()
        parent = psutil.Process(processes[node].pid)
        for member in [parent, *parent.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                member.send_signal(signal_number)
        return _first_step_after(run, script, lost_at, directory) - lost_at
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)
        end_processes(processes)


def _first_step_after(run: RunDirectory, script: FaultScript, lost_at: float, directory: Path) -> float:
    """Return when the first step of the group without the lost node was done."""
    found: list[float] = []

    def has_continued() -> bool:
        joined = [e["time"] for e in run.read_events() if e["event"] == "joined" and e["time"] > lost_at]
        found.extend(when for when, _ in script.steps() if joined and when > joined[0])
        return bool(found)

    _wait_until(has_continued, directory)
    return found[0]


def _wait_until(condition: Callable[[], bool], directory: Path) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(directory.glob("node-*.log")))
            raise LaunchError(f"bench: the run made no progress in {_LIMIT_S:.0f} s.\n{logs}")
        time.sleep(_POLL_S)


@contextmanager
def _etcd_cluster(directory: Path) -> Iterator[str]:
    """Start three members on loopback; yield what ``--coordinator`` takes."""
    ports = _free_ports(6)
    names = [f"member{index}" for index in range(3)]
    peers = [f"http://127.0.0.1:{port}" for port in ports[:3]]
    clients = [f"http://127.0.0.1:{port}" for port in ports[3:]]
    members = ",".join(f"{name}={peer}" for name, peer in zip(names, peers, strict=True))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for name, peer, client in zip(names, peers, clients, strict=True):
            command = [
                *("etcd", "--name", name, "--data-dir", str(directory / name), "--log-level", "error"),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", members),
            ]
            processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            )
        yield "etcd://" + ",".join(client.removeprefix("http://") for client in clients)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _result(seconds: dict[tuple[str, Coordinator], list[float]], rounds: int) -> BenchResult:
    rows = []
    for loss in _LOSSES:
        spreads = [Spread.of(seconds[loss, coordinator]) for coordinator in _COORDINATORS]
        rows.append([loss, *(f"{s.median:.2f} s ({s.low:.2f} to {s.high:.2f})" for s in spreads)])
    table = ReportTable(headings=("", *_COORDINATORS), rows=rows, left=[0])
    measured = [
        {"loss": loss, "coordinator": coordinator, "seconds": [significant(value) for value in values]}
        for (loss, coordinator), values in seconds.items()
    ]
    return BenchResult(
        benchmark="coordinators",
        document={"settings": {"rounds": rounds}, "losses": measured},
        other_tables=[table],
        remarks=[
            f"Two nodes of one process, three members of etcd, all on one machine; steps of {1000 * _STEP_S:.0f} ms "
            f"and more; the coordinators in turns, rounds: {rounds}. From the loss to the end of the first step "
            "without the lost node: the median, and in parentheses the least and the greatest."
        ],
    )
