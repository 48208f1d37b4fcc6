"""Commands of docs/coming-from/documents.md that no other test runs in the form of the tutorials."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.lab.slurm_cluster import SlurmCluster

DATA_PARALLEL = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.DataParallel(nn.Linear(3, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
inputs = torch.randn(64, 3)
for epoch in range(20):
    optimizer.zero_grad()
    loss = (net(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
print(f"loss below 1: {bool(loss < 1)}")
"""

BY_SPAWN = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def main(rank, world_size, total_epochs, save_every):
    os.environ["MASTER_ADDR"] = "localhost"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    line = f"rank {rank} of {world_size} has {int(total)} after {total_epochs} epochs, saved each {save_every}"
    os.write(1, line.encode() + b"\\n")
    dist.destroy_process_group()

if __name__ == "__main__":
    world_size = 2
    mp.spawn(main, args=(world_size, int(sys.argv[1]), int(sys.argv[2])), nprocs=world_size)
"""


@pytest.fixture(autouse=True)
def own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_data_parallel_in_one_process(run_processes: Any, tmp_path: Path) -> None:
    (tmp_path / "dp.py").write_text(DATA_PARALLEL)
    done = run_processes.paceline("launch", "--on", "inprocess", "--", "dp.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "loss below 1: True\n"


def test_a_script_that_starts_its_own_processes(run_processes: Any, tmp_path: Path) -> None:
    (tmp_path / "multigpu_spawn.py").write_text(BY_SPAWN)
    done = run_processes.paceline(
        *("launch", "--on", "inprocess", "--env", f"MASTER_PORT={run_processes.free_port()}"),
        *("--", "multigpu_spawn.py", "4", "2"),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank} of 2 has 3 after 4 epochs, saved each 2" for rank in (0, 1)
    ]


@pytest.mark.slurm
def test_the_directives_of_a_batch_script(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    say = 'echo "$GREETING from rank $RANK with GPUs $CUDA_VISIBLE_DEVICES"; echo to stderr >&2'
    done = slurm_cluster.run(
        *(sys.executable, "-m", "paceline", "launch", "--on", "slurm", "--name", "test_job", "--partition", "main"),
        *("--nodes", "1", "--nproc", "2", "--rank-launcher", "spawn", "--output", "%x.o%j", "--error", "%x.e%j"),
        *("--walltime", "00:30:00", "--gpus-per-node", "2", "--comment", "pytorch"),
        *("--setup", "export GREETING=hello", "--json", "--", "sh", "-c", say),
    )
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout)["reference"]["id"]
    slurm_cluster.wait_for(job, "COMPLETED")
    shown = slurm_cluster.show(job)
    assert [shown[name] for name in ("JobName", "Partition", "TimeLimit", "Comment", "NumNodes")] == [
        *("test_job", "main", "00:30:00", "pytorch", "1")
    ]
    said = (tmp_path / f"test_job.o{job}").read_text().splitlines()
    assert sorted(said) == [f"hello from rank {rank} with GPUs 0,1" for rank in (0, 1)]
    assert (tmp_path / f"test_job.e{job}").read_text().splitlines() == ["to stderr"] * 2
