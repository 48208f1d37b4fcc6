"""When the agent asks, whom it has killed, and when it lets them be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from paceline.elastic import hang as hang_watch
from paceline.elastic.group_planner import WorkerGroup
from paceline.elastic.hang import Hang, HangDetector
from paceline.elastic.worker_channel import StallSnapshot
from paceline.runs.directory import RunDirectory


def snapshot(rank: int, *, inside: bool, generation: int = 4, still_s: float = 31.0) -> StallSnapshot:
    return StallSnapshot(
        generation=generation,
        rank=rank,
        step=8,
        stage="step",
        phase="forward",
        exchange="all-reduce",
        collective_seq=3 if inside else 2,
        left=2,
        stage_s=32.0,
        overdue=True,
        still_s=still_s,
        where="`f` (a.py:1)",
        stacks="the stacks",
    )


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr(hang_watch.time, "monotonic", lambda: clock[0])
    return clock


@pytest.fixture
def watch(tmp_path: Path, now: list[float]) -> HangDetector:
    watching = HangDetector(RunDirectory(tmp_path), lambda work: work())
    watching.forms(WorkerGroup(4, (7, 9), 2), ["a", "b"])
    return watching


def events(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in e.items() if k != "time"} for e in RunDirectory(path).read_events()]


def test_nobody_is_asked_while_nobody_is_overdue(watch: HangDetector) -> None:
    watch.beats(7, overdue=False)
    watch.beats(5, overdue=True)  # no member
    assert watch.deadline == math.inf
    assert watch.poll() == ()


def test_who_holds_the_others_up_is_to_be_killed(watch: HangDetector, tmp_path: Path) -> None:
    watch.beats(9, overdue=True)
    assert watch.deadline == 100.0
    assert watch.poll() == (7, 9)
    assert watch.poll() == ()
    watch.answers(7, snapshot(0, inside=False))
    watch.answers(9, snapshot(1, inside=True, generation=3))  # of an earlier group
    assert watch.poll() == ()
    watch.answers(9, snapshot(1, inside=True))
    hang = watch.poll()
    reason = "has not entered all-reduce 3 of step 9: it is in `f` (a.py:1)"
    (event,) = events(tmp_path)
    folder = tmp_path / event.pop("stacks")
    sentence = f"rank 0 on node a {reason}; rank 1 on node b waits for it"
    assert hang == Hang(f"{sentence}. All stacks: {folder}", {7: reason})
    assert event == {
        "event": "hang",
        "step": 8,
        "root_causes": [0],
        "blocked": [1],
        "sentence": sentence,
    }
    assert (folder / "rank-0.txt").read_text().endswith("the stacks")
    # It is said once, however long the worker takes to end.
    watch.beats(9, overdue=True)
    assert watch.poll() == ()


def test_who_does_not_answer_is_to_be_killed(watch: HangDetector, now: list[float]) -> None:
    watch.beats(7, overdue=True)
    watch.poll()
    watch.answers(7, snapshot(0, inside=True))
    now[0] += 4.9
    assert watch.poll() == ()
    now[0] += 0.2
    hang = watch.poll()
    assert isinstance(hang, Hang)
    assert hang.root_causes == {9: "does not answer"}


def test_who_moves_is_slow_and_that_is_said_once_in_a_while(
    watch: HangDetector, now: list[float], tmp_path: Path
) -> None:
    for _ in range(3):
        watch.beats(9, overdue=True)
        assert watch.deadline <= now[0] + 2
        now[0] = watch.deadline
        assert watch.poll() == (7, 9)
        watch.answers(7, snapshot(0, inside=False, still_s=0.1))
        watch.answers(9, snapshot(1, inside=True))
        assert watch.poll() == ()
    assert [(event["event"], event["ranks"]) for event in events(tmp_path)] == [("slow", [0])]


def test_who_has_finished_is_not_waited_for(watch: HangDetector) -> None:
    watch.finishes(7)
    watch.beats(9, overdue=True)
    watch.poll()
    watch.answers(9, snapshot(1, inside=True))
    hang = watch.poll()
    assert isinstance(hang, Hang)
    assert hang.root_causes == {}
    assert "rank 0 on node a has finished" in hang.sentence


def test_a_group_that_breaks_is_judged_no_more(watch: HangDetector) -> None:
    watch.beats(9, overdue=True)
    watch.poll()
    watch.forget()
    watch.answers(9, snapshot(1, inside=True))
    assert watch.deadline == math.inf
    assert watch.poll() == ()
