"""The workloads by name, and how Paceline is started on one; imports no torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANKS = 2
BATCH_SIZE = 64
"""Samples a rank and step."""

UNBALANCED_MICROBATCHES = 12
"""Micro-batches that ranks of unequal speed share."""

MICRO_BATCHES = 8
"""Of a pipeline's step."""

GLOBAL_BATCH_SIZE = 48
STEPS_PER_EPOCH = 10
"""Of what is trained while workers are killed; every process count from 1 to 4 divides the batch."""

REPORT = "report.json"
"""The measured process's report, in a round's directory."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One task to train.

    Attributes:
        name: what ``--workload`` takes.
        title: for people.
        task: the measured task, as ``module:Name``.
        warmup: steps before the clock starts.
        steps: steps that are measured: some seconds' worth on a small machine.
    """

    name: str
    title: str
    task: str
    warmup: int
    steps: int

    @property
    def total_steps(self) -> int:
        """Steps that must run: the clock stops where one more begins."""
        return self.warmup + self.steps + 1

    def task_fields(self, directory: Path, loss_calls: int = 1) -> dict[str, Any]:
        """The fields of the measured task, which reports into ``directory``."""
        return {
            "warmup": self.warmup,
            "steps": self.steps,
            "loss_calls": loss_calls,
            "report": str(directory / REPORT),
        }


CONVNET = Workload(
    name="convnet",
    title="Fashion-MNIST ConvNet",
    task="paceline.insight.bench.tasks:TimedConvNet",
    warmup=50,
    steps=400,
)
MLP = Workload(name="mlp", title="784-32-10 MLP", task="paceline.insight.bench.tasks:TimedMLP", warmup=200, steps=4000)
WIDE_MLP = Workload(
    name="wide-mlp",
    title="20M-parameter MLP",
    task="paceline.insight.bench.tasks:TimedWideMLP",
    warmup=3,
    steps=12,
)

WORKLOADS = {workload.name: workload for workload in (CONVNET, MLP)}
"""What ``paceline bench train`` can run."""


def paceline_command(
    workload: Workload,
    directory: Path,
    *,
    reduction: str,
    microbatches: int = RANKS,
    checkpoint_every: str = "never",
    recover: str = "auto",
) -> list[str]:
    """The command a user would type, with the run directory ``directory / "run"``."""
    command = _train(
        workload.task,
        directory,
        {
            "--nproc": RANKS,
            "--reduction": reduction,
            "--microbatches": microbatches,
            "--max-steps": workload.total_steps,
            "--checkpoint-every": checkpoint_every,
            "--recover": recover,
        },
    )
    for field, value in workload.task_fields(directory, loss_calls=microbatches // RANKS).items():
        command += ["--set", f"{field}={value}"]
    return command


def unbalanced_command(directory: Path, *, balance: str, max_steps: int, record_every: int) -> list[str]:
    """One rank's command; who it is, is told by variables, so that one rank can be slowed down."""
    return _train(
        "paceline.insight.bench.tasks:ConvNetAlone",
        directory,
        {
            "--load-balance": balance,
            "--microbatches": UNBALANCED_MICROBATCHES,
            "--max-steps": max_steps,
            "--checkpoint-every": "never",
            "--log-every": record_every,
        },
    )


def _train(task: str, directory: Path, options: dict[str, Any]) -> list[str]:
    alike = {
        "--threads": 1,
        "--device": "cpu",
        "--global-batch-size": RANKS * BATCH_SIZE,
        "--eval-every": "never",
        "--run-dir": directory / "run",
    }
    command = [sys.executable, "-m", "paceline", "train", task, "--quiet"]
    for option, value in (alike | options).items():
        command += [option, str(value)]
    return command
