"""Stages of split layers lose a rank, and wait for one that hangs: all begin again."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

TASK = str(Path(__file__).with_name("faulty.py")) + ":Parted"
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


class Run:
    """A run of the scripted task that has ended."""

    def __init__(self, processes: Any, path: Path, mesh: str, harms: Sequence[str]) -> None:
        self.path = path
        plan = path.with_name("plan")
        plan.mkdir()
        for harm in harms:
            (plan / harm).touch()
        ranks = {"pp=2,tp=2": "4", "dp=2,tp=2,pp=2": "8"}[mesh]
        self.done: subprocess.CompletedProcess[str] = processes.paceline(
            *("train", TASK, "--run-dir", str(path), "--threads", "1", "--quiet", "--set", f"plan={plan}"),
            *("--mesh", mesh, "--nproc", ranks, "--recover", "restart", "--pp-split", "equal"),
            *("--eval-every", "never", "--checkpoint-every", "4steps", "--max-steps", "12"),
            *("--hang-timeout", "6s", "--heartbeat", "30", "--max-restarts", "3"),
            env={"TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
        assert self.done.returncode == 0, self.done.stderr
        assert list(plan.iterdir()) == [], "a harm was never done"

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.path / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    @property
    def model(self) -> str:
        sha256: str = json.loads((self.path / "result.json").read_text())["model_sha256"]
        return sha256


@pytest.mark.parametrize("mesh", ["pp=2,tp=2", pytest.param("dp=2,tp=2,pp=2", marks=pytest.mark.slow)])
def test_a_killed_rank_and_a_hang_change_nothing(run_processes: Any, tmp_path: Path, mesh: str) -> None:
    for name in ("undisturbed", "harmed"):
        (tmp_path / name).mkdir()
    undisturbed = Run(run_processes, tmp_path / "undisturbed/run", mesh, ())
    harmed = Run(run_processes, tmp_path / "harmed/run", mesh, ["step-5-3-kill", "step-9-1-spin"])
    assert harmed.model == undisturbed.model
    faults = harmed.events("fault")
    assert len(faults) == 2, faults
    killed, hung = faults
    assert "was killed by SIGKILL" in killed["how"]
    (verdict,) = harmed.events("hang")
    assert verdict["root_causes"] == [1]
    # Who has the other half of its layers waits inside of one, in nobody's count of exchanges.
    assert "rank 0 waits in torch.distributed.wait_tensor" in verdict["sentence"]
    assert "rank 1 has not entered" in re.sub(r"\.py:\d+", ".py", verdict["sentence"])
    assert "in `spin` (faulty.py)" in re.sub(r"\.py:\d+", ".py", verdict["sentence"])
    assert "in `spin`" in hung["how"]
