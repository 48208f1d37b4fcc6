from __future__ import annotations

import pytest

from paceline.runs import monitor
from paceline.runs.monitor import PHASES, PhaseTimer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test sets: its last entry is now."""
    now = [100.0]
    monkeypatch.setattr(monitor, "perf_counter", lambda: now[-1])
    return now


def test_a_mark_attributes_the_time_since_the_mark_before(clock: list[float]) -> None:
    timer = PhaseTimer()
    for phase, at in (("data", 101.0), ("forward", 103.0), ("data", 103.5)):
        clock.append(at)
        timer.mark(phase)
    assert timer.seconds["data"] == 1.5
    assert timer.seconds["forward"] == 2.0
    assert sum(timer.seconds.values()) == 3.5


def test_training_time_leaves_evaluation_and_other_out(clock: list[float]) -> None:
    timer = PhaseTimer()
    for phase in PHASES:
        clock.append(clock[-1] + 1.0)
        timer.mark(phase)
    assert timer.training_s() == len(PHASES) - 2


def test_the_table_has_shares_since_an_earlier_moment(clock: list[float]) -> None:
    timer = PhaseTimer()
    clock.append(150.0)
    timer.mark("other")
    before = dict(timer.seconds)
    for phase, seconds in (("forward", 3.0), ("backward", 6.0), ("reduction", 1.0)):
        clock.append(clock[-1] + seconds)
        timer.mark(phase)
    table = timer.table(since=before)
    assert table["backward"] == (6.0, 0.6)
    assert table["other"] == (0.0, 0.0)
    assert sum(row.share for row in table.values()) == pytest.approx(1.0)
    assert timer.table()["other"].seconds == 50.0


def test_a_table_without_time_has_no_shares(clock: list[float]) -> None:
    assert {row.share for row in PhaseTimer().table().values()} == {0.0}


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(KeyError, match="foward"):
        PhaseTimer().mark("foward")
