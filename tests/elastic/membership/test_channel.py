"""Membership messages: they arrive as they were sent, and nothing else is taken for one."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from paceline.elastic.worker_channel import (
    Assignment,
    ChannelError,
    ExitRequest,
    GroupBroken,
    Joined,
    Message,
    Ready,
    ReformRequest,
    ReportRequest,
    StallSnapshot,
    WorkerChannel,
    WorkerHeartbeat,
    channel_pair,
)

SNAPSHOT = StallSnapshot(
    generation=1,
    rank=2,
    step=3,
    stage="step",
    phase="data",
    exchange="all-reduce",
    collective_seq=5,
    left=4,
    stage_s=1.5,
    overdue=True,
    still_s=0.5,
    stacks="☃" * 24_000,  # the most that is sent
)
MESSAGES: list[Message] = [
    Ready(left=-1, why="é ☃\n"),
    WorkerHeartbeat(step=3, version=4, phase="loss", overdue=True),
    Joined(generation=5),
    Assignment(1, 2, 3, local_rank=0, local_world_size=1, active=3, address="10.0.0.1", port=40000),
    ReformRequest(generation=6),
    GroupBroken(generation=7),
    ReportRequest(),
    ExitRequest(),
]


@pytest.fixture
def pair() -> Iterator[tuple[WorkerChannel, WorkerChannel]]:
    ends = channel_pair()
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize("message", [*MESSAGES, SNAPSHOT], ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(pair: tuple[WorkerChannel, WorkerChannel], message: Message) -> None:
    assert pair[0].send(message)
    assert pair[1].receive() == message


def test_messages_stay_apart_and_in_order(pair: tuple[WorkerChannel, WorkerChannel]) -> None:
    for message in MESSAGES:
        pair[1].send(message)
    assert [pair[0].receive() for _ in MESSAGES] == MESSAGES


def test_the_end_is_seen_after_what_was_sent(pair: tuple[WorkerChannel, WorkerChannel]) -> None:
    pair[0].send(ExitRequest())
    pair[0].close()
    assert pair[1].receive() == ExitRequest()
    assert pair[1].receive() is None
    assert not pair[1].send(ExitRequest())


def test_a_side_that_does_not_read_never_blocks_the_other(pair: tuple[WorkerChannel, WorkerChannel]) -> None:
    pair[0].setblocking(False)
    with pytest.raises(BlockingIOError):
        pair[0].receive()
    assert not all(pair[0].send(Ready(0, "x" * 1000)) for _ in range(10_000))
    assert pair[1].receive() == Ready(0, "x" * 1000)


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"7",
        b"{}",
        b'{"kind": "nonsense"}',
        b'{"kind": "beat", "step": 1}',
        b'{"kind": []}',
        b"\xff",
    ],
)
def test_anything_else_is_refused(content: bytes) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        one.send(content)
        with pytest.raises(ChannelError, match="cannot be read"):
            WorkerChannel(other).receive()
