from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.core.files import read_json_lines
from paceline.runs.directory import EpochSteps, RunDirectory
from paceline.runs.metric_writers import RankStatus
from paceline.runs.monitor import Monitor

MakeMonitor = Callable[..., Monitor]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


def make_monitor(directory: RunDirectory, **options: Any) -> Monitor:
    defaults: dict[str, Any] = {
        "rank": 0,
        "world_size": 2,
        "total_steps": 25,
        "epochs": EpochSteps(10),
        "first_step": 0,
        "log_every": 10,
        "quiet": True,
        "device": "cpu",
    }
    return Monitor(directory, **defaults | options)


def run_steps(monitor: Monitor, first: int, last: int) -> None:
    for step in range(first + 1, last + 1):
        monitor.timer.mark("forward")
        rows = partial(lambda at: [monitor.status(at)] * 2, step)
        monitor.on_step_end(step, (step - 1) // 10, 64, 1.0 / step, lambda: (0.1,), rows)


def test_records_are_due_at_multiples_and_at_the_end(directory: RunDirectory) -> None:
    with make_monitor(directory) as monitor:
        assert [step for step in range(1, 26) if monitor.is_due(step)] == [10, 20, 25]
    with make_monitor(directory, total_steps=None, rank=1) as monitor:
        assert [step for step in range(1, 26) if monitor.is_due(step)] == [10, 20]


def test_a_train_record_says_everything(directory: RunDirectory) -> None:
    rows = [RankStatus(0.010, 0.4, 2.0 * 2**20, 0.5), RankStatus(0.010, 0.8, 3.0 * 2**20, math.nan)]
    with make_monitor(directory, log_every=5) as monitor:
        for step in range(1, 6):
            monitor.timer.seconds["forward"] += 0.01
            monitor.on_step_end(step, 0, 64, 0.5, lambda: (0.1, 0.2), lambda: rows)
    (record,) = read_json_lines(directory.metrics)
    assert record.pop("time") > 1e9
    assert record.pop("seconds") >= 0
    assert record == {
        "kind": "train",
        "step": 5,
        "epoch": 0,
        "loss": 0.5,
        "lr": 0.1,
        "learning_rates": [0.1, 0.2],
        "samples_per_s": 6400.0,
        "imbalance": 1.333,
        "ranks": [
            {"rank": 0, "step_ms": 10.0, "busy": 0.4, "memory_mib": 2.0, "utilisation": 0.5},
            {"rank": 1, "step_ms": 10.0, "busy": 0.8, "memory_mib": 3.0, "utilisation": None},
        ],
    }


def test_the_rate_counts_what_came_since_the_last_record_and_no_evaluation(directory: RunDirectory) -> None:
    with make_monitor(directory, log_every=1) as monitor:
        monitor.timer.seconds["forward"] += 1.0
        monitor.on_step_end(1, 0, 100, 0.5, lambda: (0.1,))
        monitor.timer.seconds["evaluation"] += 50.0
        monitor.timer.seconds["forward"] += 2.0
        monitor.on_step_end(2, 0, 100, 0.5, lambda: (0.1,))
    assert [r["samples_per_s"] for r in read_json_lines(directory.metrics)] == [100.0, 50.0]


def test_rates_and_rows_are_fetched_only_when_a_record_is_due(directory: RunDirectory) -> None:
    fetched: list[str] = []

    def fetch(name: str, value: Any) -> Callable[[], Any]:
        def call() -> Any:
            fetched.append(name)
            return value

        return call

    with make_monitor(directory) as monitor:
        for step in range(1, 11):
            assert fetched == []
            row = RankStatus(0.1, 1.0, 1.0, 1.0)
            monitor.on_step_end(step, 0, 64, 0.5, fetch("lr", [0.1]), fetch("rows", [row, row]))
    assert sorted(fetched) == ["lr", "rows"]


def test_only_rank_zero_writes(directory: RunDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    with make_monitor(directory, rank=1, quiet=False) as monitor:
        run_steps(monitor, 0, 25)
        monitor.set_status("evaluating")
        monitor.on_eval_end("val", 25, 2, {"accuracy": 0.5})
        monitor.note("hello")
        monitor.finish({"steps": 25})
    assert sorted(p.name for p in directory.path.iterdir()) == ["heartbeats", "logs"]
    assert capfd.readouterr() == ("", "")


def test_a_resumed_run_continues_the_file_without_double_points(directory: RunDirectory) -> None:
    with make_monitor(directory, log_every=2, total_steps=None) as monitor:
        run_steps(monitor, 0, 8)
        monitor.on_eval_end("val", 8, 0, {"loss": 1.0})
        run_steps(monitor, 8, 15)  # Killed here; the last checkpoint is of step 8, before its evaluation.
    with make_monitor(directory, log_every=2, total_steps=None, first_step=8) as monitor:
        monitor.on_eval_end("val", 8, 0, {"loss": 1.0})
        monitor.on_eval_end("test", 8, 0, {"loss": 2.0})
        run_steps(monitor, 8, 12)
    records = read_json_lines(directory.metrics)
    assert [r["step"] for r in records if r["kind"] == "train"] == [2, 4, 6, 8, 10, 12]
    assert [(r["split"], r["step"]) for r in records if r["kind"] == "eval"] == [("val", 8), ("test", 8)]
    seconds = [r["seconds"] for r in records if r["kind"] == "train"]
    assert seconds == sorted(seconds)

    accumulator = EventAccumulator(str(directory.tensorboard))
    accumulator.Reload()
    assert [e.step for e in accumulator.Scalars("train/loss")] == [2, 4, 6, 8, 10, 12]
    assert [e.step for e in accumulator.Scalars("eval/val/loss")] == [8]


def test_a_run_that_died_before_its_first_checkpoint_starts_its_file_anew(directory: RunDirectory) -> None:
    with make_monitor(directory) as monitor:
        run_steps(monitor, 0, 20)
    with make_monitor(directory, first_step=0) as monitor:
        assert read_json_lines(directory.metrics) == []
        run_steps(monitor, 0, 10)
    assert [r["step"] for r in read_json_lines(directory.metrics)] == [10]


def test_a_loss_that_is_nan_is_null_on_record(directory: RunDirectory) -> None:
    with make_monitor(directory, log_every=1) as monitor:
        monitor.on_step_end(1, 0, 64, math.nan, lambda: (0.1,))
        monitor.on_eval_end("val", 1, 0, {"loss": math.inf})
    train, evaluation = (
        json.loads(line, parse_constant=pytest.fail) for line in directory.metrics.read_text().splitlines()
    )
    assert train["loss"] is None
    assert evaluation["metrics"] == {"loss": None}


def test_closing_twice_is_allowed(directory: RunDirectory) -> None:
    monitor = make_monitor(directory)
    monitor.close()
    monitor.close()
