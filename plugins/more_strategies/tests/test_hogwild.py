"""Lock-free training in shared memory: the bits of one process where there is one, else as good a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

EVERYTHING: dict[str, Any] = {
    "task": "Everything",
    "options": {"val_fraction": 0.2, "early_stop": "accuracy:4"},
}
LEARNED: dict[str, Any] = {
    "task": "Points",
    "fields": {"num": 480, "num_test": 240},
    "options": {"epochs": 8, "microbatches": 2, "log_every": 10},
}


def hogwild(job: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**job, "options": {**job["options"], "strategy": "hogwild", **more}}


@pytest.fixture(scope="module")
def worlds(start_trainings: Any) -> dict[int, Any]:
    return {
        1: start_trainings({"everything": EVERYTHING, "hogwild": hogwild(EVERYTHING), "learned": LEARNED}, ranks=1),
        2: start_trainings(
            {
                "learned": hogwild(LEARNED),
                "scheduled": {"task": "Overflowing", "options": {"strategy": "hogwild", "log_every": 1}},
                "moved-1": {**hogwild(LEARNED, run_dir="moved"), "stop_at": 30},
                "moved-2": {**LEARNED, "options": {**LEARNED["options"], "run_dir": "moved"}},
                "stream": {"task": "Uneven", "options": {"strategy": "hogwild"}},
                "said": {"task": "Lines", "options": {"strategy": "hogwild", "global_batch_size": 24, "max_steps": 2}},
            },
            ranks=2,
        ),
    }


def test_one_process_has_its_usual_bits(worlds: dict[int, Any]) -> None:
    worlds[2].results()  # it ends here
    alone, result = worlds[1]["everything"], worlds[1]["hogwild"]
    for what in ("model_sha256", "metrics", "steps", "samples", "best_step"):
        assert result[what] == alone[what], what
    assert result["staleness"]["max"] == 0


def test_two_processes_learn_as_much(worlds: dict[int, Any]) -> None:
    alone, result = worlds[1]["learned"], worlds[2]["learned"]
    assert "error" not in result, result
    assert result["steps"] == alone["steps"]
    assert result["samples"] == alone["samples"]
    assert result["metrics"]["test"]["accuracy"] > alone["metrics"]["test"]["accuracy"] - 0.1
    assert alone["metrics"]["test"]["accuracy"] > 0.5
    assert sum(result["worker_steps"]) == result["steps"]
    assert sum(result["staleness"]["histogram"].values()) == result["steps"]


def test_each_step_is_recorded_with_its_learning_rate(worlds: dict[int, Any]) -> None:
    worlds[2].results()
    rates = [record["lr"] for record in worlds[2].records("scheduled", "train")]
    assert rates == [0.1 * 0.5**step for step in range(6)]


def test_the_audit_is_clean(worlds: dict[int, Any], run_processes: Any) -> None:
    worlds[2].results()
    done = run_processes.paceline("audit", worlds[2].run("learned"))
    assert done.returncode == 0, done.stdout


def test_another_strategy_goes_on(worlds: dict[int, Any]) -> None:
    assert worlds[2]["moved-1"]["error"] == "StopRequested"
    result = worlds[2]["moved-2"]
    assert "error" not in result, result
    assert result["steps"] == worlds[1]["learned"]["steps"]
    assert result["restarts"] == 1


def test_a_stream_is_read_in_turn_only(worlds: dict[int, Any]) -> None:
    assert "a stream must be read in turn" in worlds[2]["stream"]["message"]


def test_values_of_a_loss_are_refused(worlds: dict[int, Any]) -> None:
    assert "returned values to record, which --strategy hogwild cannot add up" in worlds[2]["said"]["message"]


def test_bad_input(run_processes: Any, tasks_file: Path) -> None:
    options = ("--strategy", "hogwild", "--nproc", "2", "--recover", "inplace")
    done = run_processes.paceline("train", f"{tasks_file}:Points", "--quiet", *options)
    assert done.returncode == 2, done.stderr
    assert "--recover inplace does not work with --strategy hogwild" in done.stderr
