"""Events on a machine whose clock is set while a run lasts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from paceline.runs.directory import RunDirectory, without_steps
from paceline.runs.timeline import timeline
from paceline_pages.run_status import summarise

_HOURS = 7200.0


@pytest.mark.parametrize("step_s", [-_HOURS, _HOURS], ids=["back", "forward"])
def test_a_clock_that_is_set_changes_no_duration(
    step_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, now, up = RunDirectory(tmp_path / "run"), 1_700_000_000.0, 50.0
    directory.create()
    directory.manifest.write_text("")

    def record(kind: str, after_s: float, set_by: float = 0.0, **fields: int) -> None:
        nonlocal now, up
        now, up = now + after_s + set_by, up + after_s
        monkeypatch.setattr(time, "time", lambda: now)
        monkeypatch.setattr(time, "monotonic", lambda: up)
        directory.append_event(kind, **fields)

    record("created", 0.0)
    record("started", 2.0, step=0, world_size=1)
    record("checkpoint", 60.0, set_by=step_s, step=9)
    record("finished", 30.0, step=12)
    monkeypatch.undo()
    events = directory.read_events()
    assert [event["time"] - now for event in events] == [-92.0, -90.0, -30.0, 0.0]
    assert all(event.keys() <= {"time", "event", "step", "world_size"} for event in events)
    assert timeline(events).goodput.active_s == 90.0
    assert summarise(directory).seconds == 90.0


def test_events_of_other_machines_and_of_older_versions_keep_their_times() -> None:
    events = [
        {"event": "created", "time": 100.0},
        {"event": "started", "time": 110.0, "up": 5.0, "boot": "a"},
        {"event": "joined", "time": 95.0, "up": 900.0, "boot": "b"},
        {"event": "finished", "time": 130.0, "up": 920.5, "boot": "b"},
    ]
    assert [event["time"] for event in without_steps(events)] == [100.0, 110.0, 109.5, 130.0]
