"""How long a stage may take, and what an activity tells of the exchanges."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest

from paceline.runs import rank_progress as module
from paceline.runs.rank_progress import FLOOR_S, ProgressTracker, Stage


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    return now


def take(activity: ProgressTracker, clock: list[float], stage: Stage, seconds: float) -> None:
    activity.begin(stage)
    clock[0] += seconds
    activity.end()


def test_limit_is_learned_from_stages_of_the_same_kind(clock: list[float]) -> None:
    activity = ProgressTracker()
    for seconds in (8.0, 9.0, 100.0):
        take(activity, clock, "step", seconds)
    take(activity, clock, "evaluation", 1.0)
    assert activity.stage == "step"
    assert activity.limit_s == 90.0
    activity.begin("evaluation")
    assert activity.limit_s == FLOOR_S["evaluation"]
    clock[0] += FLOOR_S["evaluation"]
    assert not activity.overdue
    clock[0] += 1
    assert activity.overdue


def test_short_steps_have_the_floor_as_their_limit(clock: list[float]) -> None:
    activity = ProgressTracker()
    take(activity, clock, "first step", 200.0)
    take(activity, clock, "step", 0.01)
    assert activity.limit_s == FLOOR_S["step"]


def test_second_step_may_take_as_long_as_the_first_lets_expect(clock: list[float]) -> None:
    activity = ProgressTracker()
    take(activity, clock, "first step", 20.0)
    assert (activity.stage, activity.limit_s) == ("step", 200.0)


def test_time_in_another_stage_is_not_the_steps(clock: list[float]) -> None:
    activity = ProgressTracker()
    activity.begin("step")
    clock[0] += 20.0
    activity.move("optimizer")
    with suppress(OSError), activity.in_stage("checkpoint"):
        clock[0] += 40.0
        assert (activity.stage, activity.overdue) == ("checkpoint", False)
        raise OSError
    assert (activity.stage, activity.phase) == ("step", "optimizer")
    clock[0] += 5.0
    assert not activity.overdue
    clock[0] += 6.0
    assert activity.overdue


def test_limit_that_was_given_is_that_of_a_step(clock: list[float]) -> None:
    activity = ProgressTracker(2.5)
    for _ in range(3):
        take(activity, clock, "step", 60.0)
    assert activity.limit_s == 2.5
    activity.begin("first step")
    assert activity.limit_s == FLOOR_S["first step"]
    activity.limit_steps_to(7200.0)
    assert activity.limit_s == 7200.0


@pytest.mark.parametrize("stage", list(FLOOR_S))
def test_never_overdue(clock: list[float], stage: Stage) -> None:
    activity = ProgressTracker(math.inf)
    activity.begin(stage)
    clock[0] += 1e6
    assert not activity.overdue


def test_nobody_waits_for_a_rank_without_a_world(clock: list[float]) -> None:
    activity = ProgressTracker()
    activity.wait()
    clock[0] += 1e6
    assert not activity.overdue


def test_exchanges_are_numbered_anew_in_each_world() -> None:
    activity = ProgressTracker()
    activity.begin_collective("broadcast")
    assert (activity.collective_seq, activity.left) == (1, 0)
    activity.end_collective()
    activity.begin_collective("all-reduce")
    assert (activity.exchange, activity.collective_seq, activity.left) == ("all-reduce", 2, 1)
    activity.join()
    assert (activity.exchange, activity.collective_seq, activity.left) == ("", 0, 0)
