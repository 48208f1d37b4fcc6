"""Commands of docs/coming-from/documents.md that no other test runs in the form of the tutorials."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
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

# As in a computing centre's guide: the script reads variables of the batch script that starts the cluster.
TRAINABLE = """
import os
import ray
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler

class TrainLine(tune.Trainable):
    def setup(self, config):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config["lr"], momentum=config["momentum"])

    def step(self):
        inputs = torch.randn(64, 3)
        self.optimizer.zero_grad()
        loss = (self.model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        self.optimizer.step()
        return {"mean_accuracy": float(1 / (1 + loss.detach()))}

    def save_checkpoint(self, checkpoint_dir):
        torch.save(self.model.state_dict(), os.path.join(checkpoint_dir, "model.pth"))

    def load_checkpoint(self, checkpoint_dir):
        self.model.load_state_dict(torch.load(os.path.join(checkpoint_dir, "model.pth")))

if __name__ == "__main__":
    ray.init(
        address="auto",
        _node_ip_address=os.environ["ip_head"].split(":")[0],
        _redis_password=os.environ["redis_password"],
    )
    analysis = tune.run(
        TrainLine,
        scheduler=ASHAScheduler(metric="mean_accuracy", mode="max"),
        stop={"mean_accuracy": 0.99, "training_iteration": 5},
        resources_per_trial={"cpu": 2},
        num_samples=4,
        checkpoint_at_end=True,
        storage_path=os.path.abspath("results"),
        config={"lr": tune.uniform(0.001, 1.0), "momentum": tune.uniform(0.1, 0.9)},
    )
    print("Nodes:", len(ray.nodes()), "trials:", len(analysis.trials))
    print("Best config is:", sorted(analysis.get_best_config(metric="mean_accuracy", mode="max")))
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


@pytest.mark.ray
@pytest.mark.slurm
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_search_that_reads_the_variables_of_a_batch_script(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "mnist_pytorch_trainable.py").write_text(TRAINABLE)
    done = slurm_cluster.run(
        *(sys.executable, "-m", "paceline", "launch", "--on", "slurm", "--rank-launcher", "ray", "--nodes", "2"),
        *("--cpus-per-task", "4", "--env", "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES=80000000", "--wait", "--"),
        *("sh", "-c", f"ip_head=$RAY_ADDRESS redis_password= {sys.executable} mnist_pytorch_trainable.py"),
        timeout_s=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"Nodes: 2 trials: 4", "Best config is: ['lr', 'momentum']"} <= set(done.stdout.splitlines())


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """The modules of a computing centre, each of which sets a variable of its name; return their directory."""
    if not Path("/etc/profile.d/modules.sh").exists():
        pytest.skip("a module command is missing (on Debian: apt-get install environment-modules)")
    directory = tmp_path / "modulefiles"
    for name in ("gcc/10.2.0", "cuda/11.4", "old/1.0"):
        module = directory / name
        module.parent.mkdir(parents=True)
        module.write_text(f"#%Module1.0\nsetenv MY_{module.parent.name.upper()} {module.name}\n")
    return directory


@pytest.mark.slurm
def test_module_purge_then_module_load(slurm_cluster: SlurmCluster, tmp_path: Path, modules: Path) -> None:
    """By the real command, in a job that would otherwise have the module of the shell that submits it."""
    say = 'echo "old=$MY_OLD gcc=$MY_GCC cuda=$MY_CUDA debug=$NCCL_DEBUG threads=$OMP_NUM_THREADS"'
    with_old = f'module use {modules}; module load old/1.0; test "$MY_OLD" = 1.0 && exec "$@"'
    (tmp_path / "logs").mkdir()
    launch = (
        *("bash", "-lc", with_old, "bash", sys.executable, "-m", "paceline", "launch", "--on", "slurm", "--wait"),
        *("--output", "logs/%N_%j.out", "--env", "NCCL_DEBUG=INFO", "--threads", "3"),
        *("--setup", "module purge", "--setup", f"module use {modules}"),
    )
    loads = ("--module", "gcc/10.2.0", "--module", "cuda/11.4")
    done = slurm_cluster.run(*launch, *loads, "--", "sh", "-c", say)
    assert done.returncode == 0, done.stdout + done.stderr
    # Followed, although only Slurm knows the file's name.
    assert "old= gcc" in done.stdout, done.stdout + done.stderr
    [log] = (tmp_path / "logs").iterdir()
    assert log.name.startswith("node1_")
    assert log.read_text().splitlines()[-1] == "old= gcc=10.2.0 cuda=11.4 debug=INFO threads=3"
    done = slurm_cluster.run(*launch, "--module", "gcc/99", "--", "sh", "-c", say)
    assert done.returncode == 1
    said = "".join(path.read_text() for path in (tmp_path / "logs").iterdir() if path != log)
    assert "Unable to locate a modulefile for 'gcc/99'" in done.stdout, said + done.stderr
    assert "old=" not in done.stdout


@pytest.mark.slurm
def test_modules_in_a_session(slurm_cluster: SlurmCluster, modules: Path) -> None:
    """The module command is a function of the session's shell, and not of the programs that it starts."""
    say = 'echo "gcc=$MY_GCC on $(hostname)"'
    done = slurm_cluster.run(
        *("salloc", "--nodes=1", "--comment=etc", sys.executable, "-m", "paceline", "launch", "--on", "slurm"),
        *("--setup", f"module use {modules}", "--module", "gcc/10.2.0", "--", "sh", "-c", say),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "gcc=10.2.0 on node1\n"


OVER_INTERFACE = """
import os
from pathlib import Path
import torch
import torch.distributed as dist

def received():
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return {name.strip(): int(numbers.split()[0]) for name, _, numbers in (line.partition(":") for line in lines)}

dist.init_process_group("gloo")
before = received()
dist.all_reduce(torch.ones(4_000_000))
after = received()
used = [name for name in after if after[name] - before[name] > 4_000_000]
chosen = [os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES")]
os.write(1, f"{os.uname().nodename}: {chosen}, over {used}, {os.environ['NCCL_DEBUG']}\\n".encode())
dist.destroy_process_group()
"""


@pytest.fixture
def with_ib0(slurm_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """Two of the cluster's nodes have a second network, on ib0; their names stand for addresses of the first."""
    nodes = slurm_cluster.nodes[:2]
    for number, node in enumerate(nodes, 1):
        node.add_interface("ib0", f"10.78.0.{number}")
    try:
        yield slurm_cluster
    finally:
        for node in nodes:
            node.remove_interface("ib0")


@pytest.mark.slurm
@pytest.mark.parametrize("rank_launcher", ["torchrun", "srun"])
def test_the_interface_of_the_fast_network(with_ib0: SlurmCluster, tmp_path: Path, rank_launcher: str) -> None:
    (tmp_path / "over.py").write_text(OVER_INTERFACE)
    done = with_ib0.run(
        *(sys.executable, "-m", "paceline", "launch", "--on", "slurm", "--nodes", "2", "--wait", "--threads", "1"),
        *("--rank-launcher", rank_launcher, "--env", "NCCL_DEBUG=INFO", "--interface", "ib0", "--", "over.py"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if "over" in line]
    assert sorted(said) == [f"node{n}: ['ib0', 'ib0', 'ib0'], over ['ib0'], INFO" for n in (1, 2)]
