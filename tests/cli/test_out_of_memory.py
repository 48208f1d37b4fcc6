"""A rank whose GPU has no memory left: which rank, when, and what needs less."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.processes import Processes

from paceline.core.errors import TaskError
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import describe, failure_of

TASK = """
import os
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline


@dataclass
class Hungry(paceline.Task):
    def build_model(self):
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def build_dataset(self, split):
        return TensorDataset(torch.randn(64, 8), torch.zeros(64, dtype=torch.long)) if split == "train" else None

    def loss(self, model, batch):
        inputs, labels = batch
        if os.environ["RANK"] == "0":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return functional.cross_entropy(model(inputs), labels)
"""


@pytest.mark.integration
def test_without_memory_while_the_model_is_placed(run_processes: Processes, tmp_path: Path) -> None:
    """Rank 0 alone measures the stages, while the other waits: no rank may begin an exchange as it fails."""
    (tmp_path / "hungry.py").write_text(TASK)
    options = ("--nproc", "2", "--strategy", "pp", "--recover", "none", "--device", "cpu", "--run-dir", "run")
    done = run_processes.paceline("train", "hungry.py:Hungry", "--microbatches", "4", *options)
    assert done.returncode == 1
    assert done.stderr.count("paceline: rank") == 1
    assert done.stderr.endswith(
        "paceline: rank 0 failed first: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB "
        "(while model and state were set up)\n"
        f'  File "{tmp_path}/hungry.py", line 27, in loss\n'
        "  To need less memory on the GPU: more --microbatches (each is smaller), --checkpoint-activations block, or "
        "on several GPUs --strategy zero1 or fsdp.\n"
        "  log: run/logs/rank-0.log\n"
    )


@pytest.mark.parametrize(
    ("error", "is_of_memory"),
    [
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("NCCL ran out of GPU memory: Cuda failure 2 'out of memory'"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (TaskError("out of memory"), False),
    ],
)
def test_each_word_for_it(error: Exception, is_of_memory: bool, tmp_path: Path) -> None:
    assert ("--microbatches" in describe(failure_of(1, error), RunDirectory(tmp_path))) == is_of_memory
