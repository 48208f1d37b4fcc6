"""Shared memory between the ranks of a host: lost peers, nothing left behind, and doing without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.parallel.reduction_tree import ReductionPlan
from paceline.parallel.transports import _chunk

Reports = dict[int, list[dict[str, Any]]]


def test_survivors_name_the_rank_that_was_late_and_the_one_that_was_killed(
    survivors: Callable[[str], list[dict[str, Any]]],
) -> None:
    for rank, report in enumerate(survivors("shared")):
        assert report["late"] == {
            "text": f"rank 2 kept rank {rank} waiting for more than 3 s",
            "rank": 2,
        }
        # Noticed by itself: the time-out of this one is half an hour.
        assert report["killed"] == {"text": f"rank 2 ended while rank {rank} waited for it", "rank": 2}
        # One file for each of the two reducers, and neither has a name that could stay behind.
        assert len(report["shared_memory"]) == 2
        assert all(path.endswith(" (deleted)") for path in report["shared_memory"])


def test_many_steps_of_ranks_out_of_step_mix_nothing_up(reports: Reports) -> None:
    assert {tuple(report["shared"]["stress"]) for ranks in reports.values() for report in ranks} == {()}


def test_the_memory_is_given_back(reports: Reports) -> None:
    for ranks in reports.values():
        for report in ranks:
            assert not [path for path in report["mapped_after_close"] if "memfd:paceline" in path]


@pytest.mark.parametrize(
    ("case", "cause"), [("no big files", "File too large"), ("rank 1 cannot open", "Too many open files")]
)
def test_where_memory_cannot_be_shared_all_ranks_go_through_the_group_and_one_says_so(
    reports: Reports, case: str, cause: str
) -> None:
    for world_size in (2, 3, 4):
        found = [report["fallback"][case] for report in reports[world_size]]
        assert [len(report["warnings"]) for report in found] == [1] + [0] * (world_size - 1)
        warning = found[0]["warnings"][0]
        assert warning.startswith("no ")
        assert warning.endswith(f"of shared memory: {cause}; gradients go through gloo instead")
        for report in found:
            assert not [path for path in report["shares"] if "memfd:paceline" in path]
            assert report["samples"] == world_size
            assert report["gradient"] == [sum(range(world_size)) / world_size]


@pytest.mark.parametrize("shares", [(12,), (6, 6), (1, 10, 1), (0, 3, 0, 9, 0), (1,) * 12])
def test_the_ranks_chunks_cover_a_lane_and_start_at_whole_cache_lines(shares: tuple[int, ...]) -> None:
    plan = ReductionPlan(12, len(shares), "exact", shares)
    for numel in (0, 1, 15, 16, 17, 1000, 4096):
        chunks = [_chunk(numel, plan.microbatches_of(rank), 12) for rank in range(len(shares))]
        assert torch.cat([torch.arange(numel)[chunk] for chunk in chunks]).tolist() == list(range(numel))
        assert all(chunk.start % 16 == 0 for chunk in chunks if chunk.start < numel)
        assert all(chunk.start == chunk.stop for chunk, share in zip(chunks, shares, strict=True) if not share)


def test_nobody_waits_for_a_spare(reports: Reports) -> None:
    for world_size in (2, 3, 4):
        sums = [report["spare_at_leisure"] for report in reports[world_size]]
        # The spare looked at a step only when the others were done with it, and saw what they saw.
        assert sums == [sums[0]] * world_size
        assert sums[0]["gradients"] == [[3.0], [5.0]]
        assert sums[0]["samples"] == [2, 2]
