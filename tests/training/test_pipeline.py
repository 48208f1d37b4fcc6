"""Pipelines over processes: the bits of one process, and checkpoints that any strategy continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.states import newest

PP: dict[str, Any] = {"strategy": "pp"}
GPIPE = {**PP, "pp_schedule": "gpipe", "pp_split": "equal"}
ZERO_BUBBLE = {**PP, "pp_schedule": "zero-bubble"}
INTERLEAVED = {**PP, "pp_schedule": "interleaved"}
ONE_BY_ONE = {"strategy": "pp", "pp_schedule": "sequential"}
BOTH = {"mesh": "pp=2,dp=2"}

# Carved validation, plateau schedule; dropout, batch norm, AdamW; a short last batch.
EVERYTHING = {"task": "Everything", "options": {"val_fraction": 0.2, "max_steps": 9}}
JOBS: dict[str, dict[str, Any]] = {
    "everything": EVERYTHING,
    # Counters, samples of different weights; its parts are named by the task.
    "two-optimizers": {"task": "TwoOptimizersInParts", "options": {"precision": "bf16"}},
    "fp16": {"task": "OverflowingOnce", "options": {"precision": "fp16"}},
    "clipped": {"task": "Points", "options": {"clip_norm": 0.05}},
    "metrics": {"task": "ManyMetrics"},
    "uneven-stream": {"task": "Uneven"},
    # Values that go past a stage, randomness before the model, the best model of several.
    "skips": {"task": "Skipping", "options": {"best_metric": "loss:min"}, "fields": {"num_val": 20, "num_test": 9}},
    "deep": {"task": "Deep"},
    "describes": {"task": "Describes", "fields": {"num_val": 20}},
    # The last batch has one micro-batch: one of two copies has nothing to compute.
    "one-microbatch": {"task": "Deep", "fields": {"num": 32}, "network": True},
}
ON_TWO: dict[str, list[dict[str, Any]]] = {
    "everything": [PP, GPIPE, ZERO_BUBBLE, ONE_BY_ONE],
    "two-optimizers": [PP, ZERO_BUBBLE],
    "fp16": [PP, GPIPE],
    "clipped": [ZERO_BUBBLE],
    "metrics": [PP],
    "uneven-stream": [PP, ZERO_BUBBLE],
    "skips": [GPIPE, ZERO_BUBBLE],
    "deep": [INTERLEAVED],
    "describes": [PP],
}
ON_FOUR: dict[str, list[dict[str, Any]]] = {
    "everything": [BOTH],
    "two-optimizers": [{**BOTH, "pp_schedule": "zero-bubble"}],
    "fp16": [BOTH],
    "clipped": [BOTH],
    "skips": [{**PP, "pp_split": "2,1,1,1"}],
    "one-microbatch": [{**BOTH, "pp_schedule": "interleaved"}],
}


def _jobs(ways: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    return {
        f"{name}-{number}": {**JOBS[name], "options": {**JOBS[name].get("options", {}), **options}}
        for name, several in ways.items()
        for number, options in enumerate(several)
    }


def _moved(stop_at: int, **options: Any) -> dict[str, Any]:
    options = {**EVERYTHING["options"], **options, "run_dir": "moved"}
    return {"task": "Everything", "options": options, "stop_at": stop_at}


@pytest.fixture(scope="module")
def alone(start_trainings: Any) -> Any:
    """One process."""
    return start_trainings(JOBS)


@pytest.fixture(scope="module")
def pair(start_trainings: Any) -> Any:
    """Two processes, a stage or two each; at last a run that goes from strategy to strategy."""
    moved = {"moved-1": _moved(30, **PP), "moved-2": _moved(15), "moved-3": _moved(0, **GPIPE)}
    return start_trainings(_jobs(ON_TWO) | moved, ranks=2)


@pytest.fixture(scope="module")
def four(start_trainings: Any) -> Any:
    """Four processes: two copies of two stages."""
    return start_trainings(_jobs(ON_FOUR), ranks=4)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", _jobs(ON_TWO))
def test_the_bits_are_those_of_one_process(alone: Any, pair: Any, name: str) -> None:
    _same(pair[name], alone[name.rpartition("-")[0]])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", _jobs(ON_FOUR))
def test_the_bits_are_those_of_one_process_on_four(alone: Any, four: Any, name: str) -> None:
    _same(four[name], alone[name.rpartition("-")[0]])


def test_a_run_goes_from_strategy_to_strategy(alone: Any, pair: Any) -> None:
    assert [pair[f"moved-{number}"].get("error") for number in (1, 2)] == ["StopRequested"] * 2
    _same(pair["moved-3"], alone["everything"])


def test_a_step_is_recorded(pair: Any, run_processes: Any) -> None:
    pair.results()
    done = run_processes.paceline("runs", "pipeline", pair.run("deep-0"))
    assert done.returncode == 0, done.stderr
    # The last batch of an epoch is a short one.
    assert "interleaved, 2 ranks, 5 micro-batches, step 8" in done.stdout
    assert "stage 3: forward" in done.stdout


def _same(piped: dict[str, Any], alone: dict[str, Any]) -> None:
    assert "error" not in alone, alone
    assert "error" not in piped, piped
    for what in ("model_sha256", "metrics", "steps", "samples", "best_step"):
        assert piped[what] == alone[what], what


def test_a_checkpoint_is_that_of_one_process(alone: Any, pair: Any) -> None:
    for world in (alone, pair):
        world.results()
    one, piped = newest(alone.run("two-optimizers")), newest(pair.run("two-optimizers-1"))
    assert list(one["model"]) == list(piped["model"])
    assert one["optimizers"].keys() == piped["optimizers"].keys()
    for name, optimizer in one["optimizers"].items():
        assert list(optimizer["state"]) == list(piped["optimizers"][name]["state"])
        for parameter, values in optimizer["state"].items():
            for key, value in values.items():
                other = piped["optimizers"][name]["state"][parameter][key]
                assert torch.equal(torch.as_tensor(other), torch.as_tensor(value)), (name, parameter, key)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nproc", "1", "--strategy", "pp"), "--strategy pp splits a model over processes, but there is only one"),
        (
            ("--nproc", "3", "--strategy", "pp", "--microbatches", "2"),
            "2 micro-batches for 3 stages leave some always idle. Use --microbatches 3 or more",
        ),
        (
            ("--nproc", "3", "--strategy", "pp"),
            "the model has 2 block(s), too few for 3 stages. Use 2 stages at most",
        ),
        (
            ("--nproc", "2", "--strategy", "pp", "--pp-schedule", "sequential", "--pp-split", "1,2"),
            "Give 2 numbers that add up to 2, such as 1,1, or balanced",
        ),
        (("--nproc", "2", "--strategy", "pp", "--pp-split", "evenly"), "--pp-split must be balanced, equal"),
        (("--nproc", "2", "--strategy", "pp", "--ema", "0.9"), "--ema does not work with --strategy pp"),
    ],
)
def test_bad_input(run_processes: Any, tasks_file: Path, options: tuple[str, ...], message: str) -> None:
    done = run_processes.paceline("train", f"{tasks_file}:Points", "--quiet", *options)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stderr.count(message) == 1
