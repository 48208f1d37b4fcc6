"""The order of messages between stages on NCCL: every schedule, on a model of gloo and NCCL."""

from __future__ import annotations

from graphlib import CycleError
from typing import cast

import pytest
from tests.parallel.distributed.stage_cluster import Cluster, Ranks, check

from paceline.parallel.pipeline.schedules import CHUNKS, Name, build_schedules

TRAINING = [cast(Name, name) for name in CHUNKS if name != "pipedream"]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", TRAINING)
def test_no_schedule_deadlocks_on_nccl(cluster: Cluster, name: Name, ranks: int) -> None:
    together = Ranks(cluster, ranks, ranks * CHUNKS[name])

    def work(rank: int) -> None:
        for microbatches in (ranks, 1, 2 * ranks + 1, 0, 7):
            together.step(rank, build_schedules(name, ranks, microbatches)[rank])
            together.evaluate(rank)

    cluster.run(ranks, work)
    check(cluster)


def test_one_communicator_for_both_directions_deadlocks(cluster: Cluster) -> None:
    together = Ranks(cluster, 2, 2, groups=("both", "both"))
    cluster.run(2, lambda rank: together.step(rank, build_schedules("1f1b", 2, 4)[rank]))
    with pytest.raises(CycleError):
        check(cluster)
