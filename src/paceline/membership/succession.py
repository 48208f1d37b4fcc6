"""What one agent's :class:`~paceline.membership.leadership.Leadership` asks its driver to do. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.membership.roster import Roster, Term
from paceline.membership.votes import Message


@dataclass(frozen=True)
class Send:
    """Send this message to this node, over the link that stands."""

    to: str
    message: Message


@dataclass(frozen=True)
class Lead:
    """This node leads from now on: coordinate the workers of the roster's nodes, once they have reported."""

    term: Term
    roster: Roster


@dataclass(frozen=True)
class Committed:
    """This node leads still, and the roster has changed: views may be formed with the new one."""

    term: Term
    roster: Roster


@dataclass(frozen=True)
class StepDown:
    """This node leads no more: forget what was coordinated, and give no orders."""

    term: Term


@dataclass(frozen=True)
class Fence:
    """A higher term was promised: have this node's workers leave their view, then tell the term's node.

    Orders of lower terms are not obeyed any more. The term's node, which may be this one, takes what it is
    told as ``clear``.
    """

    term: Term


@dataclass(frozen=True)
class Follow:
    """Report this node's workers to the leader, and whether they act in a view; it may have come anew.

    Where this node is not in the roster, it has to ask the leader to be admitted.
    """

    term: Term
    leader: str
    roster: Roster


@dataclass(frozen=True)
class Pause:
    """Form no view: too few of the roster can be reached.

    Attributes:
        reason: for people: who is missing, and how many of how many are needed.
    """

    reason: str


@dataclass(frozen=True)
class TakeLease:
    """Take the lease of this roster for these of its nodes, and answer with ``lease_answered``."""

    roster: Roster
    winners: frozenset[str]


@dataclass(frozen=True)
class Out:
    """This node is in the roster no more: end its workers. It can join again under another name."""

    roster: Roster


Action = Send | Lead | Committed | StepDown | Fence | Follow | Pause | TakeLease | Out
