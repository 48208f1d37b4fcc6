"""The reduction by messages: overlapped, and given up when a peer is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Reports = dict[int, list[dict[str, Any]]]


def test_survivors_of_a_kill_get_an_error(survivors: Callable[[str], list[dict[str, Any]]]) -> None:
    for report in survivors("group"):
        assert report["killed"]["text"].startswith("another rank is gone: ")
        assert report["shared_memory"] == []


def test_many_steps_of_ranks_out_of_step_mix_nothing_up(reports: Reports) -> None:
    for world_size in (2, 3, 4):
        assert [report["group"]["stress"] for report in reports[world_size]] == [[]] * world_size


def test_other_checkpointing_changes_nothing(reports: Reports) -> None:
    plain = reports[1][0]["shared"]["not_checkpointed"]
    for ranks in reports.values():
        for report in ranks:
            for transport in report.keys() & {"shared", "group"}:
                assert report[transport]["not_checkpointed"] == plain
                assert report[transport]["checkpointed"] == plain
