"""Our agent restarts all ranks of a run whose ranks cannot outlive each other: DistributedDataParallel's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from tests.elastic.recovery.conftest import OPTIONS, TASK

RESTART = ("--nproc", "2", "--recover", "restart", "--reduction", "ddp")
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def by_torch(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same run that nobody disturbed: by this reduction the model depends on the number of ranks."""
    path = tmp_path_factory.mktemp("by_torch")
    (path / "small.py").write_text(TASK)
    command = [
        sys.executable,
        "-m",
        "paceline",
        "train",
        "small.py:Small",
        *OPTIONS,
        "--run-dir",
        "run",
        *RESTART,
    ]
    subprocess.run(command, cwd=path, capture_output=True, timeout=120, check=True)
    sha256: str = json.loads((path / "run/result.json").read_text())["model_sha256"]
    return sha256


@pytest.mark.parametrize(
    ("fault", "how"),
    [
        pytest.param("sigkill 9 1", "was killed by SIGKILL", marks=pytest.mark.slow),
        ("sigkill 9 0", "was killed by SIGKILL"),
        ("sigstop 9 1", ""),
    ],
)
def test_all_come_back_from_the_newest_checkpoint(small: Any, by_torch: str, fault: str, how: str) -> None:
    done = small.finish(small.train(*RESTART, fault=fault))
    assert done.returncode == 0, done.stderr
    result = small.run.read_result()
    assert (result["model_sha256"], result["world_size"]) == (by_torch, 2)
    report = small.audit()
    assert report.clean, report.verdict
    assert (report.steps, report.generations) == (30, 2)
    events = small.run.read_events()
    (lost,) = (event for event in events if event["event"] == "fault")
    assert how in lost["how"]
    first, second = (event["step"] for event in events if event["event"] == "started")
    assert first == 0
    assert second in (4, 8)  # the checkpoint of step 8 may have been on its way


def test_a_step_that_always_kills_ends_the_run(small: Any) -> None:
    again = "; ".join(["sigkill-once-saved 6 1"] + ["sigkill 2 1"] * 7)
    done = small.finish(small.train(*RESTART, "--max-restarts", "2", fault=again))
    assert done.returncode == 1
    (verdict,) = (line for line in done.stderr.splitlines() if "another one would fail the same way" in line)
    # Whether the workers told of their last steps before one was killed is for the machine to decide.
    found = re.search(r"The run is still at step ([456]) after 2 replacements", verdict)
    assert found is not None, verdict
    assert f"In step {int(found[1]) + 1}, rank 1 computes micro-batches 2 to 3" in done.stderr
    assert small.run.read_result() is None
