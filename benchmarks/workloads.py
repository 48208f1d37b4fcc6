"""The trained models, and the commands that train them: Paceline's and the peers'; no torch is imported."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rounds import REPORT, BenchCommand, Sample

RANKS = 2
BATCH_SIZE = 64
"""Samples a rank and step."""

PIPELINE_MICROBATCHES = 8
"""Of a pipeline's step."""


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
    task="benchmarks.tasks:TimedConvNet",
    warmup=50,
    steps=400,
)
MLP = Workload(name="mlp", title="784-32-10 MLP", task="benchmarks.tasks:TimedMLP", warmup=200, steps=4000)
WIDE_MLP = Workload(
    name="wide-mlp",
    title="20M-parameter MLP",
    task="benchmarks.tasks:TimedWideMLP",
    warmup=3,
    steps=12,
)

WORKLOADS = {workload.name: workload for workload in (CONVNET, MLP)}
"""What ``python -m benchmarks train`` can run."""


def train_command(
    task: str, directory: Path, options: Mapping[str, Any], fields: Mapping[str, Any] | None = None
) -> list[str]:
    """The command a user would type, with the run directory ``directory / "run"``."""
    alike = {
        "--threads": 1,
        "--device": "cpu",
        "--global-batch-size": RANKS * BATCH_SIZE,
        "--eval-every": "never",
        "--checkpoint-every": "never",
        "--run-dir": directory / "run",
        "--purity": "warn",  # the probe counts the calls of the loss
    }
    command = [sys.executable, "-m", "paceline", "train", task, "--quiet"]
    command += [str(word) for option in {**alike, **options}.items() for word in option]
    return command + [word for name, value in (fields or {}).items() for word in ("--set", f"{name}={value}")]


def paceline_commands(
    workload: Workload, directory: Path, microbatches: int = RANKS, **options: Any
) -> list[BenchCommand]:
    """Paceline training ``workload`` on all ranks; ``options`` are those of ``paceline train``."""
    words = {"nproc": RANKS, "microbatches": microbatches, "max_steps": workload.total_steps, **options}
    fields = workload.task_fields(directory, loss_calls=microbatches // RANKS)
    flags = {"--" + name.replace("_", "-"): value for name, value in words.items()}
    return [BenchCommand(train_command(workload.task, directory, flags, fields))]


def peer_commands(loop: str, workload: Workload, directory: Path) -> list[BenchCommand]:
    """A peer's ranks: ``loop`` is the name of one in :mod:`benchmarks.peers`."""
    job = {
        "task": workload.task,
        "fields": workload.task_fields(directory),
        "batch_size": BATCH_SIZE,
        "total_steps": workload.total_steps,
        "init_method": (directory / "rendezvous").as_uri(),
    }
    argv = [sys.executable, "-m", "benchmarks.peers", loop, json.dumps(job)]
    return [BenchCommand(argv, rank_variables(rank)) for rank in range(RANKS)]


def rank_variables(rank: int) -> dict[str, str]:
    """The variables that tell a process its rank, on one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        # gloo would listen on the address of the host's name.
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform.startswith("linux") else "lo0",
    }


def read_steps(directory: Path, warmup: int, steps: int) -> Sample:
    """The time from one record of a run to another: every strategy writes them."""
    records = read_records(directory / "run" / "metrics.jsonl")
    at = {record["step"]: record["seconds"] for record in records if record["kind"] == "train"}
    seconds = at[warmup + steps] - at[warmup]
    return {"steps": steps, "seconds": seconds, "steps_per_s": steps / seconds}


def read_records(path: Path) -> Sequence[dict[str, Any]]:
    """The JSON objects of a file's lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
