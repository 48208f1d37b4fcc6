"""A GPU that is asked for and not there is an error of the worker, whatever starts it; never a run on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.environment import detect_environment
from paceline.parallel.world import choose_device

TASK = """
import torch
from torch.utils.data import TensorDataset

import paceline

class Small(paceline.Task):
    def build_model(self): return torch.nn.Linear(2, 2)
    def build_dataset(self, split): return TensorDataset(torch.randn(64, 2)) if split == "train" else None
    def build_optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.1)
    def loss(self, model, batch): return model(batch[0]).square().mean()
"""
TWO_GPUS = {"CUDA_VISIBLE_DEVICES": "0,1"}


@pytest.fixture
def task(tmp_path: Path) -> Path:
    (tmp_path / "small.py").write_text(TASK)
    return tmp_path


def require_refusal(done: Any, run: Path) -> None:
    assert done.returncode != 0, done.stderr
    text = done.stderr + done.stdout
    assert f"--device cuda: torch {torch.__version__} sees no GPU on this node" in text
    assert "use --device cpu" in text
    assert not (run / "result.json").exists()


needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@needs_no_gpu
@pytest.mark.parametrize(
    "options",
    [
        ("--nproc", "1"),
        ("--nproc", "2"),
        ("--nproc", "2", "--strategy", "fsdp"),
        ("--nproc", "2", "--recover", "none"),
        ("--nproc", "2", "--strategy", "pp", "--backend", "gloo", "--recover", "none"),
        ("--nproc", "2", "--on", "torchrun"),
        pytest.param(("--nproc", "2", "--on", "mpi"), marks=pytest.mark.mpi),
        pytest.param(("--nproc", "2", "--on", "ray"), marks=pytest.mark.ray),
    ],
    ids=" ".join,
)
def test_on_this_machine(options: tuple[str, ...], run_processes: Any, task: Path) -> None:
    done = run_processes.paceline(
        *("train", "small.py:Small", "--device", "cuda", "--run-dir", "run", *options), env=TWO_GPUS
    )
    require_refusal(done, task / "run")


@needs_no_gpu
def test_fit_in_a_script(run_processes: Any, task: Path) -> None:
    (task / "script.py").write_text(
        f"{TASK}\nif __name__ == '__main__':\n    paceline.fit(Small(), nproc=2, device='cuda', run_dir='run')\n"
    )
    done = run_processes.run([sys.executable, "script.py"], env=TWO_GPUS)
    require_refusal(done, task / "run")


# What launchers leave visible to a rank, and the GPU that it takes of it.
@pytest.mark.parametrize(
    ("variables", "visible", "index"),
    [
        # spawn, torchrun, ssh, Kubernetes, SageMaker: all GPUs of the node.
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, 4, 1),
        # srun without a binding: all GPUs of the job on the node, and so with --gpus-per-task=2 under a cgroup that
        # numbers them from 0; with --gpus-per-task=1: one of its own.
        ({"procid": "3", "localid": "1"}, 2, 1),
        ({"procid": "3", "localid": "1"}, 1, 0),
        # mpirun; Horovod; an actor of Ray, with one GPU or a part of one.
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4, 2),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}, 2, 1),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, 1, 0),
        ({}, 8, 0),
    ],
)  # fmt: skip
def test_the_gpu_of_a_rank(
    variables: dict[str, str], visible: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "procid" in variables:
        variables = {
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": variables["procid"],
            "SLURM_LOCALID": variables["localid"],
            "SLURM_NODEID": "1",
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_STEP_NUM_NODES": "2",
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            "SLURM_STEP_NODELIST": "n[1-2]",
        }
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    environment = detect_environment({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **variables})
    local = choose_device(local_rank=environment.local_rank)
    assert local.device == torch.device("cuda", index)
    assert current == [local.device]
