"""Rosters: which nodes there are, and which of them decide. No torch.

A *roster* is the ordered set of nodes of a job; rosters follow each other by number (*generation*), and
the next one is decided by a quorum of the one before. Any two quorums of a roster have a node in common:
they are its strict majorities and, where a tie was broken, the one half that won it for ever
(:mod:`paceline.membership.lease`).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Term:
    """One node's leadership; higher ones depose lower ones.

    It names its node, so no two nodes can ever lead in the same term (a *ballot* in Paxos).
    """

    number: int
    node: str


NO_TERM = Term(0, "")  # before the first


@dataclass(frozen=True)
class Roster:
    """The nodes of a job.

    Attributes:
        generation: rises by one with every roster. All agree on what a generation's roster is, once it
            is committed.
        nodes: in the listed order, which is the order of succession. A name stands for one agent
            process: one that was left out, or started again, comes back under another name.
    """

    generation: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Vote:
    """A roster that a node has accepted, and the term in which it was proposed."""

    term: Term
    roster: Roster


def is_quorum(roster: Roster, nodes: Set[str], winners: Set[str] | None) -> bool:
    """Whether these nodes may decide for the roster.

    Args:
        roster: committed.
        nodes: those who agree; who is not in the roster does not count.
        winners: the half that has won this roster's tie, None where nobody has.
    """
    voters = nodes & set(roster.nodes)
    excess = 2 * len(voters) - len(roster.nodes)
    return excess > 0 or (excess == 0 and voters == winners)


def meets_every_quorum(roster: Roster, nodes: Set[str], ties: bool, winners: Set[str] | None) -> bool:
    """Whether no quorum of the roster can come about without one of these nodes.

    Args:
        roster: committed, or proposed.
        nodes: which every quorum must meet.
        ties: whether half of a roster can win a tie at all.
        winners: as for :func:`is_quorum`.
    """
    others = set(roster.nodes) - nodes
    excess = 2 * len(others) - len(roster.nodes)
    return excess < 0 or (excess == 0 and (not ties or (winners is not None and winners != others)))
