"""What one slow worker costs: parameter servers that wait for it, and such that do not, in turn."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.core.environment import detect_environment
from paceline.training.tasks.fashion_mnist import FashionMNISTMLP

WORKERS = 2


@dataclass
class OneSlowWorker(FashionMNISTMLP):
    """Fashion-MNIST, with a last rank that computes a micro-batch more slowly.

    Without momentum by default: stale gradients act as momentum themselves (Mitliagkas et al.,
    "Asynchrony begets Momentum", 2016), and with 0.9 besides, one update of staleness undoes the training.

    Attributes:
        slow_by_s: seconds more that it needs for a micro-batch.
    """

    slow_by_s: float = 0.02
    momentum: float = 0.0

    def __post_init__(self) -> None:
        environment = detect_environment()
        self._sleep_s = self.slow_by_s if environment.rank == environment.world_size - 1 else 0.0

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        """As the recipe's."""
        if model.training:
            time.sleep(self._sleep_s)
        return super().loss(model, batch)


@dataclass(frozen=True)
class Mode:
    """A way to apply gradients.

    Attributes:
        name: as the report calls it.
        options: of ``paceline train``.
    """

    name: str
    options: tuple[str, ...]


MODES = (
    Mode("sync", ("--ps-mode", "sync")),
    Mode("ssp, 2 steps", ("--ps-mode", "ssp", "--ps-staleness", "2")),
    Mode("async", ("--ps-mode", "async")),
)


@dataclass(frozen=True)
class SlowWorkerMeasurement:
    """One training with a slow worker.

    Attributes:
        name: the mode's.
        samples_per_s: while it trained.
        accuracy: on the test split.
        steps: done.
        staleness: mean and greatest; None where nothing can be stale.
    """

    name: str
    samples_per_s: float
    accuracy: float
    steps: int
    staleness: tuple[float, int] | None


def measure(
    directory: Path, modes: Sequence[Mode] = MODES, *, steps: int = 400, timeout_s: float = 1800
) -> list[SlowWorkerMeasurement]:
    """Train with one server and two workers, of which one is slow, in each mode.

    Args:
        directory: takes the runs.
        modes: what is compared.
        steps: of each training, equally many samples.
        timeout_s: for each training.

    Raises:
        subprocess.CalledProcessError: a training failed.
    """
    return [_measure(directory, mode, steps, timeout_s) for mode in modes]


def _measure(directory: Path, mode: Mode, steps: int, timeout_s: float) -> SlowWorkerMeasurement:
    run = directory / mode.name.replace(", ", "-").replace(" ", "-")
    command = [
        *(sys.executable, "-m", "paceline", "train", "paceline.insight.bench.slow_worker:OneSlowWorker"),
        *("--nproc", str(1 + WORKERS), "--strategy", "ps", *mode.options, "--run-dir", str(run)),
        *(
            "--microbatches",
            "4",
            "--global-batch-size",
            "128",
            "--max-steps",
            str(steps),
            "--eval-every",
            "never",
        ),
        *("--threads", "1", "--quiet", "--json"),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_s)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    staleness = result.get("staleness")
    return SlowWorkerMeasurement(
        name=mode.name,
        samples_per_s=float(result["samples_per_s"]),
        accuracy=float(result["metrics"]["test"]["accuracy"]),
        steps=int(result["steps"]),
        staleness=(staleness["mean"], staleness["max"]) if staleness else None,
    )
