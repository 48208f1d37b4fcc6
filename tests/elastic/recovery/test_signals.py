"""SIGTERM, SIGUSR1, SIGINT and --walltime: the step is finished, the state saved, and the run continues as if
nothing had been."""

from __future__ import annotations

import os
import random
import signal
import socket
from contextlib import suppress
from typing import Any

import psutil
import pytest
from tests.processes import children

from paceline.core.access import create_token
from paceline.training.control import StopSignals

LAUNCHED = {
    "inprocess": ("--nproc", "1"),
    "spawn": ("--nproc", "2"),
    "torchrun": ("--nproc", "2", "--on", "torchrun"),
    "inplace": ("--nproc", "2", "--recover", "inplace"),
}


def _assert_stopped(small: Any, done: Any, code: int, cause: str, earliest: int = 8) -> int:
    """The run stopped as asked, with everything saved; return after which step."""
    assert done.returncode == code, done.stderr
    assert done.stderr.count("everything is saved. Continue with: paceline resume run") == 1
    assert ("before --walltime was over" if cause == "walltime" else f"by {cause}") in done.stderr
    if "torch.distributed.elastic" not in done.stderr:  # torchrun's agent always prints its own
        assert "Traceback" not in done.stderr
    last = small.run.read_events()[-1]
    assert (last["event"], last["cause"]) == ("stopped", cause)
    step: int = last["step"]
    assert earliest <= step < 30
    assert any(path.name.startswith(f"step-{step:08d}-") for path in small.run.checkpoints.iterdir())
    assert small.run.read_result() is None
    return step


def _assert_equal(small: Any, result: dict[str, Any], undisturbed: dict[str, Any], recomputed: int = 0) -> None:
    assert result["model_sha256"] == undisturbed["model_sha256"]
    assert (result["steps"], result["samples"]) == (undisturbed["steps"], undisturbed["samples"])
    report = small.audit()
    assert report.clean, report.verdict
    assert (report.steps, report.recomputed_steps) == (30, recomputed)


@pytest.mark.parametrize(
    ("launcher", "number", "code", "nproc_after"),
    [
        pytest.param("inprocess", signal.SIGTERM, 75, 1, marks=pytest.mark.slow),
        ("spawn", signal.SIGINT, 130, 1),
        pytest.param("torchrun", signal.SIGTERM, 75, 2, marks=pytest.mark.slow),
        ("torchrun", signal.SIGUSR1, 75, 1),
        ("inplace", signal.SIGUSR1, 75, 2),
    ],
)
def test_a_signal_to_the_launcher(
    small: Any,
    undisturbed: dict[str, Any],
    launcher: str,
    number: signal.Signals,
    code: int,
    nproc_after: int,
) -> None:
    running = small.train(*LAUNCHED[launcher], fault="slow 8 0")
    small.wait_for_the_fault(running)
    running.send_signal(number)
    _assert_stopped(small, small.finish(running), code, number.name)
    result = small.resume("--on", "auto", "--nproc", str(nproc_after))
    assert result["restarts"] == 1
    _assert_equal(small, result, undisturbed)


@pytest.mark.parametrize(
    ("launcher", "number", "seed"),
    [
        pytest.param("inprocess", signal.SIGUSR1, 1, marks=pytest.mark.slow),
        ("spawn", signal.SIGTERM, 2),
        pytest.param("inplace", signal.SIGUSR1, 3, marks=pytest.mark.slow),
        ("inplace", signal.SIGTERM, 4),
    ],
)
def test_a_signal_to_one_worker_stops_all(
    small: Any, undisturbed: dict[str, Any], launcher: str, number: signal.Signals, seed: int
) -> None:
    after = random.Random(seed).randint(8, 25)
    rank = 0 if launcher == "inprocess" else 1
    done = small.finish(small.train(*LAUNCHED[launcher], fault=f"{number.name.lower()} {after} {rank}"))
    assert _assert_stopped(small, done, 75, number.name) == after + 1
    assert small.audit().steps == after + 1
    _assert_equal(small, small.resume(), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "number"),
    [("spawn", signal.SIGUSR1), ("torchrun", signal.SIGTERM), ("inplace", signal.SIGTERM)],
)
def test_a_scheduler_signals_every_process_more_than_once(
    small: Any, undisturbed: dict[str, Any], launcher: str, number: signal.Signals
) -> None:
    running = small.train(*LAUNCHED[launcher], fault="slow 8 0")
    small.wait_for_the_fault(running)
    # The launcher passes one on to torchrun too, which kills its workers at the third one.
    for _ in range(1 if launcher == "torchrun" else 2):
        for process in (*children(running.pid, recursive=True), psutil.Process(running.pid)):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
    _assert_stopped(small, small.finish(running), 75, number.name)
    _assert_equal(small, small.resume(), undisturbed)


@pytest.mark.parametrize("launcher", [pytest.param("inprocess", marks=pytest.mark.slow), "inplace"])
def test_walltime_ends_in_time_and_the_run_goes_on(small: Any, undisturbed: dict[str, Any], launcher: str) -> None:
    # A tenth of a second for each micro-batch of 30 steps is more than the time less its reserve.
    done = small.finish(small.train(*LAUNCHED[launcher], "--walltime", "10s", fault="slow 0 0"))
    _assert_stopped(small, done, 75, "walltime", earliest=1)
    assert small.run.read_manifest()["config"]["walltime"] == "10s"
    _assert_equal(small, small.resume("--walltime", "1h"), undisturbed)


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_second_signal_ends_at_once(small: Any, nproc: int) -> None:
    running = small.train("--nproc", str(nproc), fault="hang 5 0")
    small.wait_for_the_fault(running)
    running.send_signal(signal.SIGTERM)
    running.send_signal(signal.SIGINT)
    done = small.finish(running)
    assert done.returncode in (130, 143), done.stderr
    assert "Traceback" not in done.stderr
    assert small.step() < 5


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize(
    ("recover", "said"),
    [("none", ""), ("inplace", "paceline: stopped, as requested, while waiting for other nodes.\n")],
)
def test_who_waits_for_the_other_machine_can_be_interrupted(
    small: Any, recover: str, said: str, number: int, code: int
) -> None:
    small.run.path.mkdir()
    create_token(small.run.path / "agents.token")  # as the other machine would
    with socket.create_server(("127.0.0.1", 0)) as machine_0:
        meet = ("--rdzv-endpoint", f"127.0.0.1:{machine_0.getsockname()[1]}")
        running = small.train("--nodes", "2", "--node-rank", "1", *meet, "--recover", recover)
        machine_0.settimeout(60)
        machine_0.accept()[0].close()
        running.send_signal(number)
        done = small.finish(running)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


@pytest.mark.integration
def test_a_signal_to_a_forked_child_ends_the_child_alone() -> None:
    ready, say_ready = os.pipe()
    with StopSignals() as signals:
        child = os.fork()
        if child == 0:
            os.write(say_ready, b"!")
            signal.pause()
            os._exit(1)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert signals.received == 0
    os.close(ready)
    os.close(say_ready)
