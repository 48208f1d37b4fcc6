from __future__ import annotations

import logging
import math
import os

import pytest
import torch

from paceline.runs.metric_writers import STATUS_WIDTH, RankStatus, Telemetry, imbalance
from paceline.runs.monitor import PhaseTimer


def row(step_s: float, busy: float) -> RankStatus:
    return RankStatus(step_s=step_s, busy_fraction=busy, memory_bytes=1.0, utilisation=1.0)


def test_a_row_describes_the_steps_since_the_last_sample() -> None:
    timer = PhaseTimer()
    telemetry = Telemetry("cpu", timer, first_step=40)
    timer.seconds.update(forward=2.0, backward=5.0, reduction=3.0, evaluation=100.0, other=100.0)
    status = telemetry.sample(50)
    assert status.step_s == pytest.approx(1.0)
    assert status.busy_fraction == pytest.approx(0.7)

    timer.seconds["forward"] += 4.0
    status = telemetry.sample(52)
    assert status.step_s == pytest.approx(2.0)
    assert status.busy_fraction == pytest.approx(1.0)


def test_memory_is_the_resident_set() -> None:
    status = Telemetry("cpu", PhaseTimer()).sample(1)
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert status.memory_bytes == pytest.approx(resident, rel=0.2)


def test_utilisation_tells_work_from_rest() -> None:
    telemetry = Telemetry("cpu", PhaseTimer())
    sum(i * i for i in range(300_000))
    assert telemetry.sample(1).utilisation > 0.0


def test_a_row_is_flat_floats() -> None:
    status = Telemetry("cpu", PhaseTimer()).sample(1)
    assert len(status) == STATUS_WIDTH
    assert all(isinstance(value, float) for value in status)


def test_a_gpu_that_tells_no_utilisation_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a part of a GPU (MIG): pynvml's error has no base that torch or this project knows."""
    asked = []

    class NVMLError_NotSupported(Exception):
        pass

    def utilization(device: torch.device) -> int:
        asked.append(device)
        raise NVMLError_NotSupported("Not Supported")

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1024)
    telemetry = Telemetry("cuda:1", PhaseTimer())
    with caplog.at_level(logging.INFO):
        statuses = [telemetry.sample(step) for step in (1, 2, 3)]
    assert all(math.isnan(status.utilisation) and status.memory_bytes == 1024 for status in statuses)
    assert asked == [torch.device("cuda:1")]
    assert caplog.messages == ["the GPU's utilisation is not recorded: NVMLError_NotSupported: Not Supported"]


def test_without_phases_there_is_no_busy_fraction() -> None:
    assert math.isnan(Telemetry("cpu", PhaseTimer()).sample(1).busy_fraction)


def test_imbalance_compares_work_and_not_step_times() -> None:
    # All ranks take as long as the slowest; what differs is how much of that they wait.
    found = imbalance([row(1.0, 0.5), row(1.0, 0.5), row(1.0, 0.5), row(1.0, 1.0)])
    assert found is not None
    assert found.rank == 3
    assert found.ratio == pytest.approx(1.6)


@pytest.mark.parametrize("rows", [[], [row(1.0, 1.0)], [row(1.0, math.nan), row(1.0, 1.0)], [row(0, 1), row(0, 1)]])
def test_no_imbalance_where_it_means_nothing(rows: list[RankStatus]) -> None:
    assert imbalance(rows) is None
