"""``--on horovod`` over several nodes, which horovodrun reaches by ssh."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.lab.sshd import SshLab

pytestmark = [pytest.mark.horovod, pytest.mark.ssh]

SUM = """
import os
import horovod.torch as hvd
import torch

hvd.init()
total = hvd.allreduce(torch.tensor(hvd.rank() + 1.0), op=hvd.Sum)
print(f"rank {hvd.rank()} of {hvd.size()} on {os.uname().nodename} has {total:.0f}", flush=True)
"""


def test_hosts_that_are_reached_by_ssh(ssh_machines: Callable[[int], SshLab], tmp_path: Path) -> None:
    beside = str(Path(sys.executable).parent)
    if shutil.which("horovodrun", path=beside) is None:
        pytest.skip("Horovod is missing: scripts/build-horovod builds it")
    lab = ssh_machines(2)
    for number, node in enumerate(lab.nodes, 1):
        node.add_interface("ib0", f"10.78.0.{number}")
    script = tmp_path / "sum.py"
    script.write_text(SUM)
    # How a client gets in here; users have it in ~/.ssh/config.
    settings = [f"-o{word}" for word in lab.options if word != "--ssh-option"]
    (tmp_path / "bin").mkdir()
    client = tmp_path / "bin/ssh"
    client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {shlex.join(settings)} "$@"\n')
    client.chmod(0o755)
    path = os.pathsep.join([str(client.parent), beside, os.environ["PATH"]])
    job = lab.paceline(
        lab.nodes[0],
        *("launch", "--on", "horovod", "--hosts", "node0:2,node1:2", "--interface", "ib0", "--", script),
        env={"PATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert job.wait(timeout_s=120) == 0, job.text
    said = sorted(line.rpartition(">:")[2] for line in job.text.splitlines() if "has" in line)
    assert said == [f"rank {rank} of 4 on node{rank // 2} has 10" for rank in range(4)]
