"""ZeRO by DeepSpeed: one process's results within a tolerance, parts on each rank, whole checkpoints."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.conftest import start_trainings, tasks_file
from tests.training.states import newest

__all__ = ["start_trainings", "tasks_file"]

# Its import takes seconds, and only the trained processes need it.
pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install '.[deepspeed]'"
    ),
]

JOBS: dict[str, dict[str, Any]] = {
    "layered": {"task": "Layered", "options": {"max_steps": 6, "clip_norm": 0.05, "eval_every": "2steps"}},
    "deep": {"task": "Deep", "options": {"max_steps": 4}},
    "fp16": {"task": "Overflowing", "options": {"precision": "fp16", "max_steps": 6}},
    "two groups": {"task": "Text", "options": {"max_steps": 3}},
    "frozen": {"task": "Frozen", "options": {"max_steps": 4, "precision": "bf16"}},
}
STAGES = (1, 2, 3)


@pytest.fixture(scope="module")
def worlds(start_trainings: Any) -> dict[int, Any]:
    sharded = {
        f"{name}-{stage}": {
            **job,
            "options": {**job["options"], "strategy": "deepspeed", "zero_stage": stage},
        }
        for name, job in JOBS.items()
        for stage in STAGES
    }
    continued = {}
    for stage in STAGES:
        options = {"strategy": "deepspeed", "zero_stage": stage, "max_steps": 4}
        stopped = f"stopped-{stage}"
        continued[stopped] = {"task": "Deep", "options": options, "stop_at": 4}
        continued[f"continued-{stage}"] = {"task": "Deep", "options": {**options, "run_dir": stopped}}
    refused = {
        "scalar": {"task": "Scaled", "options": {"strategy": "deepspeed"}},
        "two-optimizers": {"task": "TwoOptimizers", "options": {"strategy": "deepspeed"}},
        "adagrad": {
            "task": "Told",
            "fields": {"optimizer": "Adagrad"},
            "options": {"strategy": "deepspeed"},
        },
    }
    return {
        1: start_trainings(JOBS, ranks=1),
        2: start_trainings({**sharded, **continued, **refused}, ranks=2),
    }


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", JOBS)
def test_results_are_those_of_one_process(worlds: dict[int, Any], name: str, stage: int) -> None:
    alone, sharded = worlds[1][name], worlds[2][f"{name}-{stage}"]
    assert sharded.get("strategy") == "deepspeed", sharded
    for what in ("steps", "samples"):
        assert sharded[what] == alone[what]
    expected, found = newest(worlds[1].run(name)), newest(worlds[2].run(f"{name}-{stage}"))
    assert found["model"].keys() == expected["model"].keys()
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if name in ("fp16", "frozen") else {"rtol": 1e-3, "atol": 1e-4}
    for key, value in expected["model"].items():
        torch.testing.assert_close(found["model"][key], value, **tolerance)
    for parameter, values in expected["optimizers"]["main"]["state"].items():
        for key, value in values.items():
            other = found["optimizers"]["main"]["state"][parameter][key]
            torch.testing.assert_close(torch.as_tensor(other), torch.as_tensor(value), **tolerance)
    assert found.get("scaler") == expected.get("scaler")


@pytest.mark.parametrize("stage", STAGES)
def test_continued_with_the_state_of_every_parameter(worlds: dict[int, Any], stage: int) -> None:
    continued = worlds[2][f"continued-{stage}"]
    assert (continued["restarts"], continued["steps"]) == (1, 4)
    whole, found = newest(worlds[2].run(f"deep-{stage}")), newest(worlds[2].run(f"stopped-{stage}"))
    torch.testing.assert_close(found["model"], whole["model"], rtol=0, atol=0)
    found, whole = found["optimizers"]["main"], whole["optimizers"]["main"]
    torch.testing.assert_close(found["state"], whole["state"], rtol=0, atol=0)
    assert found["param_groups"] == whole["param_groups"]


def test_an_overflow_skips_the_step_on_all_ranks(worlds: dict[int, Any]) -> None:
    alone = newest(worlds[1].run("fp16"))["scaler"]
    assert alone["scale"] < 2.0**13
    for stage in STAGES:
        assert newest(worlds[2].run(f"fp16-{stage}"))["scaler"] == alone


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("two-optimizers", "--strategy deepspeed works with one optimizer, but the task builds 2"),
        ("scalar", "cannot hold '0.factor', which has no dimensions. Give it the shape (1,)"),
        ("adagrad", "Adagrad is not known to be elementwise"),
    ],
)
def test_what_cannot_be_sharded_is_refused(worlds: dict[int, Any], name: str, message: str) -> None:
    assert worlds[2][name]["error"] == "ConfigError"
    assert message in worlds[2][name]["message"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nproc", "1", "--strategy", "deepspeed"), "shards states over processes, but there is only one"),
        (("--nproc", "2", "--zero-stage", "2"), "--zero-stage needs --strategy deepspeed"),
        (
            ("--nproc", "2", "--strategy", "deepspeed", "--zero-stage", "3", "--ema", "0.9"),
            "--ema does not work with --zero-stage 3",
        ),
        (
            ("--nproc", "2", "--strategy", "deepspeed", "--mesh", "dp=2"),
            "--mesh dp=2 uses ddp, not --strategy deepspeed",
        ),
        (
            ("--nproc", "2", "--strategy", "deepspeed", "--reduction", "allreduce"),
            "--reduction allreduce does not work with --strategy deepspeed, which sums gradients itself",
        ),
        (("--nproc", "2", "--strategy", "deepspeed", "--fsdp-offload"), "--fsdp-offload needs"),
    ],
)
def test_bad_input(run_processes: Any, tasks_file: Path, options: tuple[str, ...], message: str) -> None:
    done = run_processes.paceline("train", f"{tasks_file}:Points", "--quiet", *options)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count(message) == 1
