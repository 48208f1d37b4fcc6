"""What ``python -m benchmarks tune`` makes of its figures."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from tests.processes import Processes

from benchmarks.__main__ import show
from benchmarks.tuning import TuningFigures

ROOT = Path(__file__).parents[2]
RESULT = TuningFigures(
    trials=32,
    asha_best=0.8800,
    grid_best=0.8830,
    asha_steps=3000,
    grid_steps=10000,
    train_s=(5.0, 4.0, 6.0),
    search_s=(44.0, 40.0, 60.0),
    apart_s=(12.0, 11.0, 15.0),
    alone=8,
)


def test_each_bar_is_judged() -> None:
    figures = [(round(v.ratio.median, 3), v.unit, v.bar, v.met) for v in RESULT.verdicts]
    assert figures == [
        (0.3, " points", 0.5, True),
        (30.0, " %", 40.0, True),
        # Of the rounds, in turns: 0.5, 1 and 1.5 s.
        (1.0, " s", 2.0, True),
        (12.0, " s", None, None),
    ]
    worse = dataclasses.replace(RESULT, asha_best=0.87, asha_steps=4100, search_s=(70.0, 40.0, 80.0))
    assert [verdict.met for verdict in worse.verdicts] == [False, False, False, None]


def test_they_are_printed_as_those_of_other_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(RESULT.as_result(), markdown=True) == 0
    text = capsys.readouterr().out
    assert "| tune | steps, of the grid's | 30.00 % | 30.00 to 30.00 | at most 40.00 % | met |" in text
    assert "best accuracy 0.8800 by ASHA in 3000 steps, 0.8830 by the grid in 10000" in text
    assert show(RESULT.as_result(), json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert [verdict["met"] for verdict in document["verdicts"]] == [True, True, True, None]


@pytest.mark.ray
@pytest.mark.slow
def test_searches_are_compared_with_those_of_optuna_and_of_ray(run_processes: Processes) -> None:
    """A seed, and three trials of four steps: that all three search, and how it is printed."""
    words = ("--trials", "3", "--steps", "4", "--evaluations", "2", "--rounds", "1", "--json")
    done = run_processes.run([sys.executable, "-m", "benchmarks", "searches", *words], cwd=ROOT, timeout_s=900)
    assert done.returncode == 0, done.stderr
    comparisons = json.loads(done.stdout)["comparisons"]
    assert [comparison["title"] for comparison in comparisons] == [
        "fashion-mnist, accuracy",
        "transformer, bits_per_byte",
    ]
    for comparison, (low, high) in zip(comparisons, ((0.02, 1), (4, 10)), strict=True):
        assert [row["name"] for row in comparison["rows"]] == ["paceline", "optuna", "ray"]
        for row in comparison["rows"]:
            assert low < row["value"]["median"] < high
            assert 3 * 2 <= row["steps"]["median"] <= 4 * 4
