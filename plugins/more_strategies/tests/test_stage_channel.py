"""The order of messages between stages on NCCL: steps that overlap, on a model of gloo and NCCL."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.parallel.distributed.stage_cluster import BOTH, Cluster, Ranks, check

from paceline_more_strategies.pipedream import begins, forwards_ahead, step_actions


def pipedream(together: Ranks, sizes: list[int]) -> Callable[[int], None]:
    """Steps of these numbers of micro-batches, which overlap."""

    def work(rank: int) -> None:
        ahead, first, begun = forwards_ahead(rank, together.ranks), 0, 0
        for present, following in zip(sizes, [*sizes[1:], 0], strict=True):
            for action in step_actions(ahead, present, begins(ahead, begun), following):
                together.act(rank, action.kind, rank, (first + action.position) % 8)
            first, begun = first + present, following
        together.channels[rank].wait()

    return work


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pipedream_does_not_deadlock_on_nccl(cluster: Cluster, ranks: int) -> None:
    cluster.run(ranks, pipedream(Ranks(cluster, ranks, ranks), [4, 4, 1, 2, 5, 4]))
    check(cluster)


@pytest.mark.parametrize("groups", [(), BOTH])
def test_steps_that_overlap_reuse_the_memory_of_messages(cluster: Cluster, groups: tuple[str, ...]) -> None:
    together = Ranks(cluster, 2, 2, groups)
    cluster.run(2, pipedream(together, [10] * 20))
    assert all(20 < len(frames) < 150 for frames in cluster.frames.values()), cluster.frames
