"""Messages between agents' leaderships: they arrive as they were sent, and nothing else is taken for one."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.elastic.consensus.messages import (
    Accept,
    Accepted,
    ElectionMessage,
    LeaderHeartbeat,
    MessageError,
    Nack,
    NodeSet,
    Prepare,
    Promise,
    StepDown,
    Term,
    Vote,
    read,
    write,
)

KINDS = {kind.__struct_config__.tag for kind in get_args(ElectionMessage)}
TERM = Term(3, "b")
ROSTER = NodeSet(4, ("a", "b", "é"))
MESSAGES: list[ElectionMessage] = [
    Prepare(TERM, ROSTER),
    Promise(TERM, ROSTER, None),
    Promise(TERM, ROSTER, Vote(Term(2, "a"), NodeSet(5, ("a",)))),
    Nack(TERM, ROSTER, Term(7, "c")),
    Accept(TERM, ROSTER, NodeSet(5, ("a",))),
    Accepted(TERM, ROSTER, 5),
    LeaderHeartbeat(TERM, ROSTER),
    StepDown(TERM, ROSTER),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: ElectionMessage) -> None:
    document = json.loads(json.dumps(write(message)))
    assert document["kind"] in KINDS
    assert read(document) == message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@given(
    message=st.sampled_from(MESSAGES),
    change=st.dictionaries(
        st.sampled_from(["kind", "term", "committed", "accepted", "promised", "roster", "generation", "x"]),
        JSON,
        min_size=1,
    ),
)
def test_anything_else_is_refused_or_is_a_message(message: ElectionMessage, change: dict[str, Any]) -> None:
    document = {**write(message), **change}
    with suppress(MessageError):
        assert json.dumps(write(read(document)), sort_keys=True) == json.dumps(document, sort_keys=True)


def test_a_message_lacks_nothing() -> None:
    for name in write(MESSAGES[2]):
        document = write(MESSAGES[2])
        del document[name]
        with pytest.raises(MessageError, match="cannot be read"):
            read(document)
