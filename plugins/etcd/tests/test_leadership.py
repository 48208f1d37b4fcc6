"""Who leads by etcd, and which groups may be formed: scripted cases, a search of small worlds, and random walks."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
from plugins.etcd.tests.etcd_world import EtcdWorld
from tests.elastic.membership.test_leadership import search, walk

from paceline.elastic.consensus.membership import (
    Action,
    CannotReform,
    Committed,
    Fence,
    Follow,
    Lead,
    Out,
    Pause,
    Send,
    StopLeading,
)
from paceline.elastic.consensus.messages import LeaderHeartbeat, Nack, NodeSet, StepDown, Term
from paceline_etcd.client import EtcdRecord, EtcdSnapshot, Operation, Read, Resign, Unavailable, Write
from paceline_etcd.membership import Ask, EtcdLeadership

OLD = Term(1, "a")
ABC = NodeSet(2, ("a", "b", "c"))
WRITTEN = EtcdRecord(1, "a", 2, ("a", "b", "c"), ("a", "b", "c"))
SEEN = EtcdSnapshot(WRITTEN, 5, "a", 5, frozenset("abc"))


def agent(node: str, **fields: object) -> EtcdLeadership:
    """One of three nodes that a leads, linked with all others."""
    others = frozenset("abc") - {node}
    its = {"promised": OLD, "leader": "a", "reachable": others, "_seen": SEEN, **fields}
    role = "leading" if node == "a" else "following"
    return EtcdLeadership(node, patience=2, role=role, committed=ABC, **its)  # type: ignore[arg-type]


def asked(actions: list[Action]) -> Operation:
    [operation] = [action.operation for action in actions if isinstance(action, Ask)]
    return operation


def without(snapshot: EtcdSnapshot, *nodes: str) -> EtcdSnapshot:
    """The keys once the etcd leases of these nodes have expired."""
    holder = "" if snapshot.holder in nodes else snapshot.holder
    return EtcdSnapshot(
        snapshot.record, snapshot.record_revision, holder, 5 if holder else 0, snapshot.alive - {*nodes}
    )


def test_the_first_node_leads_once_its_record_is_written() -> None:
    first = EtcdLeadership("a")
    write = asked(first.begin())
    assert write == Write(EtcdSnapshot(), EtcdRecord(1, "a", 0, ("a",)))
    assert isinstance(write, Write)
    kept = EtcdSnapshot(write.record, 1, "a", 1, frozenset("a"))
    assert first.answered(write, kept)[:2] == [Fence(OLD), Lead(OLD, NodeSet(0, ("a",)))]


def test_a_node_joins_by_the_leaders_announcement() -> None:
    newcomer = EtcdLeadership("d")
    assert newcomer.heard("a", LeaderHeartbeat(OLD, ABC)) == [Follow(OLD, "a", ABC)]
    roster = NodeSet(3, ("a", "b", "c", "d"))
    assert newcomer.heard("a", LeaderHeartbeat(OLD, roster)) == [Fence(OLD), Ask(Read()), Follow(OLD, "a", roster)]


def test_the_first_that_is_left_takes_the_lead_once_the_leader_has_closed_its_connection() -> None:
    b, c = agent("b"), agent("c")
    assert asked(b.lost("a", closed=True)) == Read()
    claim = asked(b.answered(Read(), SEEN))
    assert claim == Write(SEEN, EtcdRecord(2, "b", 2, ("a", "b", "c"), ("a", "b", "c")))
    c.lost("a", closed=True)
    assert c.answered(Read(), SEEN) == []  # b comes first, for as long as a timeout
    c.on_timeout()
    assert asked(c.answered(Read(), SEEN)) == Write(SEEN, EtcdRecord(2, "c", 2, ("a", "b", "c"), ("a", "b", "c")))


def test_a_silent_leader_is_followed_by_another_once_its_etcd_lease_has_expired() -> None:
    b = agent("b")
    b.lost("a", closed=False)
    assert b.answered(Read(), SEEN) == []
    assert b.needs_timer
    assert asked(b.on_timeout()) == Read()
    assert isinstance(asked(b.answered(Read(), without(SEEN, "a"))), Write)


def test_a_node_that_the_leader_alone_cannot_reach_finds_itself_removed() -> None:
    b = agent("b")
    b.lost("a", closed=False)
    later = NodeSet(3, ("a", "c"))
    kept = EtcdSnapshot(EtcdRecord(1, "a", 3, ("a", "c"), ("a", "b", "c")), 6, "a", 6, frozenset("abc"))
    assert b.answered(Read(), kept) == [Out(later)]


def test_a_node_outside_of_the_last_group_does_not_lead_without_its_nodes() -> None:
    """Their state is a later one."""
    c = agent("c", reachable=frozenset())
    c.lost("a", closed=True)
    c.lost("b", closed=True)
    kept = EtcdSnapshot(EtcdRecord(1, "a", 2, ("a", "b", "c"), ("a", "b")), 5, "", 0, frozenset("c"))
    [pause] = c.answered(Read(), kept)
    assert pause == Pause("a, b trained last, and cannot be reached")


def test_a_leader_with_the_smaller_part_of_the_nodes_resigns_after_a_while() -> None:
    a = agent("a")
    assert a.lost("b", closed=False) == []  # others may be lost for the same reason
    assert a.lost("c", closed=False) == []
    for _ in range(2):
        assert asked(a.on_timeout()) == Read()
        assert a.answered(Read(), SEEN) == []  # their etcd leases may still expire
    actions = a.on_timeout()
    assert actions[0] == StopLeading(OLD)
    assert asked(actions) == Resign()
    [pause] = a.answered(Resign(), EtcdSnapshot(WRITTEN, 5, "", 0, frozenset("abc")))
    assert pause == Pause("this node reaches only 1 of the 3 nodes that etcd hears of")


def test_a_leader_with_the_larger_part_removes_a_silent_node_after_a_while_and_a_dead_one_at_once() -> None:
    a = agent("a")
    removal = Write(SEEN, EtcdRecord(1, "a", 3, ("a", "b"), ("a", "b", "c")))
    assert a.lost("c", closed=False) == []
    assert a.needs_timer
    a.on_timeout()
    assert a.answered(Read(), SEEN) == []
    a.on_timeout()
    assert asked(a.answered(Read(), SEEN)) == removal
    assert not a.needs_timer
    assert asked(agent("a").lost("c", closed=True)) == removal


def test_nodes_that_are_dead_do_not_make_a_leader_resign() -> None:
    a = agent("a", reachable=frozenset())
    a.lost("c", closed=True)
    a.on_timeout()
    [ask] = a.answered(Read(), without(SEEN, "b", "c"))
    assert ask == Ask(Write(without(SEEN, "b", "c"), EtcdRecord(1, "a", 3, ("a",), ("a", "b", "c"))))


def test_a_group_is_written_before_it_is_formed_and_only_once_the_last_one_is_dead() -> None:
    a = agent("a")
    assert a.intend("ab") == []  # all may act in the group of three
    assert not a.may_form("ab")
    write = asked(a.clear("b"))
    assert write == Write(SEEN, EtcdRecord(1, "a", 2, ("a", "b", "c"), ("a", "b")))
    assert not a.may_form("ab")
    kept = EtcdSnapshot(EtcdRecord(1, "a", 2, ("a", "b", "c"), ("a", "b")), 6, "a", 6, frozenset("abc"))
    assert a.answered(write, kept) == [Committed(OLD, ABC)]
    assert a.may_form("ab")
    a.formed("ab")
    assert not a.may_form("ab")


def test_without_etcd_a_group_of_the_same_nodes_is_formed_and_no_other_one() -> None:
    a = agent("a")
    [cannot] = a.answered(None, Unavailable("etcd does not answer"))
    assert isinstance(cannot, CannotReform)
    assert "etcd does not answer" in cannot.reason
    assert a.answered(None, Unavailable("etcd does not answer")) == []  # said once
    assert a.clear("b") == []
    assert a.may_form("abc")
    assert a.intend("ab") == []
    assert not a.may_form("ab")
    actions = a.answered(Read(), SEEN)
    assert actions[0] == CannotReform("")
    assert asked(actions) == Write(SEEN, EtcdRecord(1, "a", 2, ("a", "b", "c"), ("a", "b")))


def test_while_a_request_may_still_be_executed_neither_group_is_formed() -> None:
    a = agent("a")
    a.clear("b")
    write = asked(a.intend("ab"))
    a.answered(write, Unavailable("etcd does not answer"))
    assert not a.may_form("abc")
    a.intend("abc")
    # What etcd holds is what it was: a request of today settles that the earlier one fails.
    again = asked(a.answered(Read(), SEEN))
    assert again == Write(SEEN, WRITTEN)
    assert not a.may_form("abc")
    # The record is as it was, but the driver has to ask again.
    assert Committed(OLD, ABC) in a.answered(again, EtcdSnapshot(WRITTEN, 7, "a", 7, frozenset("abc")))
    assert a.may_form("abc")


def test_a_deposed_leader_steps_down_and_tells_its_followers() -> None:
    a = agent("a")
    assert a.heard("c", Nack(OLD, ABC, Term(2, "b"))) == [Ask(Read())]
    actions = a.answered(Read(), EtcdSnapshot(EtcdRecord(2, "b", 2, ("a", "b", "c"), ("a", "b", "c")), 6, "b", 6))
    assert [StopLeading(OLD), Send("b", StepDown(OLD, ABC)), Fence(Term(2, "b"))] == [
        action for action in actions if action != Send("c", StepDown(OLD, ABC))
    ]
    c = agent("c")
    assert asked(c.heard("a", StepDown(OLD, ABC))) == Read()
    assert c.leader is None


def test_what_was_clear_in_an_earlier_term_of_a_leader_need_not_be_clear_now() -> None:
    """Another one may have formed a group since."""
    a = agent("a")
    a.clear("b")
    assert a.may_form("abc")
    again = EtcdRecord(3, "a", 2, ("a", "b", "c"), ("a", "b", "c"))
    actions = a.answered(None, EtcdSnapshot(again, 9, "a", 9, frozenset("abc")))
    assert Lead(Term(3, "a"), ABC) in actions
    assert not a.may_form("abc")
    a.clear("b")
    assert a.may_form("abc")


def test_orders_of_a_lower_term_are_refused() -> None:
    c = agent("c", promised=Term(2, "b"))
    assert c.heard("a", LeaderHeartbeat(OLD, ABC)) == [Send("a", Nack(OLD, ABC, Term(2, "b")))]


def test_a_lost_leaders_key_is_written_again_in_the_same_term() -> None:
    a = agent("a")
    expired = without(SEEN, "a")
    assert asked(a.answered(None, expired)) == Write(expired, WRITTEN)
    assert a.role == "leading"


def test_a_record_that_is_gone_is_not_written_again() -> None:
    a, b = agent("a"), agent("b")
    [cannot] = a.answered(None, EtcdSnapshot())
    assert cannot == CannotReform(
        "etcd holds no record of this run any more. Training continues; no new worker group can form until it answers"
    )
    b.lost("a", closed=True)
    [pause] = b.answered(Read(), EtcdSnapshot())
    assert isinstance(pause, Pause)
    assert "its keys were deleted" in pause.reason


# All interleavings, and many of larger worlds.

FAULTS = {"cuts": 4, "heals": 6, "haste": 4, "forms": 8, "outages": 3, "expiries": 2}


@pytest.mark.integration
@pytest.mark.parametrize(
    "world",
    [
        partial(EtcdWorld.on_etcd, "ab", "ab", crashes=1, cuts=1, heals=1, forms=2),
        partial(EtcdWorld.on_etcd, "ab", "ab", cuts=1, heals=1, outages=1, forms=1),
        partial(EtcdWorld.on_etcd, "ab", "b", expiries=2, cuts=1, forms=1),
    ],
    ids=["crash", "outage", "expiry"],
)
def test_interleavings(world: Callable[..., EtcdWorld]) -> None:
    search(world(), at_least=300, at_most=4000, settle_every=10)


@pytest.mark.integration
@pytest.mark.parametrize(
    "world",
    [
        partial(EtcdWorld.on_etcd, "ab", "ab", crashes=1, **FAULTS),
        partial(EtcdWorld.on_etcd, "abc", "abc", crashes=1, dismissals=1, **FAULTS),
        partial(EtcdWorld.on_etcd, "abc", "bc", crashes=1, **FAULTS),
        partial(EtcdWorld.on_etcd, "abcd", "abcd", dismissals=2, **FAULTS),
        partial(EtcdWorld.on_etcd, "abcde", "bcd", crashes=2, **FAULTS),
    ],
    ids=["two", "three", "three-one-idle", "four", "five-two-idle"],
)
def test_random_walks(world: Callable[..., EtcdWorld]) -> None:
    for seed in range(150):
        walk(world(), random.Random(seed), steps=150)
