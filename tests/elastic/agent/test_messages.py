"""Messages between agents: they arrive as they were sent, and nothing else is taken for one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.elastic.consensus.messages import (
    AddressBook,
    JobFinished,
    LeaderHeartbeat,
    Message,
    MessageError,
    NodeCommand,
    NodeSet,
    Quiesced,
    Rejected,
    Removed,
    SignalReceived,
    Term,
    WorkerEvent,
    WorkerList,
    read,
    write,
)
from paceline.elastic.group_planner import WorkerState
from paceline.elastic.node import Ended
from paceline.elastic.worker_channel import Assignment, ExitRequest, WorkerHeartbeat
from paceline.runs.failures import failure_of

TERM = Term(3, "a")
PLACE = Assignment(1, 2, 3, local_rank=0, local_world_size=1, active=3, address="10.0.0.1", port=40000)
ENDED = Ended(4, 1, 77, -9, "was silent", 2.5, 30, retired=False, failure=failure_of(1, ValueError("é")))
MESSAGES: list[Message] = [
    NodeCommand(TERM, "start", (4, 1)),
    NodeCommand(TERM, "send", (4, PLACE)),
    NodeCommand(TERM, "send", (4, ExitRequest())),
    NodeCommand(TERM, "kill", (4, "was silent")),
    NodeCommand(TERM, "stop", (15,)),
    NodeCommand(TERM, "kill_all", ("was ordered to end",)),
    WorkerEvent(4, WorkerHeartbeat(step=3, version=4, phase="data")),
    ENDED,
    Ended(4, 1, None, 0, "", 0, -1, retired=True, failure=None),
    WorkerList(2, ((4, 7, WorkerState(1, "in_group")), (5, -1, WorkerState(0, "starting")))),
    Quiesced(TERM),
    SignalReceived(15),
    AddressBook((("a", ("10.0.0.1", 29500)), ("b", ("10.0.0.2", 40000)))),
    JobFinished(75),
    Removed(),
    Rejected("why"),
    LeaderHeartbeat(TERM, NodeSet(2, ("a", "b"))),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_arrive_as_they_were_sent(message: Message) -> None:
    assert read(json.loads(json.dumps(write(message)))) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("wrong", [None, {}, ["x", {}], 1.5])
def test_no_value_of_another_type_gets_through(message: Message, wrong: Any) -> None:
    """What is read can be acted on: whatever raises then is a bug, and not the sender's fault."""
    document = json.loads(json.dumps(write(message)))
    for name in document:
        may_be = {"pid", "failure"} if wrong is None else {"silent_s"} if wrong == 1.5 else set()
        if name not in may_be:
            with pytest.raises(MessageError):
                read({**document, name: wrong})


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"kind": "unheard of"},
        {"kind": "order", "term": [3, "a"], "order": "__init__", "arguments": []},
        {"kind": "order", "term": [3, "a"], "order": "start", "arguments": ["1", 2]},
        {
            "kind": "order",
            "term": [3, "a"],
            "order": "send",
            "arguments": [1, {"kind": "joined", "generation": 1}],
        },
        {"kind": "said", "worker": 1, "message": {"kind": "retire"}},
        {"kind": "said", "worker": 1, "message": {"kind": "joined", "generation": "1"}},
        {"kind": "workers", "nproc": 1, "workers": [[1, 2, {"local_index": 3, "status": "idle"}]]},
        {"kind": "book", "agents": [["a", "10.0.0.1", "29500"]]},
        {**write(ENDED), "failure": {"type": "ValueError"}},
        {**write(ENDED), "more": 1},
    ],
)
def test_what_cannot_be_read_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(MessageError, match="cannot be read"):
        read(document)
