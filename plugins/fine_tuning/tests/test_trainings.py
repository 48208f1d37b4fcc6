"""Runs that begin with another run's weights: the same bits on any ranks, and under every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.states import newest

from paceline.core.config import config_from_mapping
from paceline.runs.directory import RunDirectory
from paceline_fine_tuning.adapters import merge_adapters
from paceline_fine_tuning.options import FineTuningOptions
from paceline_fine_tuning.pretrained import PretrainedWeights

pytestmark = pytest.mark.matrix

_CONV: dict[str, Any] = {"val_fraction": 0.2, "max_steps": 5}
PARENTS: dict[str, dict[str, Any]] = {
    "conv": {"task": "Everything", "options": _CONV},
    "layers": {"task": "Layered", "fields": {"num_test": 20}, "options": {"max_steps": 3}},
    "text": {"task": "Text", "options": {"max_steps": 2}},
}
_FROZEN = {"freeze": ["1", "2.*"], "lr_scale": ["6=0.5"], "reset_head": True}
CHILDREN: dict[str, dict[str, Any]] = {
    "whole": {"task": "Everything", "options": {**_CONV, "init_from": "conv@last"}},
    "frozen": {
        "task": "Everything",
        "options": {**_CONV, **_FROZEN, "init_from": "conv", "ema": 0.9, "clip_norm": 0.5, "sdc_check_every": 2},
    },
    "stopped": {"task": "Layered", "stop_at": 6, "options": {"init_from": "layers", "freeze": ["0"]}},
    "again": {"task": "Layered", "options": {"run_dir": "stopped"}},
    "straight": {"task": "Layered", "options": {"init_from": "layers", "freeze": ["0"]}},
}
_LAYERS = {"max_steps": 3, "init_from": "layers", "freeze": ["0"], "lr_scale": ["2=0.1"]}
_TEXT = {"max_steps": 2, "init_from": "text", "lora": "rank=2,target=query|value"}
STRATEGIES = ("auto", "pp")
FURTHER = ("fsdp", "zero1", "ps")


def _under(strategy: str) -> dict[str, dict[str, Any]]:
    fields = {"num_test": 20}
    return {
        f"layers-{strategy}": {
            "task": "Layered",
            "fields": fields,
            "options": {**_LAYERS, "strategy": strategy},
        },
        f"text-{strategy}": {"task": "Text", "options": {**_TEXT, "strategy": strategy}},
    }


@pytest.fixture(scope="module")
def on_one(start_trainings: Any) -> Any:
    return start_trainings({**PARENTS, **CHILDREN, **_under("auto"), **_under("dp")})


@pytest.fixture(scope="module")
def on_two(start_trainings: Any, on_one: Any) -> Any:
    jobs = {**PARENTS, **{name: CHILDREN[name] for name in ("whole", "frozen")}}
    for strategy in (*STRATEGIES, "tp"):
        jobs.update(_under(strategy))
    return start_trainings(jobs, ranks=2)


@pytest.fixture(scope="module")
def further(start_trainings: Any) -> Any:
    """The strategies of which each rank updates a part."""
    jobs = {name: PARENTS[name] for name in ("layers", "text")}
    for strategy in FURTHER:
        jobs.update(_under(strategy))
    return start_trainings(jobs, ranks=2)


@pytest.mark.parametrize("name", ["whole", "frozen"])
def test_two_ranks_make_the_same_model_as_one(on_one: Any, on_two: Any, name: str) -> None:
    assert on_one[name]["model_sha256"] == on_two[name]["model_sha256"]
    assert on_one[name]["drift"] == on_two[name]["drift"]


@pytest.mark.parametrize("job", ["layers", "text"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_makes_the_same_model_as_one_process(on_one: Any, on_two: Any, job: str, strategy: str) -> None:
    expected = on_one[f"{job}-auto"]["model_sha256"]
    assert expected != on_one[job]["model_sha256"]
    assert on_two[f"{job}-{strategy}"]["model_sha256"] == expected


@pytest.mark.slow
@pytest.mark.parametrize("job", ["layers", "text"])
@pytest.mark.parametrize("strategy", FURTHER)
def test_split_updates_make_the_same_model(on_one: Any, further: Any, job: str, strategy: str) -> None:
    assert further[f"{job}-{strategy}"]["model_sha256"] == on_one[f"{job}-auto"]["model_sha256"]


@pytest.mark.parametrize("job", ["layers", "text"])
def test_threads_make_the_same_model(on_one: Any, job: str) -> None:
    assert on_one[f"{job}-dp"]["model_sha256"] == on_one[f"{job}-auto"]["model_sha256"]


@pytest.mark.parametrize("job", ["layers", "text"])
def test_split_layers_make_the_model_within_rounding(on_one: Any, on_two: Any, job: str) -> None:
    on_one.results()
    on_two.results()
    expected = newest(on_one.run(f"{job}-auto"))["model"]
    found = newest(on_two.run(f"{job}-tp"))["model"]
    torch.testing.assert_close(found, expected)


def test_a_run_stopped_in_the_middle_ends_as_one_that_was_not(on_one: Any) -> None:
    assert on_one["stopped"]["error"] == "StopRequested"
    assert on_one["again"]["model_sha256"] == on_one["straight"]["model_sha256"]


def _models(of: Any, parent: str, child: str) -> tuple[dict[str, Any], dict[str, Any]]:
    of.results()
    return newest(of.run(parent))["model"], newest(of.run(child))["model"]


def test_what_is_frozen_stays_bit_for_bit_with_its_statistics(on_one: Any) -> None:
    before, after = _models(on_one, "conv", "frozen")
    frozen = [name for name in before if name.startswith(("1.", "2."))]
    assert {"1.weight", "2.running_mean", "2.num_batches_tracked"} <= set(frozen)
    assert all(torch.equal(before[name], after[name]) for name in frozen)
    assert not torch.equal(before["6.weight"], after["6.weight"])
    # Where nothing is frozen, statistics move on.
    _, whole = _models(on_one, "conv", "whole")
    assert not torch.equal(before["2.running_mean"], whole["2.running_mean"])


def test_only_adapters_are_trained_and_merging_them_gives_the_tasks_own_model(on_one: Any) -> None:
    before, after = _models(on_one, "text", "text-auto")
    trained = {name for name in after if ".lora_" in name}
    assert len(trained) == 4
    kept = {name.replace(".base_layer.", "."): tensor for name, tensor in after.items() if name not in trained}
    assert kept.keys() == before.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in kept.items())
    adapters = config_from_mapping({"lora": _TEXT["lora"]}, "here")[FineTuningOptions].lora
    assert adapters is not None
    plain = merge_adapters(after, adapters)
    changed = {name for name in plain if not torch.equal(plain[name], before[name])}
    assert changed == {f"blocks.0.attention.{layer}.weight" for layer in ("query", "value")}


def test_the_parent_is_recorded_and_copied(on_one: Any) -> None:
    results = on_one.results()
    manifest = RunDirectory(on_one.run("whole")).read_manifest()
    parent = RunDirectory(on_one.run("conv")).read_manifest()
    assert manifest["parent"]["run"] == parent["id"]
    assert manifest["parent"]["step"] == 5
    assert manifest["parent"]["model_sha256"] == results["conv"]["model_sha256"]
    copy = PretrainedWeights.load_copy(RunDirectory(on_one.run("whole"))).weights
    assert all(torch.equal(copy[name], value) for name, value in newest(on_one.run("conv"))["model"].items())


def test_drift_is_the_distance_from_the_parent(on_one: Any) -> None:
    drift = on_one["layers-auto"]["drift"]
    before, after = _models(on_one, "layers", "layers-auto")

    def norm(names: list[str], *, change: bool) -> float:
        values = [after[name] - before[name] if change else before[name] for name in names]
        return float(torch.cat([value.double().flatten() for value in values]).norm())

    everything = list(before)
    expected = norm(everything, change=True) / norm(everything, change=False)
    assert drift["relative_l2"] == pytest.approx(expected)
    of_one = ["2.weight", "2.bias"]
    assert drift["modules"]["2"] == pytest.approx(norm(of_one, change=True) / norm(of_one, change=False))
    assert drift["modules"]["0"] == 0.0
    assert on_one["frozen"]["drift"]["new"] == ["6.bias", "6.weight"]
    assert "6" not in on_one["frozen"]["drift"]["modules"]
    assert "drift" not in on_one["conv"]


def test_a_lower_rate_moves_less(on_one: Any, tmp_path: Path) -> None:
    """Adam's steps are as long as its rate, whatever the gradient."""
    modules = on_one["layers-auto"]["drift"]["modules"]
    whole = on_one["straight"]["drift"]["modules"]
    assert modules["2"] < 0.5 * whole["2"]
