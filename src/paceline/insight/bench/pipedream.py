"""PipeDream against the synchronous 1F1B on the same stages: throughput and accuracy, side by side."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEDULES = ("1f1b", "pipedream")
TASK, SPLIT = "fashion-mnist", (2, 3)
"""The first convolution with what follows it, and the rest: given, so that both have the same stages."""
_LIMIT_S = 600.0


@dataclass(frozen=True)
class PipeDreamComparison:
    """What came out.

    Attributes:
        samples_per_s: of each round, by schedule; the rounds alternate.
        accuracy: on the test split at the end, by schedule; the same in all rounds.
        staleness_mean, staleness_max: PipeDream's, in updates.
    """

    samples_per_s: dict[str, list[float]]
    accuracy: dict[str, float]
    staleness_mean: float
    staleness_max: int

    @property
    def ratio(self) -> float:
        """PipeDream's throughput over 1F1B's: the median over the rounds."""
        rounds = zip(*(self.samples_per_s[name] for name in reversed(SCHEDULES)), strict=True)
        return float(statistics.median(pipedream / synchronous for pipedream, synchronous in rounds))


def compare(directory: Path, *, rounds: int = 3) -> PipeDreamComparison:
    """Train the ConvNet under both schedules, in turns.

    Args:
        directory: where the runs are written; empty.
        rounds: how often each is run.

    Raises:
        subprocess.CalledProcessError: a run failed.
    """
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEDULES}
    for number in range(rounds):
        for name in SCHEDULES:
            run = directory / f"{name}-{number}"
            command = [sys.executable, "-m", "paceline", "train", TASK, "--nproc", str(len(SPLIT)), "--quiet"]
            command += ["--strategy", "pp", "--pp-schedule", name, "--threads", "1", "--run-dir", str(run)]
            command += ["--pp-split", ",".join(map(str, SPLIT)), "--microbatches", "4", "--max-steps", "150"]
            command += ["--eval-every", "never", "--checkpoint-every", "never"]
            subprocess.run(command, check=True, timeout=_LIMIT_S)
            results[name].append(json.loads((run / "result.json").read_text()))
    last = results["pipedream"][-1]
    return PipeDreamComparison(
        samples_per_s={name: [r["samples_per_s"] for r in of] for name, of in results.items()},
        accuracy={name: of[-1]["metrics"]["test"]["accuracy"] for name, of in results.items()},
        staleness_mean=last["staleness_mean"],
        staleness_max=last["staleness_max"],
    )
