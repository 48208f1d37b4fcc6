"""Timelines and goodput of recorded events."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.runs.timeline import REPEATED, WorldChange, describe, timeline


def event(time: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"time": 1000.0 + time, "event": kind, **fields}


START = [
    event(0, "created", task="mnist"),
    event(0, "started", generation=0, world_size=3, microbatches=6, step=0, total_steps=100),
]
KILLED = [
    event(10, "fault", local_index=1, pid=7, how="was killed by SIGKILL", step=40),
    event(10.1, "group", generation=1, members=[0, 2], world_size=2, why="lost", step=41, seconds=0.2),
    event(10.2, "joined", generation=1, step=41, seconds=0.3),
]
JOINED = [
    event(12, "group", generation=2, members=[0, 2, 1], world_size=3, why="asked", step=50, seconds=0.1),
    event(12.4, "joined", generation=2, step=50, seconds=0.5),
]
END = [event(20, "checkpoint", step=100, version=100), event(20, "finished")]


def test_a_quiet_run_loses_nothing() -> None:
    read = timeline([*START, *END])
    assert read.goodput.share == 1.0
    assert read.goodput.active_s == 20
    assert read.interruptions == ()
    assert [(e.seconds, e.step, e.text) for e in read.entries] == [
        (0.0, None, "created: mnist"),
        (0.0, 0, "training begins on 3 workers"),
        (20.0, 100, "checkpoint saved"),
        (20.0, None, "finished"),
    ]


def test_a_loss_lasts_from_the_last_sign_until_all_train() -> None:
    read = timeline([*START, *KILLED, *JOINED, *END])
    killed, joined = read.interruptions
    assert (killed.cause, killed.generation) == ("killed", 1)
    assert (killed.begin, killed.end) == (pytest.approx(9.9), pytest.approx(10.2))
    assert joined.cause == "joining"
    assert joined.seconds == pytest.approx(0.5)
    assert read.goodput.lost_s == {"killed": 0.3, "joining": 0.5}
    assert read.goodput.share == pytest.approx(19.2 / 20)
    assert [world.world_size for world in read.worlds] == [3, 2, 3]


def test_silence_counts_from_when_it_was_last_heard() -> None:
    silent = [
        event(12, "fault", local_index=2, pid=8, how="did not answer within 2 s", step=40),
        event(12, "group", generation=1, members=[0, 1], world_size=2, why="", step=40, seconds=2.0),
        event(12.1, "joined", generation=1, step=40, seconds=2.1),
    ]
    read = timeline([*START, *silent, *END])
    assert read.goodput.lost_s == {"silent": 2.1}
    hung = [{**e, "how": "has not entered all-reduce 9 of step 41"} if "how" in e else e for e in silent]
    assert timeline([*START, *hung, *END]).goodput.lost_s == {"hung": 2.1}


def test_with_a_machine_all_its_workers_are_lost_at_once() -> None:
    lost = [
        event(10, "node lost", node="b", why="it was silent for 2 s"),
        event(10.5, "group", generation=1, members=[0, 1], computing=1, nodes=1, seconds=2.5, step=40),
        event(11, "joined", generation=1, step=40, seconds=3.0),
    ]
    read = timeline([*START, *lost, *END])
    assert read.goodput.lost_s == {"machine lost": 3.0}
    assert [world.world_size for world in read.worlds] == [3, 1]  # a spare computes nothing


def test_a_view_that_breaks_while_it_forms_is_one_interruption() -> None:
    again = [
        event(10, "fault", local_index=1, pid=7, how="was killed by SIGKILL", step=40),
        event(10.1, "group", generation=1, members=[0, 2], world_size=2, why="lost", step=41, seconds=0.1),
        event(10.2, "fault", local_index=2, pid=8, how="was killed by SIGKILL", step=41),
        event(10.3, "group", generation=2, members=[0], world_size=1, why="lost", step=41, seconds=0.3),
        event(10.5, "joined", generation=2, step=41, seconds=0.5),
    ]
    read = timeline([*START, *again, *END])
    assert [(i.cause, i.generation) for i in read.interruptions] == [("killed", 2)]
    assert read.goodput.lost_s == {"killed": 0.5}


def test_a_worker_that_is_in_no_view_interrupts_nobody() -> None:
    starting = event(11, "fault", local_index=1, pid=9, how="was killed by SIGKILL", step=-1)
    read = timeline([*START, *KILLED, starting, *JOINED, *END])
    assert [i.cause for i in read.interruptions] == ["killed", "joining"]


def test_where_all_are_lost_steps_are_repeated() -> None:
    lost = [
        *(event(10, "fault", local_index=index, pid=index, how="was killed by SIGKILL", step=50) for index in range(3)),
        event(14, "group", generation=1, members=[0, 1, 2], world_size=3, why="", step=-1, seconds=4.0),
        event(14.5, "started", generation=1, world_size=3, microbatches=6, step=25, total_steps=100),
        event(15, "joined", generation=1, step=25, seconds=5.0),
    ]
    read = timeline([*START, *lost, *END])
    assert read.goodput.interruptions == {"restart": 1}
    assert read.goodput.repeated_steps == 25
    # 15 s of training made 125 steps, of which 100 count.
    assert read.goodput.lost_s == {"restart": 5.0, REPEATED: 3.0}
    assert read.goodput.good_s == pytest.approx(12.0)
    assert timeline([*START, *lost, *END], repeated_steps=30).goodput.repeated_steps == 30


def test_time_between_stop_and_resume_is_nobodys() -> None:
    stopped = [event(8, "checkpoint", step=40, version=40), event(8, "stopped", cause="SIGTERM", step=40)]
    resumed = event(500, "started", generation=1, world_size=2, microbatches=6, step=40, total_steps=100)
    read = timeline([*START, *stopped, resumed, event(512, "finished")])
    assert read.goodput.active_s == 20
    assert read.goodput.share == 1.0
    assert read.worlds == (WorldChange(0.0, 3), WorldChange(500.0, 2))


def test_a_crash_ends_with_its_last_event_and_its_steps_are_repeated() -> None:
    resumed = event(500, "started", generation=1, world_size=3, microbatches=6, step=25, total_steps=100)
    crashed = event(8, "fault", local_index=0, pid=1, how="exited with status 1", step=60)
    read = timeline([*START, event(5, "checkpoint", step=25, version=25), crashed, resumed, event(512, "finished")])
    assert read.goodput.active_s == 8 + 12
    assert read.goodput.repeated_steps == 35


def test_a_run_at_work_is_read_up_to_now() -> None:
    assert timeline(START, until=1030.0).goodput.active_s == 30
    assert timeline([*START, *END], until=1030.0).goodput.active_s == 20
    assert timeline([]).goodput.share is None


def test_events_are_told_in_words_and_unknown_ones_as_they_are() -> None:
    assert describe({"event": "hang", "sentence": "rank 3 waits", "root_causes": [3]}) == "hang: rank 3 waits"
    assert describe({"event": "failed", "rank": 2, "error": "no"}) == "failed in rank 2: no"
    assert describe({"event": "stopped", "cause": "SIGUSR1"}) == "stopped by SIGUSR1; everything is saved"
    assert "--walltime was over" in describe({"event": "stopped", "cause": "walltime"})
    assert describe({"event": "scale", "before": 4, "target": 1}) == "asked to go from 4 to 1 worker"
    assert describe({"event": "scale", "nodes": 1, "step": 3}) == "asked to go to 1 machine"
    assert describe({"event": "shares", "before": [3, 3], "shares": [4, 2]}) == (
        "micro-batches are shared 4 : 2, no longer 3 : 3"
    )
    assert describe({"time": 1.0, "event": "eclipse", "of": "the sun", "step": 4}) == "eclipse: of the sun"
