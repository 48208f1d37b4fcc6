"""The doctor through launchers that start its program once on each machine, or once for each rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from plugins.checks.tests.preflight.examined import found, not_passed
from tests.lab.sshd import SshLab

from paceline_checks.preflight.spec import PreflightReport


@pytest.mark.slow
@pytest.mark.ssh
def test_by_ssh(ssh_machines: Callable[[int], SshLab]) -> None:
    """With as many processes as the machines have slots."""
    lab = ssh_machines(2)
    words = ("doctor", "--on", "ssh", "--hosts", "node0:2,node1:2", *lab.options, "--threads", "1", "--json")
    command = lab.paceline(lab.nodes[1], *words)
    assert command.wait(240) == 0, command.text
    report = msgspec.json.decode(command.text.splitlines()[-1], type=PreflightReport)
    assert report.machines == ("node0", "node1")
    assert {id for id, _ in not_passed(report)} <= {"cpus"}, "the test machine may have one core"
    assert "gloo, 4 ranks" in found(report, "all-reduce").found


SUMS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
os.write(1, f"rank {dist.get_rank()}: {int(total)}\\n".encode())
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.ssh
def test_a_job_that_preflight_lets_go(ssh_machines: Callable[[int], SshLab]) -> None:
    """The job's rank 0 then listens where the doctor has."""
    lab = ssh_machines(2)
    (lab.path / "sums.py").write_text(SUMS)
    words = ("--rank-launcher", "torchrun", "--threads", "1", "--preflight", "--", sys.executable, "sums.py")
    command = lab.launch(lab.nodes[0], "node0,node1", *words)
    assert command.wait(240) == 0, command.text
    assert "preflight" not in command.text
    for rank in range(2):
        assert f"rank {rank}: 2" in command.text


@pytest.mark.slow
@pytest.mark.mpi
def test_by_mpirun(run_processes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """It starts two ranks on this machine, and one examines it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    done = run_processes.paceline("doctor", "--on", "mpi", "--nproc", "2", "--threads", "1", "--json")
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(done.stdout.splitlines()[-1], type=PreflightReport)
    assert len(report.machines) == 1
    assert "gloo, 2 ranks" in found(report, "all-reduce").found
