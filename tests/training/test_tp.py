"""Tensor parallelism: near one process, and the same bits however many copies of the model there are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.runs.checkpoint_store import newest_verified
from paceline.runs.checkpointer import load

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(600)]

TP: dict[str, Any] = {"strategy": "tp"}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp": (2, TP),
    "dp-tp": (4, {"mesh": "dp=2,tp=2"}),
    "fsdp-tp": (4, {"mesh": "fsdp=2,tp=2"}),
}
JOBS: dict[str, dict[str, Any]] = {
    # The norm that gradients are clipped to is that of all parts.
    "layered": {"task": "Layered", "options": {"best_metric": "accuracy:max", "clip_norm": 0.05, "max_steps": 5}},
    "text": {"task": "Text", "fields": {"tied": True}, "options": {"max_steps": 3, "seed": 5}},
    "sequence": {"task": "Text", "fields": {"dropout": 0.0}, "options": {"max_steps": 3}},
    # Batch norm, and layers that no other takes in.
    "two-optimizers": {"task": "TwoOptimizers", "options": {"max_steps": 3}},
    "fp16": {"task": "Overflowing", "options": {"precision": "fp16", "max_steps": 3}},
}
COMPARED = ("layered", "text", "sequence")
UNDER = {
    "tp": tuple(JOBS),
    "dp-tp": ("layered", "text", "fp16"),
    "fsdp-tp": ("layered", "sequence", "two-optimizers"),
}
"""Each job once under each mesh would take too long."""


@pytest.fixture(scope="module")
def worlds(start_trainings: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same jobs under each mesh, and in one process, there also in float64; and runs that move."""
    moving = tmp_path_factory.mktemp("moving")

    def part(run: str, stop_at: int, options: Mapping[str, Any]) -> dict[str, Any]:
        options = {**options, "run_dir": str(moving / run), "max_steps": 6, "seed": 3}
        return {"task": "Layered", "options": options, "stop_at": stop_at}

    doubled = {
        f"{name}-double": {**JOBS[name], "fields": {**JOBS[name].get("fields", {}), "double": True}}
        for name in COMPARED
    }
    compared = {name: JOBS[name] for name in COMPARED}
    jobs: dict[int, dict[str, dict[str, Any]]] = {1: compared | doubled, 2: {}, 4: {}}
    for mesh, (ranks, options) in MESHES.items():
        for name in UNDER[mesh]:
            along = {"sequence_parallel": True} if name == "sequence" else {}
            jobs[ranks][f"{mesh}-{name}"] = with_options(JOBS[name], {**options, **along})
    # A rank of tp computes all four micro-batches of a step; with dp or fsdp beside it, two.
    jobs[1] |= {"alone": part("alone", 8, {})}
    jobs[2] |= {"tp-unplanned": {"task": "Points", "options": {**TP, "sequence_parallel": True}}}
    jobs[2] |= {"tp-stays": part("stays", 0, TP), "tp-moves": part("moves", 8, TP)}
    jobs[4] |= {
        "fsdp-tp-moves": part("moves", 4, MESHES["fsdp-tp"][1]),
        "dp-tp-moves": part("moves", 0, MESHES["dp-tp"][1]),
        "dp-tp-alone": part("alone", 0, MESHES["dp-tp"][1]),
    }
    started = {ranks: start_trainings(jobs[ranks], ranks=ranks) for ranks in (1, 2)}
    for before in started.values():
        before.results()
    started[4] = start_trainings(jobs[4], ranks=4)
    return {
        "single": Prefixed(started[1], ""),
        **{mesh: Prefixed(started[ranks], f"{mesh}-") for mesh, (ranks, _) in MESHES.items()},
    }


class Prefixed:
    """The trainings whose names begin alike."""

    def __init__(self, trainings: Any, prefix: str) -> None:
        self._trainings, self._prefix = trainings, prefix

    def result(self, name: str) -> dict[str, Any]:
        """What a training ended with, be it an error."""
        return dict(self._trainings[self._prefix + name])

    def __getitem__(self, name: str) -> dict[str, Any]:
        result = self.result(name)
        assert "error" not in result, result
        return result

    def state(self, name: str) -> dict[str, Any]:
        """The last checkpoint."""
        self[name]
        path = newest_verified(self._trainings.run(self._prefix + name) / "checkpoints").path
        assert path is not None
        return load(path).state


def with_options(job: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    return {**job, "options": {**job["options"], **options}}


@pytest.mark.parametrize(("mesh", "name"), [(mesh, name) for mesh in ("dp-tp", "fsdp-tp") for name in UNDER[mesh]])
def test_the_bits_do_not_depend_on_the_data_axis(worlds: dict[str, Any], mesh: str, name: str) -> None:
    alone, several = worlds["tp"][name], worlds[mesh][name]
    assert several["world_size"] == 2 * alone["world_size"]
    whats = ["steps", "samples"]
    if (mesh, name) != ("fsdp-tp", "layered"):
        # Where fsdp holds parts of them, a norm is summed in another order.
        whats += ["model_sha256", "metrics", "best_step"]
    for what in whats:
        assert several[what] == alone[what], what


@pytest.mark.parametrize(
    ("mesh", "name"), [(mesh, name) for mesh in MESHES for name in COMPARED if name in UNDER[mesh]]
)
def test_as_near_to_float64_as_one_process(worlds: dict[str, Any], mesh: str, name: str) -> None:
    exact = worlds["single"].state(f"{name}-double")["model"]
    alone, split = worlds["single"].state(name)["model"], worlds[mesh].state(name)["model"]
    assert list(split) == list(alone)

    def distance(state: Mapping[str, torch.Tensor]) -> float:
        return max(float((state[key].double() - exact[key]).abs().max()) for key in exact)

    # What a float's rounding does to one process, and a step's worth of it where that happened to be small.
    assert distance(split) <= 10 * distance(alone) + 1e-6
    assert worlds[mesh][name]["steps"] == worlds["single"][name]["steps"]


def test_a_checkpoint_is_that_of_one_process(worlds: dict[str, Any]) -> None:
    alone = worlds["single"].state("layered")["optimizers"]["main"]["state"]
    for mesh in MESHES:
        split = worlds[mesh].state("layered")["optimizers"]["main"]["state"]
        assert split.keys() == alone.keys()
        for parameter, values in alone.items():
            for key, value in values.items():
                torch.testing.assert_close(
                    torch.as_tensor(split[parameter][key]), torch.as_tensor(value), rtol=1e-3, atol=1e-5
                )


def test_a_run_goes_from_mesh_to_mesh(worlds: dict[str, Any]) -> None:
    for mesh in ("tp", "fsdp-tp"):
        assert worlds[mesh].result("moves")["error"] == "StopRequested"
    assert worlds["dp-tp"]["moves"]["model_sha256"] == worlds["tp"]["stays"]["model_sha256"]


def test_a_run_of_one_process_goes_on_split(worlds: dict[str, Any]) -> None:
    assert worlds["single"].result("alone")["error"] == "StopRequested"
    moved, expected = worlds["dp-tp"], worlds["tp"]["stays"]
    assert moved["alone"]["steps"] == expected["steps"]
    assert moved["alone"]["samples"] == expected["samples"]


def test_a_task_that_does_not_say_what_lies_along_the_sequence(worlds: dict[str, Any]) -> None:
    ended = worlds["tp"].result("unplanned")
    assert ended["error"] == "ConfigError"
    assert "Points has no sequence_parallel_plan" in ended["message"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_other_strategies_take_it_over(start_trainings: Any, tmp_path: Path) -> None:
    def train(ranks: int, stop_at: int = 0, run: str = "moves", **options: Any) -> dict[str, Any]:
        options |= {"run_dir": str(tmp_path / run), "max_steps": 8, "seed": 3}
        job = {"task": "Layered", "options": options, "stop_at": stop_at}
        return dict(start_trainings({"job": job}, ranks=ranks)["job"])

    whole = train(1, run="whole")
    ways: list[tuple[int, int, dict[str, Any]]] = [
        *((2, 8, TP), (1, 4, {}), (2, 4, TP), (2, 2, {"strategy": "ddp"}), (2, 2, {"strategy": "fsdp"})),
        (4, 4, {"mesh": "fsdp=2,tp=2"}),
    ]
    for ranks, stop_at, options in ways:
        assert train(ranks, stop_at, **options)["error"] == "StopRequested"
    moved = train(1)
    assert moved["samples"] == whole["samples"]
    expected = final(tmp_path / "whole")
    for key, value in final(tmp_path / "moves").items():
        torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-4)


def final(run: Path) -> dict[str, torch.Tensor]:
    path = newest_verified(run / "checkpoints").path
    assert path is not None
    return {name: value for name, value in load(path).state["model"].items() if value.is_floating_point()}
