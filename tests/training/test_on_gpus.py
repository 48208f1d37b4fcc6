"""Training on pretended GPUs: the bits of the CPU run, by every strategy that needs no kernel of a real one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.gpu_stand_in.fixture import most_waits

EVERYTHING = {"task": "Everything", "options": {"epochs": 3}}
LAYERED = {"task": "Layered", "options": {"clip_norm": 0.5}}
CASES: dict[str, dict[str, Any]] = {
    "ddp": EVERYTHING,
    "zero1": EVERYTHING,
    "fsdp": EVERYTHING,
    "ps": EVERYTHING,
    "pp-1f1b": LAYERED,
    "pp-zero-bubble": LAYERED,
}


def job(case: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    return {**case, "options": {**case["options"], **options}}


def strategy(name: str) -> dict[str, Any]:
    if name.startswith("pp-"):
        return {"strategy": "pp", "pp_schedule": name.removeprefix("pp-")}
    return {"strategy": name, **({"ps_servers": 1} if name == "ps" else {})}


@pytest.fixture(scope="module")
def runs(start_trainings: Any, gpu_stand_in: Any) -> dict[int, Any]:
    alone: dict[str, Any] = {
        f"{name}-{device}": job(case, device=device)
        for name, case in (("everything", EVERYTHING), ("layered", LAYERED))
        for device in ("cpu", "cuda")
    }
    for device in ("cpu", "cuda"):
        alone |= {
            f"clipped-{device}": job(EVERYTHING, device=device, clip_norm=0.1),
            f"empty-{device}": job({"task": "WithEmptyParameter", "options": {}}, device=device),
        }
    alone["fp16-cuda"] = job(EVERYTHING, device="cuda", precision="fp16")
    alone["dp"] = job(LAYERED, device="cuda", strategy="dp", dp_devices=2)
    spread = {name: job(case, device="cuda", **strategy(name)) for name, case in CASES.items()}
    return {
        1: start_trainings(alone, ranks=1, env=gpu_stand_in.env()),
        2: start_trainings(spread, ranks=2, env=gpu_stand_in.env()),
    }


@pytest.mark.parametrize("name", ["everything", "layered", "clipped", "empty"])
def test_one_gpu_trains_to_the_bits_of_the_cpu(runs: dict[int, Any], name: str) -> None:
    on_cpu, on_gpu = runs[1][f"{name}-cpu"], runs[1][f"{name}-cuda"]
    assert on_gpu["model_sha256"] == on_cpu["model_sha256"], on_gpu
    assert on_gpu["metrics"] == on_cpu["metrics"]


def test_two_gpus_of_one_process_train_to_the_bits_of_the_cpu(runs: dict[int, Any]) -> None:
    assert runs[1]["dp"].get("model_sha256") == runs[1]["layered-cpu"]["model_sha256"], runs[1]["dp"]


@pytest.mark.parametrize("name", CASES)
def test_two_gpus_train_to_the_bits_of_the_cpu(runs: dict[int, Any], name: str) -> None:
    alone = runs[1]["layered-cpu" if name.startswith("pp-") else "everything-cpu"]
    assert runs[2][name].get("model_sha256") == alone["model_sha256"], runs[2][name]


def test_the_steps_run_on_the_gpus(runs: dict[int, Any], gpu_stand_in: Any) -> None:
    runs[2].results()
    for name in CASES:
        waits = gpu_stand_in.waits(Path(runs[2].run(name)))
        assert {step.rank for step in waits} == {0, 1}, name
        assert all(step.device for step in waits), name


@pytest.mark.parametrize("name", ["everything-cuda", "clipped-cuda", "fp16-cuda", *CASES])
def test_a_step_has_few_waits(runs: dict[int, Any], gpu_stand_in: Any, name: str) -> None:
    ranks = 2 if name in CASES else 1
    assert "error" not in runs[ranks][name], runs[ranks][name]
    # The first steps are computed twice, to find what is not pure.
    steps = [step for step in gpu_stand_in.waits(Path(runs[ranks].run(name))) if step.step > 2]
    assert steps
    assert max(sum(step.device.values()) for step in steps) <= 3, most_waits(steps)
