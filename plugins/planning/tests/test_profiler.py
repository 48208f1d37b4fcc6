from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from paceline.runs.directory import RunDirectory
from paceline.runs.monitor import Monitor
from paceline_planning.profiler import WARM_UP_STEPS, StepProfiler


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


def train(directory: RunDirectory, *, last: int, first: int = 0, steps: int = 3, rank: int = 0) -> None:
    monitor = Monitor(
        directory,
        rank=rank,
        world_size=2,
        total_steps=last,
        epochs=None,
        first_step=first,
        log_every=100,
        quiet=False,
        device="cpu",
    )
    with monitor:
        profiler = StepProfiler(directory, steps=steps, first=first, monitor=monitor)
        a = torch.ones(8, 8)
        for step in range(first + 1, last + 1):
            torch.mm(a, a)
            monitor.timer.seconds["forward"] += 0.003
            monitor.timer.seconds["backward"] += 0.006
            monitor.timer.seconds["reduction"] += 0.001
            monitor.on_step_end(step, 0, 64, 0.5, lambda: (0.1,))
            profiler.on_step_end(step)
        profiler.close()


def count_of(directory: RunDirectory, rank: int, operator: str) -> int:
    with gzip.open(directory.profile / f"rank-{rank}.trace.json.gz") as file:
        return sum(event.get("name") == operator for event in json.load(file)["traceEvents"])


def test_exactly_the_steps_asked_for_are_profiled(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    train(directory, first=7, steps=3, last=7 + WARM_UP_STEPS + 6)
    assert count_of(directory, 0, "aten::mm") == 3
    assert "aten::mm" in (directory.profile / "rank-0.operators.txt").read_text()
    document = json.loads((directory.profile / "rank-0.phases.json").read_text())
    assert document["first_step"] == 7 + WARM_UP_STEPS + 1
    assert document["steps"] == 3
    assert document["phases"]["backward"] == {"seconds": pytest.approx(0.018), "share": pytest.approx(0.6)}
    assert document["phases"]["data"] == {"seconds": 0.0, "share": 0.0}

    shown = " ".join(capsys.readouterr().err.split())
    assert "Where a step's time went (mean of 3 steps on rank 0)" in shown
    # Largest first, and without the phases that took no time.
    assert shown.index("backward 6.000 60.0%") < shown.index("forward 3.000 30.0%") < shown.index("reduction 1.000")
    assert "checkpoint" not in shown


def test_other_ranks_write_their_own_files_and_print_nothing(
    directory: RunDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    train(directory, rank=1, last=WARM_UP_STEPS + 3)
    assert sorted(p.name for p in directory.profile.iterdir()) == [
        "rank-1.operators.txt",
        "rank-1.phases.json",
        "rank-1.trace.json.gz",
    ]
    assert "step's time" not in "".join(capfd.readouterr())


def test_a_run_that_ends_early_is_profiled_as_far_as_it_went(directory: RunDirectory) -> None:
    train(directory, steps=50, last=WARM_UP_STEPS + 2)
    assert json.loads((directory.profile / "rank-0.phases.json").read_text())["steps"] == 2
    assert count_of(directory, 0, "aten::mm") == 2


@pytest.mark.parametrize("last", [0, 2, WARM_UP_STEPS - 1, WARM_UP_STEPS])
def test_a_run_too_short_to_profile_says_so(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str], last: int
) -> None:
    train(directory, last=last)
    said = f"the run ended at step {last}, but profiling begins after step {WARM_UP_STEPS}"
    assert said in capsys.readouterr().err
    assert not directory.profile.exists()
