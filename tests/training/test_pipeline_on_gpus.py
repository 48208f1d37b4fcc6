"""Pipelines on pretended GPUs: the bits of CPUs, by messages from GPU to GPU, without waits between micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

CLIPPED = {"task": "Layered", "options": {"clip_norm": 0.05, "purity": "off"}}
DEEP = {"task": "Deep"}
EVERYTHING = {"task": "Everything", "options": {"val_fraction": 0.2, "max_steps": 9}}
PIPEDREAM = {"task": "Layered", "options": {"pp_schedule": "pipedream"}}
INTERLEAVED = {"pp_schedule": "interleaved"}
ON_TWO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clipped": (CLIPPED, {}),
    "clipped-interleaved": (CLIPPED, INTERLEAVED),
    "deep-interleaved": (DEEP, INTERLEAVED),
    "everything-gpipe": (EVERYTHING, {"pp_schedule": "gpipe"}),
    "pipedream": (PIPEDREAM, {}),
    "clipped-gloo": (CLIPPED, {"backend": "gloo"}),
}
ON_FOUR: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clipped-copies": (CLIPPED, {"mesh": "pp=2,dp=2", "pp_schedule": "zero-bubble"}),
    "deep": (DEEP, {"pp_split": "equal"}),
}


def job(case: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    return {**case, "options": {**case.get("options", {}), **options}}


def on_gpus(cases: Mapping[str, tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    return {
        name: job(case, device="cuda", **({} if "mesh" in options else {"strategy": "pp"}), **options)
        for name, (case, options) in cases.items()
    }


@pytest.fixture(scope="module")
def alone(start_trainings: Any) -> Any:
    """One process on a CPU; two for PipeDream, whose bits depend on the number of stages."""
    return start_trainings({"clipped": CLIPPED, "deep": DEEP, "everything": EVERYTHING})


@pytest.fixture(scope="module")
def pipedream(start_trainings: Any) -> Any:
    return start_trainings({"pipedream": job(PIPEDREAM, strategy="pp")}, ranks=2)


@pytest.fixture(scope="module")
def two(start_trainings: Any, gpu_stand_in: Any) -> Any:
    return start_trainings(on_gpus(ON_TWO), ranks=2, env=gpu_stand_in.env())


@pytest.fixture(scope="module")
def four(start_trainings: Any, gpu_stand_in: Any) -> Any:
    return start_trainings(on_gpus(ON_FOUR), ranks=4, env=gpu_stand_in.env(4))


def same(on_gpu: dict[str, Any], on_cpu: dict[str, Any]) -> None:
    assert "error" not in on_gpu, on_gpu
    assert on_gpu["device"] == "cuda"
    for name in ("model_sha256", "metrics", "steps", "best_step"):
        assert on_gpu[name] == on_cpu[name], name


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", [name for name in ON_TWO if name != "pipedream"])
def test_two_gpus_train_to_the_bits_of_the_cpu(alone: Any, two: Any, name: str) -> None:
    same(two[name], alone[name.partition("-")[0]])


@pytest.mark.matrix
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ON_FOUR)
def test_four_gpus_train_to_the_bits_of_the_cpu(alone: Any, four: Any, name: str) -> None:
    same(four[name], alone[name.partition("-")[0]])


def test_pipedream_has_the_bits_of_the_cpu(pipedream: Any, two: Any) -> None:
    same(two["pipedream"], pipedream["pipedream"])


@pytest.mark.parametrize("name", ["clipped", "clipped-interleaved", "pipedream"])
def test_a_step_of_a_pipeline_waits_three_times_for_its_gpu_at_most(two: Any, gpu_stand_in: Any, name: str) -> None:
    two.results()
    steps = gpu_stand_in.waits(Path(two.run(name)))
    assert {step.rank for step in steps} == {0, 1}
    for step in steps:
        is_recorded = name != "pipedream" and step.step > 0 and step.step & (step.step + 1) == 0
        waits = {cause: count for cause, count in step.device.items() if cause.startswith("parallel/")}
        assert sum(waits.values()) <= 3 + is_recorded, waits


def test_gloo_waits_once_for_each_message(two: Any, gpu_stand_in: Any) -> None:
    two.results()
    for step in gpu_stand_in.waits(Path(two.run("clipped-gloo"))):
        waits = [count for cause, count in step.device.items() if cause.startswith("parallel/pipeline/channel.py")]
        assert sum(waits) == 4, step  # a message for each of the micro-batches
