"""Who leads and which nodes there are: scripted cases, a search of small worlds, and random walks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial

import pytest
from tests.elastic.membership.agents_world import World

from paceline.elastic.consensus.membership import (
    Action,
    Committed,
    Fence,
    Follow,
    Lead,
    Out,
    Pause,
    Send,
    StopLeading,
)
from paceline.elastic.consensus.messages import (
    Accept,
    Accepted,
    LeaderHeartbeat,
    Nack,
    NodeSet,
    Prepare,
    Promise,
    StepDown,
    Term,
    Vote,
)
from paceline.elastic.consensus.paxos import AcquireWitness, Leadership

ABC = NodeSet(2, ("a", "b", "c"))
AB = NodeSet(1, ("a", "b"))
OLD = Term(1, "a")


def follower(node: str, roster: NodeSet = ABC, ties: bool = False) -> Leadership:
    """A node that follows a, linked with all others."""
    return Leadership(
        node,
        ties=ties,
        role="following",
        promised=OLD,
        committed=roster,
        leader="a",
        reachable=frozenset(roster.nodes) - {node},
        _highest=1,
    )


def leader(roster: NodeSet = ABC, ties: bool = False) -> Leadership:
    """Node a, which leads, with all nodes clear."""
    agent = follower("a", roster, ties)
    agent.role = "leading"
    for node in roster.nodes:
        assert agent.clear(node) == []
    return agent


def sent(actions: list[Action], kind: type) -> list[str]:
    return [a.to for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]


def test_the_founder_leads_and_others_join_by_its_own_vote() -> None:
    founder = Leadership("a", ties=False)
    actions = founder.begin()
    assert actions == [Lead(Term(1, "a"), NodeSet(0, ("a",)))]
    newcomer = Leadership("b", ties=False)
    [announced] = founder.linked("b")
    assert isinstance(announced, Send)
    assert newcomer.linked("a") == []
    assert newcomer.heard("a", announced.message) == [Follow(Term(1, "a"), "a", NodeSet(0, ("a",)))]
    actions = founder.admit("b")
    assert actions[-1] == Committed(Term(1, "a"), AB)
    [told] = [action for action in actions if isinstance(action, Send)]
    # It promises, so that its workers are known to act in nothing older, and follows.
    assert newcomer.heard("a", told.message) == [Fence(Term(1, "a")), Follow(Term(1, "a"), "a", AB)]
    assert not founder.may_form(("a", "b"))
    founder.clear("b")
    assert founder.may_form(("a", "b"))


def test_a_lost_node_is_taken_out_by_those_who_remain() -> None:
    agent = leader()
    agent.formed("abc")
    proposed = agent.lost("c")
    assert sent(proposed, Accept) == ["b"]
    assert not agent.may_form(("a", "b"))
    actions = agent.heard("b", Accepted(OLD, ABC, 3))
    assert Committed(OLD, NodeSet(3, ("a", "b"))) in actions
    assert not agent.may_form(("a", "b"))  # their workers may act in the old view still
    agent.clear("a")
    agent.clear("b")
    assert agent.may_form(("a", "b"))


def test_the_first_that_can_be_reached_claims_and_leads_once_a_quorum_promises() -> None:
    b, c = follower("b"), follower("c")
    claimed = b.lost("a")
    assert sent(claimed, Prepare) == ["c"]
    assert c.lost("a") == []  # b comes first
    assert c.needs_timer
    claim = claimed[-1]
    assert isinstance(claim, Send)
    assert c.heard("b", claim.message) == [
        Fence(Term(2, "b")),
        Send("b", Promise(Term(2, "b"), ABC, None)),
    ]
    actions = b.heard("c", Promise(Term(2, "b"), ABC, None))
    assert Lead(Term(2, "b"), ABC) in actions
    assert sent(actions, LeaderHeartbeat) == ["c"]


def test_a_node_that_can_reach_its_leader_promises_nothing_until_it_loses_it() -> None:
    agent = follower("c")
    assert agent.heard("b", Prepare(Term(2, "b"), ABC)) == []
    actions = agent.heard("a", StepDown(OLD, ABC))
    assert actions == [Fence(Term(2, "b")), Send("b", Promise(Term(2, "b"), ABC, None))]
    assert agent.heard("a", Prepare(OLD, ABC)) == [Send("a", Nack(OLD, ABC, Term(2, "b")))]


def test_a_claim_is_not_answered_once_its_node_is_lost() -> None:
    agent = follower("c")
    agent.heard("b", Prepare(Term(2, "b"), ABC))
    agent.lost("b")
    [pause] = agent.lost("a")
    assert isinstance(pause, Pause)
    assert agent.promised == OLD


def test_a_node_whose_predecessor_does_not_claim_claims_itself() -> None:
    agent = follower("c")
    assert agent.lost("a") == []
    assert sent(agent.on_timeout(), Prepare) == ["b"]


def test_a_side_without_a_quorum_pauses_and_says_why() -> None:
    agent = follower("c")
    agent.lost("b")
    [pause] = agent.lost("a")
    assert pause == Pause("1 of 3 nodes are reachable, and more than half must agree; a, b cannot be reached")
    assert agent.on_timeout() == []
    assert sent(agent.linked("b"), Prepare) == []  # b comes first
    assert sent(agent.on_timeout(), Prepare) == ["b"]


def test_a_leader_without_a_quorum_resigns() -> None:
    agent = leader()
    agent.lost("b")
    actions = agent.lost("c")
    assert actions[0] == StopLeading(OLD)
    assert isinstance(actions[-1], Pause)
    assert not agent.may_form(("a",))


def test_a_tie_without_a_shared_directory_pauses() -> None:
    [*_, pause] = leader(AB).lost("b")
    assert isinstance(pause, Pause)
    assert "a tie, which only a directory that all nodes share could break" in pause.reason


def test_a_tie_is_won_by_the_lease_and_lost_without_it() -> None:
    winner, loser = leader(AB, ties=True), follower("b", AB, ties=True)
    winner.formed("ab")
    take = AcquireWitness(AB, frozenset("a"))
    assert winner.lost("b") == [take]
    assert loser.lost("a")[-1] == AcquireWitness(AB, frozenset("b"))
    assert winner.witness_answered(AB, frozenset("a")) == [Committed(OLD, NodeSet(2, ("a",)))]
    [pause] = loser.witness_answered(AB, frozenset("a"))
    assert isinstance(pause, Pause)
    assert "a tie, which a won" in pause.reason
    assert loser.on_timeout() == []
    # The link comes back: it is told that it is out.
    actions = loser.heard("a", LeaderHeartbeat(OLD, NodeSet(2, ("a",))))
    assert actions == [Out(NodeSet(2, ("a",)))]


def test_a_lease_directory_that_fails_pauses_and_is_asked_again() -> None:
    agent = follower("b", AB, ties=True)
    agent.lost("a")
    assert isinstance(agent.witness_answered(AB, None)[-1], Pause)
    assert agent.on_timeout()[-1] == AcquireWitness(AB, frozenset("b"))


def test_an_old_leader_that_hears_of_a_higher_term_follows() -> None:
    agent = leader()
    new = Term(2, "b")
    later = NodeSet(3, ("a", "b"))
    actions = agent.heard("b", LeaderHeartbeat(new, later))
    assert actions[0] == StopLeading(OLD)
    assert actions[-2:] == [Fence(new), Follow(new, "b", later)]
    assert sent(agent.heard("c", Accept(Term(1, "c"), later, NodeSet(4, ("c",)))), Nack) == ["c"]
    assert agent.accepted is None


def test_who_leaves_in_good_order_needs_no_vote_later() -> None:
    agent = leader(AB)
    assert sent(agent.dismiss("b"), Accept) == ["b"]
    actions = agent.heard("b", Accepted(OLD, AB, 2))
    assert sent(actions, LeaderHeartbeat) == ["b"]
    assert agent.lost("b") == []
    assert agent.may_form(("a",))


def test_a_leader_that_leaves_is_followed_by_the_next() -> None:
    a, b = leader(AB), follower("b", AB)
    [proposed] = a.dismiss("a")
    assert isinstance(proposed, Send)
    [accepted] = b.heard("a", proposed.message)
    assert isinstance(accepted, Send)
    actions = a.heard("b", accepted.message)
    assert actions[-2:] == [StopLeading(OLD), Out(NodeSet(2, ("b",)))]
    [told] = [x for x in actions if isinstance(x, Send) and isinstance(x.message, LeaderHeartbeat)]
    assert Lead(Term(2, "b"), NodeSet(2, ("b",))) in b.heard("a", told.message)
    assert leader(NodeSet(0, ("a",))).dismiss("a") == []  # the last one cannot go


def test_what_may_be_committed_is_proposed_again_and_the_latest_of_it() -> None:
    roster = NodeSet(4, ("a", "b", "c", "d", "e"))
    b = follower("b", roster)
    early = Vote(OLD, NodeSet(5, ("a", "b")))
    late = Vote(Term(2, "e"), NodeSet(5, ("b", "c", "d", "e")))
    b.accepted = early
    b.lost("a")
    term = b.promised
    b.heard("c", Promise(term, roster, None))
    assert sent(b.heard("d", Promise(term, roster, late)), Accept) == []  # a view may act still
    for node in ("b", "c"):
        assert b.clear(node) == []
    proposed = b.clear("d")
    assert sent(proposed, Accept) == ["c", "d", "e"]
    assert b.accepted == Vote(term, late.node_set)


def test_the_nodes_of_a_roster_that_is_found_have_to_promise_too() -> None:
    b = follower("b")
    found = NodeSet(3, ("b", "c", "d", "e"))
    b.accepted = Vote(OLD, found)
    b.linked("d")
    b.linked("e")
    b.lost("a")
    term = b.promised
    b.heard("c", Promise(term, ABC, None))
    b.clear("b")
    b.clear("c")
    actions = b.heard("c", Accepted(term, ABC, 3))
    assert b.committed == found
    assert b.accepted is None
    assert sent(actions, Prepare) == ["d", "e"]
    assert not any(isinstance(action, Lead) for action in actions)
    assert Lead(term, found) in b.heard("e", Promise(term, found, None))


def test_nothing_is_accepted_on_a_base_that_is_not_the_last() -> None:
    agent = follower("b", NodeSet(3, ("a", "b")))
    refused = agent.heard("a", Accept(Term(5, "a"), ABC, NodeSet(3, ("a", "c"))))
    assert sent(refused, Nack) == ["a"]
    assert agent.accepted is None
    assert agent.promised == OLD


def test_who_is_out_is_told_so_and_gets_no_promise() -> None:
    agent = follower("b", NodeSet(3, ("a", "b")))
    agent.lost("a")
    agent.linked("c")
    claim = Prepare(Term(9, "c"), ABC)
    assert agent.heard("c", claim) == [Send("c", Nack(Term(9, "c"), NodeSet(3, ("a", "b")), agent.promised))]
    outsider = follower("c")
    outsider.lost("a")
    assert Out(NodeSet(3, ("a", "b"))) in outsider.heard("b", Nack(Term(9, "c"), NodeSet(3, ("a", "b")), Term(2, "b")))
    assert outsider.on_timeout() == []


def test_a_node_with_a_higher_promise_makes_the_leader_claim_a_term_above_it() -> None:
    agent = leader()
    actions = agent.heard("c", Nack(OLD, ABC, Term(7, "c")))
    assert actions[0] == StopLeading(OLD)
    assert sent(actions, Prepare) == ["b", "c"]
    assert agent.promised == Term(8, "a")


def test_what_was_said_before_a_claim_does_not_make_a_node_clear() -> None:
    agent = leader()
    agent.heard("c", Nack(OLD, ABC, Term(7, "c")))
    agent.heard("b", Promise(agent.promised, ABC, None))
    assert agent.role == "leading"
    assert not agent.may_form("abc")


def test_a_view_is_not_formed_where_a_quorum_could_go_on_without_it() -> None:
    agent = leader()
    assert not agent.may_form("a")
    assert agent.may_form("ab")
    assert leader(AB).may_form("a")  # b alone is no quorum, and no tie can be won
    assert not leader(AB, ties=True).may_form("a")
    assert not agent.may_form("abd")


def test_no_newcomer_is_let_in_beside_a_view_that_it_could_do_without() -> None:
    agent = leader(NodeSet(0, ("a",)), ties=True)
    agent.formed("a")
    agent.linked("b")
    assert agent.admit("b") == []
    assert agent.clear("a")[-1] == Committed(OLD, AB)


# All interleavings.

Worlds = Callable[[], World]


def search(start: World, *, at_least: int, at_most: int, settle_every: int) -> None:
    """From every state that any order of events leads to, all rules hold, and all come to rest."""
    seen = {start.key()}
    frontier = [start]
    expanded = 0
    while frontier and len(seen) < at_most:
        world = frontier.pop()
        expanded += 1
        if expanded % settle_every == 0:
            at_rest = world.clone()
            at_rest.settle()
            at_rest.check_at_rest()
        for event in sorted(world.events()):
            following = world.clone()
            following.happens(event)
            following.check()
            key = following.key()
            if key not in seen:
                seen.add(key)
                frontier.append(following)
    assert len(seen) >= at_least
    assert not frontier or len(seen) >= at_most


@pytest.mark.integration
@pytest.mark.parametrize("ties", [False, True], ids=["no-lease", "lease"])
@pytest.mark.parametrize(
    ("world", "at_least"),
    [
        (partial(World.at_work, "ab", crashes=1, cuts=1, heals=1, haste=1, forms=1), 1000),
        (partial(World.at_work, "ab", cuts=1, heals=1, dismissals=1), 300),
        (partial(World.founded, "ab", crashes=1, cuts=1, heals=1, forms=1, joins=1), 300),
        (partial(World.at_work, "abc", crashes=2), 500),
    ],
    ids=["two", "two-dismissed", "founded", "three-crashes"],
)
def test_every_interleaving(world: Callable[..., World], at_least: int, ties: bool) -> None:
    search(world(ties=ties), at_least=at_least, at_most=100_000, settle_every=5)


@pytest.mark.parametrize("ties", [False, True], ids=["no-lease", "lease"])
@pytest.mark.parametrize(
    "world",
    [
        partial(World.at_work, "abc", cuts=1, heals=1, forms=1),
        partial(World.at_work, "abcd", cuts=1, crashes=1, forms=1),
    ],
    ids=["three", "four"],
)
def test_many_interleavings(world: Callable[..., World], ties: bool) -> None:
    search(world(ties=ties), at_least=3000, at_most=3000, settle_every=20)


@pytest.mark.parametrize("ties", [False, True], ids=["no-lease", "lease"])
@pytest.mark.parametrize(
    "world",
    [
        partial(World.at_work, "abc", crashes=1, cuts=3, heals=4, haste=4, forms=4, dismissals=1),
        partial(World.at_work, "abc", acting="bc", crashes=1, cuts=3, heals=4, haste=4, forms=3),
        partial(World.at_work, "abcd", crashes=1, cuts=4, heals=6, haste=4, forms=4, dismissals=1),
        partial(World.at_work, "abcde", acting="bcd", cuts=4, heals=6, haste=4, forms=3),
        partial(World.founded, "abcd", crashes=1, cuts=3, heals=4, haste=4, forms=4, joins=4),
    ],
    ids=["three", "three-one-idle", "four", "five-two-idle", "founded"],
)
def test_random_walks(world: Callable[..., World], ties: bool) -> None:
    for seed in range(80):
        walk(world(ties=ties), random.Random(seed), steps=120)


@pytest.mark.parametrize("ties", [False, True], ids=["no-lease", "lease"])
@pytest.mark.parametrize("names", ["abc", "abcd"])
def test_the_largest_connected_set_continues_while_pairs_are_cut_and_all_once_they_are_healed(
    names: str, ties: bool
) -> None:
    """Whatever pairs are cut for good, in any order: who leads has a view; at most one acts at any time."""
    pairs = [frozenset(pair) for pair in itertools.combinations(names, 2)]
    for number in range(2 ** len(pairs)):
        cut = frozenset(pair for index, pair in enumerate(pairs) if number >> index & 1)
        rng = random.Random(number)
        world = World.at_work(names, ties=ties, haste=2)
        for pair in rng.sample(sorted(map(sorted, cut)), len(cut)):
            world.end_links([frozenset(pair)])
            for _ in range(rng.randrange(6)):
                if due := sorted(world.due()):
                    world.happens(rng.choice(due))
                    world.check()
        world.settle(cut)
        leaders = [name for name, agent in world.agents.items() if agent.role == "leading"]
        assert len(leaders) <= 1
        for name, agent in world.agents.items():
            # Nodes may have been removed before the last pairs were cut.
            nodes = agent.committed.nodes if agent.committed and agent.role != "out" else ()
            if 2 * sum(frozenset((name, node)) not in cut for node in nodes) > len(nodes):
                assert leaders, f"no node leads with the cuts {cut}"
        if leaders:
            world.form_largest(cut)
            [acting] = world.acting()
            assert leaders[0] in acting.nodes
            if len(cut) == 1:
                assert len(acting.nodes) == len(names) - 1
        world.settle()
        world.check_at_rest()


def walk(world: World, rng: random.Random, steps: int) -> None:
    for _ in range(steps):
        due = sorted(world.due())  # a set's order is another in each process
        faults = [event for event in sorted(world.events()) if event not in due]
        if not due and not faults:
            break
        world.happens(rng.choice(faults if faults and (not due or rng.random() < 0.15) else due))
        world.check()
    world.settle()
    world.check_at_rest()


@pytest.mark.parametrize("ties", [False, True], ids=["no-lease", "lease"])
def test_a_proposal_that_reached_nobody_and_a_later_tie(ties: bool) -> None:
    """a proposes to take d out, is cut off before anybody hears it; the others go on without a, then tie."""
    world = World.at_work("abcd", ties=ties, cuts=2, heals=6)
    world.agents["a"].clear("a")
    world.happens(("break", "a", "d"))
    world.happens(("notice", "a", "d"))
    world.happens(("cut", "a", ""))
    for name in ("b", "c"):
        world.lines.pop(("a", name), None)  # all that was on its way is lost
    for name in ("b", "c", "d"):
        world.happens(("notice", name, "a"))
    while due := [event for event in world.due() if "a" not in event[1:]]:
        world.happens(due[0])
        world.check()
    assert world.agents["b"].role == "leading"
    later = world.agents["b"].committed
    assert later is not None
    assert later.nodes == ("b", "c", "d")
    world.cuts = 1
    world.happens(("cut", "b", ""))
    while due := [event for event in world.due() if "a" not in event[1:]]:
        world.happens(due[0])
        world.check()
    assert world.agents["c"].role == "leading"
    assert world.agents["b"].role == "paused"
    world.happens(("heal", "a", "b"))
    world.settle()
    world.check_at_rest()
    assert world.agents["c"].committed == NodeSet(5, ("c", "d"))
    assert {world.agents[name].role for name in "ab"} == {"out"}
