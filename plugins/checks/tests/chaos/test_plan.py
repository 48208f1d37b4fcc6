"""Faults are a pure function of the seed, and spread evenly."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline_checks.fault_injection import KINDS, plan_faults


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, unique=True))
    if ("leave" in kinds) != ("join" in kinds):
        kinds += ["join" if "leave" in kinds else "leave"]
    faults = draw(st.integers(1, 60))
    return {
        "kinds": tuple(kinds),
        "faults": faults,
        "seed": draw(st.integers(0, 2**63 - 1)),
        "nproc": draw(st.integers(2, 9)),
        "steps": draw(st.integers(4 * faults, 40 * faults)),
    }


@given(requests())
def test_any_plan_is_even_and_can_be_carried_out(request: dict[str, Any]) -> None:
    kinds, nproc, steps = request["kinds"], request["nproc"], request["steps"]
    plan = plan_faults(**request)
    assert plan == plan_faults(**request)
    assert [fault.number for fault in plan] == list(range(request["faults"]))

    counts = Counter(fault.kind for fault in plan)
    assert max(counts.values()) - min(counts[kind] for kind in kinds) <= 1

    assert all(a.step <= b.step for a, b in pairwise(plan))
    assert plan[0].step >= 1
    assert plan[-1].step < 0.9 * steps + 1
    # In each tenth of the run there are as many faults as in any other, but for where a tenth is cut.
    width = (0.85 - 0.04) * steps / len(plan)
    for fault in plan:
        assert abs(fault.step - (0.04 * steps + (fault.number + 0.5) * width)) <= width / 2 + 1

    workers = nproc
    for fault in plan:
        if fault.kind == "leave":
            assert fault.target is not None
            assert 1 <= fault.target < workers
        elif fault.kind == "join":
            assert fault.target is not None
            assert workers < fault.target <= nproc
        else:
            assert fault.target is None
        workers = fault.target or workers


def test_another_seed_is_another_plan() -> None:
    plans = [plan_faults(("kill", "stop"), faults=8, seed=seed, nproc=4, steps=400) for seed in range(6)]
    assert len({tuple(fault.kind for fault in plan) for plan in plans}) > 1
    assert len({tuple(fault.step for fault in plan) for plan in plans}) == 6
    assert len({tuple(fault.choice for fault in plan) for plan in plans}) == 6


def test_worlds_of_all_sizes_occur() -> None:
    plan = plan_faults(("leave", "join"), faults=40, seed=1, nproc=4, steps=400)
    assert {fault.target for fault in plan} == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kinds": ()}, "--kinds must name at least one of kill, stop"),
        ({"kinds": ("kill", "kill")}, "--kinds must name each kind once"),
        ({"kinds": ("leave",)}, "leave and join need each other"),
        ({"kinds": ("leave", "join"), "nproc": 1}, "--nproc must be at least 2, but is 1"),
        ({"faults": 101}, "at most 100 fit.*--max-steps 404"),
    ],
)
def test_what_cannot_be_is_refused(changed: dict[str, Any], message: str) -> None:
    request = {"kinds": ("kill",), "faults": 5, "seed": 0, "nproc": 2, "steps": 400} | changed
    with pytest.raises(ConfigError, match=message):
        plan_faults(**request)
