"""Runs on the GPU, started as users start them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.processes import Processes

ROOT = Path(__file__).parents[2]
TASK = f"{Path(__file__).with_name('tasks.py')}:Mixed"
ONE_UNDER_AN_AGENT = ("--on", "spawn", "--recover", "restart")

TWO_ON_ONE_GPU = ("--nproc", "2", "--backend", "gloo")
"""NCCL refuses two ranks on one GPU; gloo, which copies through the host, has the same code on top of it."""

LIMIT_S = 100.0


@dataclass
class Training:
    """One ``paceline train``, which may still run."""

    processes: Processes
    popen: subprocess.Popen[str]
    directory: Path

    def finish(self) -> subprocess.CompletedProcess[str]:
        """Wait for its end, however that is."""
        return self.processes.finish(self.popen, timeout_s=LIMIT_S)

    def result(self) -> dict[str, Any]:
        """Wait for its end, and return ``result.json`` of a run that was trained on a GPU."""
        ended = self.finish()
        assert ended.returncode == 0, ended.stdout + ended.stderr
        result: dict[str, Any] = json.loads((self.directory / "result.json").read_text())
        assert result["device"] == "cuda", ended.stdout + ended.stderr
        return result

    def model(self) -> str:
        """Wait for its end, and return the SHA-256 of its model."""
        return str(self.result()["model_sha256"])


@dataclass
class Trainer:
    """Starts trainings of the GPU tests' task, 12 steps of 64 samples in 8 micro-batches."""

    processes: Processes
    directory: Path

    def start(self, name: str, *options: str, env: dict[str, str] | None = None, **fields: object) -> Training:
        """Start ``paceline train`` with these options, fields of the task and variables."""
        argv = [sys.executable, "-m", "paceline", "train", TASK, "--run-dir", self.directory / name]
        argv += ["--device", "cuda", "--max-steps", "12", "--global-batch-size", "64", "--microbatches", "8"]
        argv += ["--threads", "1", "--checkpoint-every", "5steps"]
        argv += [word for field, value in fields.items() for word in ("--set", f"{field}={value}")]
        popen = self.processes.start([*argv, *options], env=env)
        return Training(self.processes, popen, self.directory / name)

    def resume(self, training: Training, *options: str) -> Training:
        """Start ``paceline resume``."""
        argv = [sys.executable, "-m", "paceline", "resume", training.directory, "--device", "cuda", *options]
        return Training(self.processes, self.processes.start(argv), training.directory)


@pytest.fixture
def trainer(run_processes: Processes, tmp_path: Path) -> Trainer:
    return Trainer(run_processes, tmp_path)
