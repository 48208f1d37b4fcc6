"""Faults of all kinds on three nodes, under each coordinator: the model is the undisturbed run's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.elastic.recovery_nodes.chaos import Chaos, Fault, plan, steps_of, table
from tests.elastic.recovery_nodes.runs import EMBEDDED_FIRST, OPTIONS, TASK, Run

pytestmark = [pytest.mark.chaos, pytest.mark.parametrize("run", [3], indirect=True)]


@EMBEDDED_FIRST
@pytest.mark.timeout(600)
def test_a_fault_of_each_kind(run: Run, tmp_path: Path) -> None:
    check(run, plan(seed=1, rounds=1), tmp_path)


@EMBEDDED_FIRST
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thirty_faults(run: Run, tmp_path: Path) -> None:
    check(run, plan(seed=2, rounds=5), tmp_path)


def check(run: Run, faults: list[Fault], directory: Path) -> None:
    """Cause these faults; their table is what ``pytest -rP`` shows."""
    recoveries = Chaos(run, faults).all()
    print(table(recoveries))
    result = json.loads(run.directory.result.read_text())
    assert result["model_sha256"] == undisturbed(directory / "undisturbed", steps_of(faults))
    assert run.etcd is None or run.etcd.keys() == []


def undisturbed(path: Path, steps: int) -> str:
    """The model of as many steps of one process."""
    path.mkdir()
    (path / "small.py").write_text(TASK)
    command = [sys.executable, "-m", "paceline", "train", "small.py:Small", *OPTIONS[2:], "--max-steps", str(steps)]
    subprocess.run([*command, "--run-dir", "run"], cwd=path, capture_output=True, timeout=300, check=True)
    sha256: str = json.loads((path / "run/result.json").read_text())["model_sha256"]
    return sha256
