"""Every strategy once, on a small model: what it makes is what one process makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.training.states import newest

from paceline.core.built_in import BUILT_IN

STEPS = {"max_steps": 3}
ON_ONE = ("single", "dp")
ON_TWO = ("ddp", "zero1", "fsdp", "pp", "ps", "tp", "hogwild", "deepspeed")
SAME_BITS = ("dp", "ddp", "zero1", "fsdp", "pp", "ps")


def _jobs(strategies: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    return {name: {"task": "Layered", "options": {**STEPS, "strategy": name}} for name in strategies}


@pytest.fixture(scope="module")
def on_one(start_trainings: Any) -> Any:
    return start_trainings(_jobs(ON_ONE))


@pytest.fixture(scope="module")
def on_two(start_trainings: Any) -> Any:
    return start_trainings(_jobs(ON_TWO), ranks=2)


def test_every_strategy_is_here() -> None:
    # Horovod is a system of its own, and auto one of the others.
    names = ("auto", *BUILT_IN["paceline.strategies"])
    assert {*ON_ONE, *ON_TWO} == {*names} - {"auto", "horovod"}


@pytest.mark.parametrize("strategy", SAME_BITS)
def test_the_bits_are_those_of_one_process(on_one: Any, on_two: Any, strategy: str) -> None:
    trained = on_one if strategy in ON_ONE else on_two
    assert trained[strategy]["model_sha256"] == on_one["single"]["model_sha256"]


@pytest.mark.parametrize("strategy", ["tp", "deepspeed"])
def test_the_model_is_that_of_one_process_within_rounding(on_one: Any, on_two: Any, strategy: str) -> None:
    on_one.results()
    assert on_two[strategy]["steps"] == 3
    found, expected = newest(on_two.run(strategy))["model"], newest(on_one.run("single"))["model"]
    torch.testing.assert_close(found, expected)


def test_hogwild_computes_every_step(on_one: Any, on_two: Any) -> None:
    assert (on_two["hogwild"]["steps"], on_two["hogwild"]["samples"]) == (3, on_one["single"]["samples"])
