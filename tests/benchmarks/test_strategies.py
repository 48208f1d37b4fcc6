"""``python -m benchmarks strategies``: what is set against what, and whether bars are met."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from benchmarks.__main__ import SuiteName
from benchmarks.results import Spread, TargetResult, bars_table
from benchmarks.strategies import PIPEDREAM_SPLIT, PIPEDREAM_TASK, STUDIES, bench_strategies, suites
from benchmarks.workloads import read_steps
from paceline.core.errors import ConfigError
from paceline.core.task_loading import TaskReference
from paceline.parallel.pipeline.stages import find_blocks


@pytest.mark.parametrize(
    ("median", "bar", "at_most", "met"),
    [
        (0.96, 0.95, False, True),
        (0.94, 0.95, False, False),
        (0.39, 0.4, True, True),
        (0.41, 0.4, True, False),
    ],
)
def test_a_bar_is_met_or_not(median: float, bar: float, at_most: bool, met: bool) -> None:
    verdict = TargetResult("fsdp", "--strategy fsdp", Spread(median, 0.1, 2.0), bar, at_most)
    assert verdict.met is met
    assert verdict.cells[-1] == ("met" if met else "NOT met")
    assert bars_table([verdict]).as_markdown().rstrip().endswith("met |")
    assert bars_table([verdict]).as_rich().row_count == 1
    assert verdict.as_json()["met"] is met


def test_a_figure_without_a_bar_is_neither() -> None:
    verdict = TargetResult("slow-worker", "async: less accurate by", Spread.of([0.2]), None, unit=" points")
    assert verdict.met is None
    assert verdict.cells[2:] == ("0.20 points", "0.20 to 0.20", "none", "")


def test_all_suites_can_be_named() -> None:
    compared = [suite.name for suite in suites(20, 5)]
    assert sorted([*compared, *STUDIES]) == sorted(get_args(SuiteName))


def test_every_bar_is_a_contender_s(tmp_path: Path) -> None:
    for suite in suites(20, 5):
        names = [contender.name for contender in suite.contenders]
        assert set(suite.bars) <= set(names[1:]), "the first is what the others are measured against"
        for contender in suite.contenders:
            assert contender.commands(tmp_path)


def test_the_stages_of_both_schedules_are_the_models_blocks() -> None:
    task = TaskReference(PIPEDREAM_TASK, {}).load()
    model = task.build_model()
    assert sum(PIPEDREAM_SPLIT) == len(find_blocks(model, task.pipeline_blocks(model)).blocks)


def test_steps_are_timed_between_two_records(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    records = [{"kind": "train", "step": step, "seconds": step / 10} for step in (10, 20, 30)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [*records, {"kind": "eval"}]))
    assert read_steps(tmp_path, warmup=10, steps=20)["steps_per_s"] == pytest.approx(10)


@pytest.mark.parametrize(("name", "value"), [("rounds", 0), ("steps", 0), ("warmup", 0)])
def test_bad_input(name: str, value: int) -> None:
    numbers = {"rounds": 1, "steps": 1, "warmup": 1, name: value}
    with pytest.raises(ConfigError, match=f"--{name} must be at least 1"):
        bench_strategies(chosen=(), progress=print, **numbers)
