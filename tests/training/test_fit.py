"""``paceline.fit`` in a script: alone, starting processes, and under torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.api import Result, task_spec
from paceline_tasks.fashion_mnist import FashionMNIST

SCRIPT = """
import json
import os
import sys
from dataclasses import dataclass

import paceline
from tasks import TwoOptimizers


@dataclass
class Mine(TwoOptimizers):
    name: str = "?"


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    result = paceline.fit(Mine(lr=0.2, num_val=8, name="a b"), quiet=True, **options)
    if os.environ.get("RANK", "0") == "0":
        shown = {name: getattr(result, name) for name in ("steps", "world_size", "model_sha256", "restarts")}
        print(json.dumps({**shown, "run": str(result.run), "text": str(result), "metrics": result.metrics}))
"""


@pytest.fixture
def script(tmp_path: Path, tasks_file: Path) -> Path:
    (tmp_path / "tasks.py").write_text(tasks_file.read_text())
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


SEARCH = """
import random

import numpy
import torch

import paceline
from tasks import TwoOptimizers


def drawn():
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


if __name__ == "__main__":
    options = dict(max_steps=1, threads=1, quiet=True, microbatches=1)
    seen = []
    for trains in (False, True):
        random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
        for trial in range(2):
            seen += drawn()
            if trains:
                result = paceline.fit(TwoOptimizers(), run_dir=f"run-{trial}", **options)
    assert seen[:6] == seen[6:], seen
"""


def test_a_script_s_own_random_numbers_continue_as_without_training(script: Path, run_processes: Any) -> None:
    search = script.with_name("search.py")
    search.write_text(SEARCH)
    done = run_processes.run([sys.executable, search])
    assert done.returncode == 0, done.stderr


def test_a_script_gives_the_same_model_however_it_is_started(script: Path, run_processes: Any) -> None:
    options = {"epochs": 1, "threads": 1, "seed": 2}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    started = {
        run: run_processes.start([sys.executable, *before, script, json.dumps({**options, **more, "run_dir": run})])
        for run, before, more in (
            ("alone", [], {}),
            ("two", [], {"nproc": 2}),
            ("torchrun", torchrun, {}),
        )
    }
    results = {}
    for run, popen in started.items():
        finished = run_processes.finish(popen, timeout_s=120)
        assert finished.returncode == 0, finished.stderr
        results[run] = json.loads(finished.stdout.splitlines()[-1])
    assert {run: result["world_size"] for run, result in results.items()} == {
        "alone": 1,
        "two": 2,
        "torchrun": 2,
    }
    assert {result["run"] for result in results.values()} == {"alone", "two", "torchrun"}
    for key in ("model_sha256", "metrics", "steps"):
        assert len({json.dumps(result[key]) for result in results.values()}) == 1, key
    assert results["two"]["text"].startswith("two: 5 steps, 107 samples, val accuracy 0.")


def test_a_failure_of_a_started_process_is_raised(script: Path, run_processes: Any) -> None:
    finished = run_processes.run(
        [sys.executable, script, json.dumps({"nproc": 2, "microbatches": 1, "run_dir": "run"})]
    )
    assert finished.returncode != 0
    assert "2 processes cannot share 1 micro-batches" in finished.stderr
    assert "LaunchError" in finished.stderr
    assert not (script.parent / "run" / "result.json").exists()


STOPPED = """
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import paceline
from tasks import TwoOptimizers


@dataclass
class Stopped(TwoOptimizers):
    def on_batch_begin(self, info):
        if info.split == "train" and info.step == 2 and not Path("sent").exists():
            Path("sent").touch()
            os.kill(int(os.environ["STARTED"]), signal.SIGTERM)


if __name__ == "__main__":
    os.environ.setdefault("STARTED", str(os.getpid()))
    paceline.fit(Stopped(), microbatches=2, nproc=int(sys.argv[1]), run_dir="run", epochs=500, threads=1)
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_script_that_is_stopped_exits_as_the_command_does(processes: int, script: Path, run_processes: Any) -> None:
    script.write_text(STOPPED)
    finished = run_processes.run([sys.executable, script, str(processes)])
    assert finished.returncode == 75, finished.stderr
    assert "Traceback" not in finished.stderr
    assert finished.stderr.count("by SIGTERM; everything is saved. Continue with: paceline resume run") == 1


def record(**metrics: float | None) -> dict[str, Any]:
    numbers = {
        "steps": 3,
        "epochs": 1,
        "samples": 40,
        "world_size": 1,
        "microbatches": 4,
        "restarts": 0,
        "recoveries": 0,
        "seconds": 1.0,
    }
    return {"run": "runs/a", "metrics": {"val": metrics}, "model_sha256": "0" * 64, **numbers}


def test_a_result_is_its_record_as_attributes() -> None:
    result = Result.of(record(accuracy=0.5))
    assert (result.run, result.samples, result.microbatches) == (Path("runs/a"), 40, 4)
    assert result.record["metrics"] == {"val": {"accuracy": 0.5}}
    assert str(result) == "runs/a: 3 steps, 40 samples, val accuracy 0.5"


def test_a_metric_without_a_value_is_nan() -> None:
    assert str(Result.of(record(f1=None))) == "runs/a: 3 steps, 40 samples, val f1 nan"


def test_the_name_of_a_task_is_how_others_find_it() -> None:
    assert task_spec(FashionMNIST()) == "fashion-mnist"

    class Local(FashionMNIST):
        pass

    with pytest.raises(paceline.TaskError, match="move it to the top level"):
        task_spec(Local())


def test_options_are_checked_before_anything_is_started() -> None:
    with pytest.raises(paceline.ConfigError, match="--global-batch-size must be at least 1, but is 0"):
        paceline.fit(FashionMNIST(), global_batch_size=0)
    with pytest.raises(paceline.ConfigError, match="rank and world_size belong together"):
        paceline.fit(FashionMNIST(), rank=1)
