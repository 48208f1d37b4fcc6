"""The doctor in a Slurm allocation: as a job of its own, and before another job in that one's."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from plugins.checks.tests.preflight.examined import found, not_passed
from tests.lab.slurm_cluster import SlurmCluster

from paceline_checks.preflight.spec import PreflightReport

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def paceline(cluster: SlurmCluster, tmp_path: Path, *words: str) -> tuple[int, str, str]:
    state = {"XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    done = cluster.run(sys.executable, "-m", "paceline", *words, env=state, timeout_s=200)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_two_nodes_of_an_allocation(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """The cluster's GPUs are none, which is what must be found."""
    words = ("doctor", "--on", "slurm", "--nodes", "2", "--nproc", "2", "--gpus-per-node", "1", "--json")
    code, output, errors = paceline(slurm_cluster, tmp_path, *words)
    assert code == 1, errors
    report = msgspec.json.decode(output.splitlines()[-1], type=PreflightReport)
    assert set(report.machines) < {"node1", "node2", "node3"}
    assert {id for id, _ in not_passed(report)} == {"gpus"}, report.checks
    assert "0 GPUs, 1 requested" in found(report, "gpus").found
    assert "gloo, 4 ranks" in found(report, "all-reduce").found
    assert "; Ctrl-C cancels it." in errors


@pytest.mark.slow
def test_a_job_is_not_started_where_preflight_fails(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    words = ("launch", "--on", "slurm", "--nodes", "2", "--gpus-per-node", "1", "--preflight", "--wait")
    code, output, errors = paceline(slurm_cluster, tmp_path, *words, "--", "touch", str(tmp_path / "started"))
    # The examination's own, or that of the machine whose program srun has ended with the other's.
    assert code in (1, 143), errors
    assert "preflight fail: " in output
    assert "0 GPUs, 1 requested" in output
    assert "paceline: the job was not started." in output
    assert not (tmp_path / "started").exists()
