"""Stages whose layers are split, and copies of them: the bits of tensor parallelism alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.states import newest
from torch import nn

from paceline.core.errors import ConfigError
from paceline.parallel.pipeline.stage_split import require_blocks
from paceline.parallel.pipeline.stages import closed, find_blocks

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(600)]

JOBS: dict[str, dict[str, Any]] = {
    "layered": {"task": "Layered", "options": {"best_metric": "accuracy:max", "max_steps": 5}},
    # Two optimizer groups, dropout, and a seed of its own.
    "text": {"task": "Text", "fields": {"layers": 2}, "options": {"max_steps": 3, "seed": 5}},
    "sequence": {
        "task": "Text",
        "fields": {"layers": 2, "dropout": 0.0},
        "options": {"max_steps": 3, "sequence_parallel": True},
    },
    "fp16": {"task": "OverflowingLayers", "options": {"max_steps": 4, "precision": "fp16"}},
}
CLIPPED = {"task": "Layered", "options": {"clip_norm": 0.05, "max_steps": 4}}
FOUR: dict[str, dict[str, Any]] = {
    "layered": {"mesh": "pp=2,tp=2", "pp_split": "1,2"},
    "text": {"mesh": "pp=2,tp=2", "pp_schedule": "zero-bubble"},
    "sequence": {"mesh": "pp=2,tp=2", "pp_schedule": "gpipe"},
    "fp16": {"mesh": "pp=2,tp=2"},
}
SHARDED = {"task": "Everything", "options": {"val_fraction": 0.2, "max_steps": 5}}
DEEP = {"task": "Text", "fields": {"layers": 4}, "options": {"max_steps": 3, "seed": 5}}
EIGHT = {
    "pp": (SHARDED, "dp=4,pp=2"),
    "tp": (JOBS["layered"], "dp=4,tp=2"),
    "fsdp": (JOBS["layered"], "fsdp=4,tp=2"),
    "stages": (DEEP, "pp=4,tp=2"),
}


def _under(job: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {**job, "options": {**job["options"], **options}}


@pytest.fixture(scope="module")
def alone(start_trainings: Any) -> Any:
    """One process."""
    return start_trainings({"layered": JOBS["layered"], "clipped": CLIPPED})


@pytest.fixture(scope="module")
def split(start_trainings: Any) -> Any:
    """Two processes that share each layer."""
    return start_trainings({name: _under(JOBS[name], strategy="tp") for name in JOBS}, ranks=2)


@pytest.fixture(scope="module")
def four(start_trainings: Any) -> Any:
    """Two stages of two processes each."""
    jobs = {name: _under(JOBS[name], **options) for name, options in FOUR.items()}
    return start_trainings(jobs | {"clipped": _under(CLIPPED, **FOUR["layered"])}, ranks=4)


@pytest.mark.parametrize("name", JOBS)
def test_stages_of_split_layers_have_the_bits_of_split_layers(split: Any, four: Any, name: str) -> None:
    _same(four[name], split[name])


def test_the_norm_of_gradients_is_that_of_all_stages_and_parts(alone: Any, four: Any) -> None:
    assert four["clipped"]["model_sha256"] != alone["clipped"]["model_sha256"]
    whole, clipped = newest(alone.run("clipped"))["model"], newest(four.run("clipped"))["model"]
    for name, tensor in whole.items():
        torch.testing.assert_close(clipped[name], tensor, rtol=1e-4, atol=1e-5)


def test_an_overflow_skips_the_step_in_all_stages_and_parts(split: Any, four: Any) -> None:
    scalers = [newest(worlds.run("fp16"))["scaler"] for worlds in (split, four)]
    assert scalers[0] == scalers[1]
    # 24 samples over 4 micro-batches: 2^13 to begin with, and it is halved where a step is skipped.
    assert scalers[0]["scale"] < 2.0**13


@pytest.mark.slow
def test_three_axes_on_eight_processes(start_trainings: Any, split: Any) -> None:
    jobs = {name: _under(JOBS[name], mesh="dp=2,tp=2,pp=2") for name in ("layered", "fp16")}
    done = start_trainings(jobs, ranks=8)
    for name in jobs:
        _same(done[name], split[name])


@pytest.mark.slow
def test_two_axes_on_eight_processes(start_trainings: Any, split: Any) -> None:
    done = start_trainings({key: _under(job, mesh=mesh) for key, (job, mesh) in EIGHT.items()}, ranks=8)
    _same(done["pp"], start_trainings({"alone": SHARDED})["alone"])
    for key in ("tp", "fsdp"):
        _same(done[key], split["layered"])
    deep = start_trainings({"deep": _under(DEEP, strategy="tp")}, ranks=2)["deep"]
    _same(done["stages"], deep)


def _same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for result in (one, other):
        assert "error" not in result, result
    for what in ("model_sha256", "metrics", "steps", "samples", "best_step"):
        assert one[what] == other[what], what


def test_no_cut_comes_between_layers_that_are_split_as_a_pair() -> None:
    layers = [nn.Linear(4, 4) for _ in range(5)]
    found = find_blocks(nn.Sequential(*layers), None)
    pairs = closed(found, {"1.weight": True, "1.bias": True, "3.weight": False, "3.bias": False})
    assert [sorted(block.holds) for block in pairs.blocks] == [
        ["0.bias", "0.weight"],
        [f"{layer}.{name}" for layer in (1, 2, 3) for name in ("bias", "weight")],
        ["4.bias", "4.weight"],
    ]
    with pytest.raises(ConfigError, match="Layers that tp splits as a pair cannot be separated: 1 to 3"):
        require_blocks(pairs, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("pp=2,fsdp=2",), "pp can be combined with dp and tp, not with fsdp"),
        (
            ("pp=2,tp=2", "--pp-schedule", "pipedream"),
            "full weights of each update, and tp splits",
        ),
    ],
)
def test_bad_input(run_processes: Any, tasks_file: Path, options: tuple[str, ...], message: str) -> None:
    train = ("train", f"{tasks_file}:Points", "--quiet", "--nproc", "4", "--threads", "1", "--mesh")
    done = run_processes.paceline(*train, *options)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stderr.count(message) == 1
