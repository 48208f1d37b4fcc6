"""The nodes that take part while pairs of nodes are cut: the largest wholly connected set, and always the same."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from paceline.elastic.consensus.connectivity import LinkMap

NODES = tuple("abcdefg")
PAIRS = tuple(itertools.combinations(NODES, 2))


def link_map(cuts: frozenset[tuple[str, str]], leader: str = "a") -> LinkMap:
    """All pairs are connected but for these; the leader reaches everyone."""
    reports: dict[str, set[str]] = {node: set(NODES) - {node} for node in NODES if node != leader}
    for one, other in cuts:
        # One end's report is enough: the other may not have noticed yet.
        reports[one if one != leader else other].discard(other if one != leader else one)
    return LinkMap(leader, {node: frozenset(peers) for node, peers in reports.items()})


def is_whole(links: LinkMap, nodes: tuple[str, ...]) -> bool:
    return all(links.is_connected(one, other) for one, other in itertools.combinations(nodes, 2))


def test_of_two_nodes_that_cannot_reach_each_other_the_later_one_waits() -> None:
    links = link_map(frozenset({("b", "c")}))
    assert links.excluded("abc", ()) == {"c"}
    assert links.excluded("acb", ()) == {"b"}
    assert links.unreachable("c", "abc") == ("b",)


def test_a_node_that_reaches_the_leader_alone_waits() -> None:
    assert link_map(frozenset({("b", "c"), ("b", "d")})).excluded("abcd", ()) == {"b"}


def test_a_newcomer_displaces_no_member() -> None:
    links = link_map(frozenset({("b", "c"), ("b", "d")}))
    assert links.excluded("ab", "cd") == {"c", "d"}
    assert links.excluded("ab", "ce") == {"c"}


def test_a_node_without_a_report_reaches_the_leader_only() -> None:
    links = LinkMap("a", {"b": frozenset("ac")})
    assert links.excluded("abc", ()) == {"c"}
    links.reports["c"] = frozenset("ab")
    assert links.excluded("abc", ()) == frozenset()


@given(cuts=st.frozensets(st.sampled_from(PAIRS), max_size=12), members=st.permutations(NODES))
def test_the_largest_set_stays_and_of_several_the_one_with_the_earliest_nodes(
    cuts: frozenset[tuple[str, str]], members: list[str]
) -> None:
    links = link_map(cuts)
    excluded = links.excluded(members, ())
    staying = tuple(node for node in members if node not in excluded)
    # Combinations come in the order of succession, so the first one of a size has the earliest nodes.
    candidates = (c for size in range(len(members), 0, -1) for c in itertools.combinations(members, size))
    assert staying == next(c for c in candidates if is_whole(links, c))


@given(cuts=st.frozensets(st.sampled_from(PAIRS), max_size=12), count=st.integers(1, len(NODES)))
def test_newcomers_join_members_that_stay(cuts: frozenset[tuple[str, str]], count: int) -> None:
    links = link_map(cuts)
    members, newcomers = NODES[:count], NODES[count:]
    excluded = links.excluded(members, newcomers)
    assert excluded & set(members) == links.excluded(members, ())
    assert is_whole(links, tuple(node for node in NODES if node not in excluded))


def test_many_cuts_are_decided_quickly() -> None:
    """Two halves of which each node reaches its own half and the leader: no branch but one of a half is tried."""
    nodes = ["a", *(f"{side}{index}" for index in range(30) for side in "xy")]
    halves = {side: frozenset(["a", *(node for node in nodes if node[0] == side)]) for side in "xy"}
    links = LinkMap("a", {node: halves[node[0]] for node in nodes[1:]})
    assert links.excluded(nodes, ()) == frozenset(node for node in nodes if node[0] == "y")
