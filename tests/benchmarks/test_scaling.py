"""``python -m benchmarks scaling``: sizes in turns, their speed-up and efficiency; and the command's former name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.processes import Processes

from benchmarks.scaling import bench_scaling
from paceline.core.errors import ConfigError

ROOT = Path(__file__).parents[2]
SCALING = (sys.executable, "-m", "benchmarks", "scaling", "fashion-mnist-mlp", "--steps", "4", "--warmup", "2")


@pytest.mark.integration
def test_efficiency_is_the_speed_up_over_that_of_the_processes(run_processes: Processes) -> None:
    words = ("--nproc", "2", "1", "--batch-per-process", "32", "--json", "--", "--microbatches", "2")
    done = run_processes.run([*SCALING, *words], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    [comparison] = json.loads(done.stdout)["comparisons"]
    one, two = comparison["rows"]
    assert [one["name"], two["name"]] == ["1", "2"]
    assert [row["rounds"][0]["global_batch_size"] for row in (one, two)] == [32, 64]
    assert (one["ratio"]["median"], one["efficiency_percent"]["median"]) == (1, 100)
    assert two["efficiency_percent"]["median"] == pytest.approx(50 * two["ratio"]["median"], rel=1e-4)


@pytest.mark.integration
def test_a_size_that_fails_is_named(run_processes: Processes) -> None:
    # Three processes are more than the two micro-batches.
    done = run_processes.run([*SCALING, "--nproc", "3", "--", "--microbatches", "2"], cwd=ROOT)
    assert done.returncode != 0
    assert "--microbatches" in done.stderr


def test_numbers_are_positive() -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        bench_scaling(
            "net",
            nproc=(0, 1),
            batch_per_process=None,
            steps=4,
            warmup=2,
            rounds=1,
            options=(),
            progress=print,
        )


def test_the_former_command_says_what_to_type(run_processes: Processes) -> None:
    done = run_processes.paceline("bench", "scaling", "net.py:Net", "--nproc", "1,2")
    assert done.returncode == 2
    assert "python -m benchmarks scaling TASK" in done.stderr
