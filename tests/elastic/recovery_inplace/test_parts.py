"""The parts of a recovery, each by itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.data.ledger import LedgerWriter, last_recorded_version, ledger_path
from paceline.data.order import DeterministicSampler
from paceline.elastic.group_formation import StateSource, elect_source
from paceline.elastic.worker_channel import (
    AgentClient,
    Assignment,
    ExitRequest,
    GroupBroken,
    Joined,
    Ready,
    ReformRequest,
    ReportRequest,
    Retired,
    StallSnapshot,
    WorkerChannel,
    channel_pair,
)
from paceline.parallel.grad_buffers import MicrobatchBuffers

ORDER = DeterministicSampler(10, 4, 2, 0)


class Gathered:
    """A world in which the other ranks' answers are known already."""

    def __init__(self, answers: list[int]) -> None:
        self.answers = answers

    def all_gather_object(self, mine: Any) -> list[Any]:
        return [mine, *self.answers]


@pytest.mark.parametrize(
    ("valid", "version", "others", "agreement"),
    [
        (True, 7, [7, 7], StateSource(0, 7, ())),
        (True, 7, [8, -1], StateSource(1, 8, (0, 2))),
        (False, 9, [7, 7], StateSource(1, 7, (0,))),
        (False, 9, [-1, -1], StateSource(None, -1, ())),
        (True, 0, [-1], StateSource(0, 0, (1,))),
    ],
)
def test_highest_version_that_is_whole_wins(
    valid: bool, version: int, others: list[int], agreement: StateSource
) -> None:
    assert elect_source(Gathered(others), valid=valid, version=version) == agreement  # type: ignore[arg-type]


@pytest.fixture
def agent() -> Iterator[tuple[WorkerChannel, AgentClient]]:
    ours, theirs = channel_pair()
    before = set(threading.enumerate())
    member = AgentClient(theirs, orphaned=lambda: None)
    serving = set(threading.enumerate()) - before
    yield ours, member
    ours.close()
    for thread in serving:
        thread.join(timeout=30)
    theirs.close()


def heard(channel: WorkerChannel, kind: type) -> Any:
    """The next message of a kind; beats come in between."""
    while True:
        message = channel.receive()
        if isinstance(message, kind):
            return message


def place(generation: int) -> Assignment:
    return Assignment(generation, 0, 2, 0, 2, active=2, address="127.0.0.1", port=1234)


def test_member_waits_for_a_later_group(agent: tuple[WorkerChannel, AgentClient]) -> None:
    channel, member = agent
    channel.send(place(3))
    assert member.next_group(2, "lost a peer") == place(3)
    assert heard(channel, Ready) == Ready(2, "lost a peer")
    answer = threading.Timer(0.0, channel.send, [place(4)])
    answer.start()
    assert member.next_group(3, "again") == place(4)
    answer.join()
    member.joined(4)
    assert heard(channel, Joined) == Joined(4)


def test_member_hears_what_becomes_of_its_group(agent: tuple[WorkerChannel, AgentClient]) -> None:
    channel, member = agent
    assert not member.should_reform(5)
    assert not member.broken(5)
    channel.send(ReformRequest(5))
    channel.send(GroupBroken(5))
    channel.send(place(6))
    member.next_group(5, "")  # packets come in order
    assert member.should_reform(5)
    assert member.broken(5)
    assert not member.should_reform(6)
    assert not member.broken(6)


def test_member_tells_where_it_stands(agent: tuple[WorkerChannel, AgentClient]) -> None:
    channel, member = agent
    channel.send(ReportRequest())  # it is in no group, and has nothing to tell
    channel.send(place(5))
    member.next_group(4, "")
    member.progress_tracker.step = 8
    member.progress_tracker.begin("step")
    member.progress_tracker.begin_collective("all-reduce")
    channel.send(ReportRequest())
    told = heard(channel, StallSnapshot)
    assert (told.generation, told.rank, told.step, told.stage) == (5, 0, 8, "step")
    assert (told.exchange, told.collective_seq, told.left, told.overdue) == ("all-reduce", 1, 0, False)
    assert told.where
    assert "test_member_tells_where_it_stands" in told.stacks


def test_member_is_sent_home(agent: tuple[WorkerChannel, AgentClient]) -> None:
    channel, member = agent
    channel.send(ExitRequest())
    with pytest.raises(Retired):
        member.next_group(0, "")


def test_member_gives_up_before_its_first_group(agent: tuple[WorkerChannel, AgentClient]) -> None:
    _, member = agent
    assert member.next_group(-1, "", lambda: True) is None


def test_abandoned_step_leaves_the_buffers_as_they_were() -> None:
    module = nn.BatchNorm1d(3)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    buffers = MicrobatchBuffers(module)
    buffers.begin()
    module(torch.randn(4, 3))
    assert not torch.equal(module.running_mean, before["running_mean"])  # type: ignore[arg-type]
    buffers.rollback()
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, before[name])
    module(torch.randn(4, 3))
    after = module.running_mean.clone()  # type: ignore[union-attr]
    buffers.rollback()  # no step is under way: what happened since stays
    assert torch.equal(module.running_mean, after)  # type: ignore[arg-type]


def test_ledger_says_how_far_it_goes(tmp_path: Path) -> None:
    assert last_recorded_version(tmp_path) is None
    first = LedgerWriter(tmp_path, ORDER, generation=0, parent_version=None)
    assert last_recorded_version(tmp_path) is None
    for version in (1, 2):
        first.append(version=version, epoch=0, step=version - 1, start=0, stop=4, ranks=2, checksum=0)
    first.close()
    assert last_recorded_version(tmp_path) == 2
    LedgerWriter(tmp_path, ORDER, generation=4, parent_version=1).close()
    assert last_recorded_version(tmp_path) == 1
    ledger_path(tmp_path, 5).write_bytes(b'{"format":1,"gen')  # killed while it wrote the header
    assert last_recorded_version(tmp_path) == 1
    with ledger_path(tmp_path, 4).open("ab") as file:
        file.write(b'{"v":2,"e":0,"t":1,"a":0,"b":4,"w":1,"c":0}\n{"v":3,"e"')  # killed in an entry
    assert last_recorded_version(tmp_path) == 2
