"""What the report says, from histories that are written down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.core.stats import percentile
from paceline.runs.timeline import timeline
from paceline_checks.chaos import ChaosReport, capacity, kind_reports


def test_percentiles_are_by_nearest_rank() -> None:
    values = [float(n) for n in range(1, 101)]
    assert percentile(values, 50) == 50.0
    assert percentile(values, 99) == 99.0
    assert percentile([3.0], 99) == 3.0
    assert percentile([], 50) is None


def test_kinds_are_counted_apart() -> None:
    rows = kind_reports(["kill", "stop", "kill"], [("kill", 0.2), ("stop", None)])
    assert [(r.kind, r.planned, r.injected, r.recovered, r.p50_s) for r in rows] == [
        ("kill", 2, 1, 1, 0.2),
        ("stop", 1, 1, 0, None),
    ]


def event(time: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"time": time, "event": kind, **fields}


CLEAN = timeline([event(0, "started", step=0, world_size=2, generation=0), event(10, "finished")])


def test_lost_workers_are_no_lost_time_but_the_recovery_is() -> None:
    events = [
        event(0, "started", step=0, world_size=2, generation=0),
        # From 4 on one of two works; the next view trains 1 s later.
        event(4, "fault", local_index=1, how="was killed by SIGKILL", step=3),
        event(4.5, "group", generation=1, members=[0], seconds=0.5, step=3),
        event(5, "joined", generation=1, seconds=1.0, step=3),
        event(17, "finished"),
    ]
    found = capacity(CLEAN, timeline(events), nproc=2, processors=2, faults=1)
    assert found.needed_s == 10
    assert found.available_s == 4 + 13 / 2
    assert found.lost_s_per_fault == pytest.approx(0.5)
    # On one processor, one worker does as much as two.
    assert capacity(CLEAN, timeline(events), nproc=2, processors=1, faults=1).available_s == 17


def test_waiting_for_all_on_demand_is_nobodys_time() -> None:
    events = [
        event(0, "started", step=0, world_size=2, generation=0),
        event(3, "gather", step=3),
        event(6, "group", generation=1, members=[0, 1], seconds=2.0, step=3),
        event(7, "joined", generation=1, seconds=3.0, step=3),
        event(13, "finished"),
    ]
    assert capacity(CLEAN, timeline(events), nproc=2, processors=2, faults=1).available_s == 10


GOOD = ChaosReport(
    task="t",
    clean_run="a",
    chaos_run="b",
    nproc=2,
    seed=0,
    exit_code=0,
    steps=10,
    kinds=kind_reports(["kill"], [("kill", 0.2)]),
    repeated_steps=3,
    samples_lost=0,
    samples_duplicated=0,
    audit_clean=True,
    audit="Clean.",
    leaks=(),
    capacity=None,
    clean_sha256="x",
    chaos_sha256="x",
)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"exit_code": 1, "chaos_sha256": None}, "ended with exit code 1"),
        ({"kinds": kind_reports(["kill"], [("kill", None)])}, "1 of 1 faults were not recovered from"),
        ({"kinds": kind_reports(["kill"], [])}, "1 of 1 faults were not injected"),
        ({"audit_clean": False, "audit": "Not clean: x"}, "audit: Not clean: x"),
        ({"leaks": ("/dev/shm/sem.a",)}, "left behind after the run: /dev/shm/sem.a"),
        ({"chaos_sha256": "y"}, "the final model differs from that of the run without faults"),
    ],
)
def test_only_a_run_without_any_loss_is_good(changed: dict[str, Any], problem: str) -> None:
    assert GOOD.ok
    assert GOOD.to_json()["ok"] is True
    report = replace(GOOD, **changed)
    assert not report.ok
    assert len(report.problems) == 1
    assert problem in report.problems[0]
