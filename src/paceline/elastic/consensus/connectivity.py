"""Which nodes reach each other, and the largest set of them that is wholly connected. Pure; no torch.

A group of workers needs a connection between any two of its nodes. Each agent keeps a link with every other one, and
reports to its leader which of them stand, so the leader knows all pairs that are cut. It reaches all nodes that follow
it: one that it does not reach is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

_MOST_BRANCHES = 5000


@dataclass
class LinkMap:
    """A leader's knowledge of the links between its followers.

    Attributes:
        reports: by follower: the agents that it is connected to.
    """

    leader: str
    reports: dict[str, frozenset[str]] = field(default_factory=dict)

    def is_connected(self, one: str, other: str) -> bool:
        """Return whether both ends of a pair report its link."""
        if self.leader in (one, other):
            return True
        return other in self.reports.get(one, ()) and one in self.reports.get(other, ())

    def unreachable(self, node: str, nodes: Sequence[str]) -> tuple[str, ...]:
        """Return those of the nodes from which this one is cut."""
        return tuple(other for other in nodes if other != node and not self.is_connected(node, other))

    def excluded(self, members: Sequence[str], newcomers: Sequence[str]) -> frozenset[str]:
        """Return the nodes that the next group does without.

        The largest wholly connected set of members stays; of several, the one with the earliest nodes in the list.
        Then as many newcomers join as are connected to all of these, and to each other: none displaces a member.

        Args:
            members: the nodes of the node set that follow, and the leader, in the order of succession.
            newcomers: the nodes that request to join, in the order of their arrival.
        """
        staying = self._largest_connected(members)
        joining = [node for node in newcomers if not self.unreachable(node, staying)]
        return frozenset((*members, *newcomers)) - {*staying, *self._largest_connected(joining)}

    def _largest_connected(self, nodes: Sequence[str]) -> tuple[str, ...]:
        cuts: dict[str, set[str]] = {node: set() for node in nodes}
        followers = frozenset(nodes) - {self.leader}
        for one in followers:
            for other in followers - self.reports.get(one, frozenset()) - {one}:
                cuts[one].add(other)
                cuts[other].add(one)
        return largest_uncut(nodes, cuts)


def largest_uncut(nodes: Sequence[str], cuts: Mapping[str, Set[str]]) -> tuple[str, ...]:
    """Return the largest set of nodes without a cut between two of them; of several, the one with the earliest nodes.

    Branch and bound: nodes are kept in their order, so the first set of a size is the one that is wanted. Of each two
    nodes in a matching of the cuts only one can be kept, which bounds what a branch can still reach. The number of
    branches is limited, because the agent does nothing else meanwhile; 32 nodes with a third of the pairs cut need 500.

    Args:
        nodes: in the order of preference.
        cuts: the nodes that each one cannot reach.
    """
    best: tuple[str, ...] = ()
    branches = 0

    def search(kept: tuple[str, ...], left: Sequence[str]) -> None:
        nonlocal best, branches
        branches += 1
        kept = (*kept, *(node for node in left if cuts[node].isdisjoint(left)))
        left = [node for node in left if node not in kept]
        if branches > _MOST_BRANCHES or len(kept) + len(left) - _matched_pairs(left, cuts) <= len(best):
            return
        if not left:
            best = kept
            return
        first, rest = left[0], left[1:]
        search((*kept, first), [node for node in rest if node not in cuts[first]])
        search(kept, rest)

    search((), nodes)
    return tuple(node for node in nodes if node in best)


def _matched_pairs(nodes: Sequence[str], cuts: Mapping[str, Set[str]]) -> int:
    free, pairs = dict.fromkeys(nodes), 0
    for node in nodes:
        partner = next((other for other in free if other in cuts[node]), None) if node in free else None
        if partner is not None:
            del free[node], free[partner]
            pairs += 1
    return pairs
