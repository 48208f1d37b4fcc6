"""Restarts by torchrun: each comes back, from the newest checkpoint, and ends with the same bits."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
from tests.elastic.recovery.conftest import OPTIONS
from tests.lab.machines import Machines, Node

from paceline.runs.directory import RunDirectory

pytestmark = pytest.mark.chaos

RESTART = ("--nproc", "2", "--on", "torchrun", "--recover", "restart", "--resume", "never")


def assert_recovered(small: Any, undisturbed: dict[str, Any], run: RunDirectory) -> None:
    result = run.read_result()
    assert result is not None
    assert result["model_sha256"] == undisturbed["model_sha256"]
    assert result["samples"] == undisturbed["samples"]
    report = small.audit(run)
    assert report.clean, report.verdict
    assert report.steps == 30


def test_each_rank_in_turn_is_killed(small: Any, undisturbed: dict[str, Any]) -> None:
    done = small.finish(small.train(*RESTART, "--max-restarts", "2", fault="sigkill 5 1; sigkill 6 0"))
    assert done.returncode == 0, done.stderr
    assert_recovered(small, undisturbed, small.run)
    starts = [event["step"] for event in small.run.read_events() if event["event"] == "started"]
    # Checkpoints are written in the background: the last one need not have been whole.
    assert len(starts) == 3
    assert starts[0] == 0
    assert starts == sorted(starts)
    assert all(step in (0, 4, 8) for step in starts)


def test_a_script_of_ones_own(small: Any, undisturbed: dict[str, Any]) -> None:
    """It names no run, and refuses one that is there: it must find the one that it began itself."""
    options = {
        "max_steps": 30,
        "seed": 5,
        "threads": 1,
        "checkpoint_every": ["4steps"],
        "resume": "never",
        "quiet": True,
    }
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    done = small.finish(small.start("small.py", json.dumps(options), front=torchrun, fault="sigkill 5 0"))
    assert done.returncode == 0, done.stderr
    [run] = (small.path / "runs").iterdir()
    assert_recovered(small, undisturbed, RunDirectory(run))


@pytest.mark.slow
def test_resume_never_still_refuses_what_others_began(small: Any) -> None:
    """Also when torchrun tries again: the refusal is a failure like any other to it."""
    (small.path / "run").mkdir()
    (small.path / "run" / "run.toml").write_text("")
    options = {"max_steps": 30, "run_dir": "run", "resume": "never"}
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    done = small.finish(small.start("small.py", json.dumps(options), front=torchrun))
    assert done.returncode == 1
    assert done.stderr.count("--resume never: run holds a run already") == 2
    assert not small.run.read_events()


@pytest.mark.slow
def test_the_same_step_again_and_again(small: Any) -> None:
    again = "; ".join(["sigkill 2 1"] * 3)  # before the first checkpoint
    done = small.finish(small.train(*RESTART, "--max-restarts", "2", fault=again))
    assert done.returncode == 1
    assert (
        "torchrun started the workers 3 times; the last 3 times they continued after step 0, and none came to "
        "the next checkpoint."
    ) in done.stderr
    assert "rank 0: " in done.stderr
    assert "(in step 3 during " in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_restarts(small: Any, undisturbed: dict[str, Any]) -> None:
    draw = random.Random(1)
    # At most four steps each, so that some attempts come to no checkpoint.
    faults = "; ".join(f"sigkill {draw.randint(0, 4)} {draw.randrange(2)}" for _ in range(20))
    running = small.train(*RESTART, "--max-restarts", "20", fault=faults)
    done = small.processes.finish(running, timeout_s=500)
    assert done.returncode == 0, done.stderr
    assert len((small.path / "happened").read_text()) == 20
    assert_recovered(small, undisturbed, small.run)


def start_on(node: Node, small: Any, endpoint: str, fault: str) -> Any:
    """The same command on each node; nothing says which is which."""
    return node.start(
        [
            *(
                sys.executable,
                "-m",
                "paceline",
                "train",
                "small.py:Small",
                *OPTIONS,
                "--run-dir",
                "run",
                "--quiet",
            ),
            *("--on", "torchrun", "--recover", "restart", "--max-restarts", "8", "--resume", "never"),
            *("--nodes", "2", "--nproc", "1", "--rdzv-endpoint", endpoint),
        ],
        env={"FAULT": fault},
        cwd=small.path,
    )


@pytest.mark.slow
def test_workers_on_two_machines(machines: Machines, small: Any, undisturbed: dict[str, Any]) -> None:
    nodes = machines(2)
    endpoint = f"{nodes[0].address}:29500"
    running = [start_on(node, small, endpoint, "sigkill 5 0; sigkill 5 1") for node in nodes]
    for process in running:
        assert process.wait(120) == 0, process.text
    assert_recovered(small, undisturbed, small.run)


@pytest.mark.slow
def test_a_machine_is_killed_and_replaced(
    machines: Machines, small: Any, undisturbed: dict[str, Any], wait_until: Callable[..., None]
) -> None:
    """The one whose death torchrun survives: the other serves its store."""
    nodes = machines(2)
    endpoint = f"{nodes[0].address}:29500"
    running = [start_on(node, small, endpoint, "hang 9 1") for node in nodes]
    wait_until((small.path / "happened").exists, "the ninth step", timeout_s=60)
    nodes[1].kill()
    nodes[1].boot()
    running[1] = start_on(nodes[1], small, endpoint, "hang 9 1")
    for process in running:
        assert process.wait(120) == 0, process.text
    assert_recovered(small, undisturbed, small.run)
