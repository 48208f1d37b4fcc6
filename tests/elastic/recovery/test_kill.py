"""kill -9 at any moment: what was committed stands, and the resumed run ends with the same bits."""

from __future__ import annotations

import random
import subprocess
from contextlib import suppress
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.chaos

UNRECOVERED = ("--recover", "none")


def _assert_recovered(small: Any, result: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    assert result["model_sha256"] == undisturbed["model_sha256"]
    assert result["samples"] == undisturbed["samples"]
    report = small.audit()
    assert report.clean, report.verdict
    assert report.steps == 30


def test_a_killed_worker_and_a_killed_launcher(small: Any, undisturbed: dict[str, Any]) -> None:
    done = small.finish(small.train("--nproc", "2", *UNRECOVERED, fault="sigkill 7 1"))
    assert done.returncode == 1
    assert done.stderr.count("paceline: rank 1 was killed by SIGKILL") == 1
    assert "log: run/logs/rank-1.log" in done.stderr
    assert "Traceback" not in done.stderr
    assert small.step() == 4

    (small.path / "happened").unlink()
    done = small.finish(small.start("resume", "run", *UNRECOVERED, fault="kill-parent 10 0"))
    assert done.returncode == -9
    assert 8 <= small.step() <= 12  # the checkpoint of step 12 may have been on its way

    result = small.resume("--nproc", "1")
    assert result["restarts"] == 2
    _assert_recovered(small, result, undisturbed)
    # Steps 5 to 7 of the first start, and what the second had done since its last checkpoint.
    assert small.audit().recomputed_steps >= 3
    assert small.audit().generations == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_random_kills(small: Any, undisturbed: dict[str, Any]) -> None:
    """One worker, the launcher or everything at once: within steps, while saving, while starting."""
    draw = random.Random(1)
    for kill in range(10):
        (small.path / "happened").unlink(missing_ok=True)
        nproc = draw.randint(1, 3)
        how = draw.choice(["worker", "launcher", "all"])
        after, rank, delay_s = draw.randint(0, 5), draw.randrange(nproc), draw.uniform(0.0, 1.0)
        fault = {"worker": "sigkill", "launcher": "kill-parent", "all": "slow"}[how if nproc > 1 else "all"]
        arguments = ("--nproc", str(nproc), *UNRECOVERED)
        if kill == 0:
            running = small.train(*arguments, fault=f"{fault} {after} {rank}")
        else:
            running = small.start("resume", "run", *arguments, fault=f"{fault} {after} {rank}")
        if fault == "slow":
            small.wait_for_the_fault(running)
            with suppress(subprocess.TimeoutExpired):
                running.wait(delay_s)
            launcher = psutil.Process(running.pid)
            for process in (launcher, *launcher.children(recursive=True)):
                process.kill()
        assert small.finish(running).returncode != 0, f"kill {kill} came after the end"
    assert small.run.read_result() is None
    result = small.resume("--nproc", "2")
    assert result["restarts"] == 10
    _assert_recovered(small, result, undisturbed)
