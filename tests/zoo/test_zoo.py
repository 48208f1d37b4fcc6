"""Tasks of many kinds, as users write them: one model on any number of processes, after a kill, and by a plain loop.

The runs of a task are started together; the one that was killed is resumed on another number of processes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.processes import Processes

DRIVER = Path(__file__).with_name("driver.py")
QUICK = (
    *("sequences:Sound", "sequences:Language", "sequences:Lines"),
    *("generative:Diffusion", "generative:Gan"),
    *("structured:Graphs", "structured:Table", "structured:Recommender"),
    *("methods:Contrast", "methods:Reinforcement"),
    *("layers:Mixture", "layers:Quantized"),
    *("steps:AlternatingGan", "steps:WholeBatch"),
)
OTHERS = (
    *("sequences:Sentiment", "sequences:Speech", "sequences:BigAndTiny"),
    *("generative:WassersteinGan", "generative:Annealed"),
    *("structured:Segmentation", "structured:Boxes"),
    *("methods:Distillation", "methods:Mixup", "methods:Curriculum", "methods:SeveralTasks", "methods:LearningToLearn"),
    *("layers:Physics", "layers:Ordinary", "layers:Parametrized", "layers:Implicit"),
    *("sequences:MaskedLetters", "sequences:Forecast", "structured:PointClouds", "structured:Ranking"),
    *("generative:VectorQuantized", "methods:MetricLearning"),
    *("steps:Sharpness", "steps:Surgery", "steps:SecondOrder", "steps:Lookahead"),
)


OWN_STEP = {task for task in (*QUICK, *OTHERS) if task.startswith("steps:")}
STREAMS = {"sequences:Lines"}
ONLY_FLOAT32 = {
    *("structured:Graphs", "structured:Table", "methods:Reinforcement", "layers:Quantized"),
}


class Ranks:
    """A number of processes that train jobs, one after the other."""

    def __init__(self, processes: Processes, number: int, jobs: Path) -> None:
        self._processes = processes
        environments: list[dict[str, str]] = [{}]
        if number > 1:
            port = processes.free_port()
            shared = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            environments = [{**shared, "RANK": str(rank)} for rank in range(number)]
        self._started = [processes.start([sys.executable, DRIVER, jobs], env=env) for env in environments]

    def results(self, code: int = 0) -> list[dict[str, Any]]:
        """What each job ended with."""
        finished = [self._processes.finish(popen, timeout_s=120) for popen in self._started]
        errors = "\n".join(f"--- rank {rank}\n{each.stderr}" for rank, each in enumerate(finished))
        assert [each.returncode for each in finished] == [code] * len(finished), errors
        return [json.loads(line) for line in finished[0].stdout.splitlines()]


def start(processes: Processes, path: Path, number: int, *jobs: Mapping[str, Any]) -> Ranks:
    listed = path / f"jobs-{number}-{jobs[0]['run_dir']}.json"
    listed.write_text(json.dumps(jobs))
    return Ranks(processes, number, listed)


@pytest.mark.parametrize("task", [*QUICK, *(pytest.param(task, marks=pytest.mark.matrix) for task in OTHERS)])
def test_a_task_has_the_same_bits_on_any_number_of_processes_and_after_a_kill(
    run_processes: Processes, tmp_path: Path, task: str
) -> None:
    def job(run_dir: str, **more: Any) -> dict[str, Any]:
        return {"task": task, "run_dir": run_dir, **more}

    one = start(run_processes, tmp_path, 1, job("on-1"))
    two = start(run_processes, tmp_path, 2, job("on-2"), job("killed", kill_at=2))
    three = start(run_processes, tmp_path, 3, job("on-3"))
    whole = two.results(code=-9)
    resumed = start(run_processes, tmp_path, 3, job("killed"))
    results = [*one.results(), *whole, *three.results(), *resumed.results()]
    assert [result["world_size"] for result in results] == [1, 2, 3, 3]
    assert results[0]["steps"] >= 4
    assert results[3]["restarts"] == 1
    assert [result["purity"]["found"] for result in results] == [[]] * 4
    for key in ("steps", "samples", "metrics", "model_sha256"):
        assert len({json.dumps(result[key]) for result in results}) == 1, f"{key}: {[r[key] for r in results]}"


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(task, marks=[] if number % 8 == 0 else [pytest.mark.slow if number % 2 else pytest.mark.matrix])
        for number, task in enumerate([*QUICK, *OTHERS])
    ],
)
def test_one_process_ends_with_the_weights_and_the_average_of_a_loop_in_plain_pytorch(
    run_processes: Processes, task: str
) -> None:
    file, _, name = task.partition(":")
    done = run_processes.paceline(
        *("verify", f"{DRIVER.with_name(file)}.py:{name}", "--worlds", "1", "--strategies", "plain-pytorch"),
        *("--steps", "8", "--ema", "0.9", "--json"),
        timeout_s=120,
    )
    assert done.stdout, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    if task in OWN_STEP or task in STREAMS:
        assert row["verdict"] == "not applicable", row
        assert ("defines train_step" if task in OWN_STEP else "are a stream") in row["detail"]
        return
    assert row["verdict"] == "within", row
    assert row["tolerance"] == (0.1 if task in ONLY_FLOAT32 else 1e-6)
