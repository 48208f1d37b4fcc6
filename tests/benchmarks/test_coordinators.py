"""``python -m benchmarks coordinators``: one round, on a real cluster of etcd."""

from __future__ import annotations

import psutil
import pytest
from tests.lab.etcd import why_not

from benchmarks.coordinators import bench_coordinators


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(400)
def test_one_round() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    lines: list[str] = []
    result = bench_coordinators(rounds=1, progress=lines.append)
    losses = result.document["losses"]
    assert {(loss["loss"], loss["coordinator"]) for loss in losses} == {
        (f"the {node}", coordinator)
        for node in ("other node is killed", "leading node is killed", "leading node freezes")
        for coordinator in ("embedded", "etcd")
    }
    assert all(seconds > 0 for loss in losses for seconds in loss["seconds"])
    assert len(lines) == 6
    assert not psutil.Process().children(recursive=True)
