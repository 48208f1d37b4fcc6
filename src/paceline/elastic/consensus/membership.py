"""The interface between an agent and what decides which node leads, and which nodes take part. Pure; no torch.

A :class:`Membership` has three duties. It names one *leader*, in a term that no other node has. It commits *node sets*,
one after the other, each for all agents alike. And it *fences*: no group of workers is formed before a node of every
earlier one has left that one for good. :mod:`~paceline.elastic.consensus.paxos` does this among the agents themselves,
a plug-in with etcd's leases and transactions.

A membership decides by events: its driver, the :class:`~paceline.elastic.consensus.agent_controller.AgentController`,
reports what happens, and executes the actions that each event returns, in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Literal, Protocol

from paceline.elastic.consensus.messages import NO_TERM, ElectionMessage, NodeSet, Term

Role = Literal["outside", "waiting", "following", "claiming", "leading", "paused", "out"]


# --- Actions ---


@dataclass(frozen=True)
class Send:
    """Send this message to this node, over the open connection."""

    to: str
    message: ElectionMessage


@dataclass(frozen=True)
class Lead:
    """Lead from now on: coordinate the workers of the node set, once they have reported."""

    term: Term
    node_set: NodeSet


@dataclass(frozen=True)
class Committed:
    """Continue to lead with a new node set, with which groups may be formed."""

    term: Term
    node_set: NodeSet


@dataclass(frozen=True)
class StopLeading:
    """Stop leading: drop the coordination, and give no orders."""

    term: Term


@dataclass(frozen=True)
class Fence:
    """After promising a higher term, make this node's workers leave their group, then tell the term's node.

    Orders of lower terms are no longer obeyed. The term's node, which may be this one, calls ``clear``.
    """

    term: Term


@dataclass(frozen=True)
class Follow:
    """Report this node's workers to the leader, which may have reconnected, and whether they act in a group.

    A node outside of the node set requests its admission in this way.
    """

    term: Term
    leader: str
    node_set: NodeSet


@dataclass(frozen=True)
class Pause:
    """Form no group, because too few of the nodes can be reached.

    Attributes:
        reason: which nodes are missing, and how many are needed, as text.
    """

    reason: str


@dataclass(frozen=True)
class Out:
    """End this node's workers, because it is no longer in the node set. It can join again under another name."""

    roster: NodeSet


@dataclass(frozen=True)
class CannotReform:
    """Tell the user that this leader can form no group of other nodes, and that the current one trains on.

    Attributes:
        reason: the cause, as text; "" once it can again.
    """

    reason: str


class OwnAction:
    """An action that the membership carries out itself, by :meth:`Membership.perform`: it reads or writes something."""


Action = Send | Lead | Committed | StopLeading | Fence | Follow | Pause | Out | CannotReform | OwnAction


# --- What every membership knows and does ---


Nodes = frozenset[str]
NOBODY: Nodes = frozenset()


@dataclass
class MembershipState(ABC):
    """One agent's state. All values are replaced, never changed in place.

    Attributes:
        node: this agent's name.
        role: ``outside`` until first admitted; ``waiting`` without a leader; ``out`` for ever, once removed.
        promised: the highest term that it has promised to follow.
        committed: the last node set that it knows to be committed.
        leader: the node that it follows; itself if it leads.
        reachable: the connected peers.
    """

    node: str
    role: Role = "outside"
    promised: Term = NO_TERM
    committed: NodeSet | None = None
    leader: str | None = None
    reachable: Nodes = NOBODY
    # Leading: nodes to admit and dismiss, and nodes that act in no group.
    _admitted: tuple[str, ...] = ()
    _dismissed: Nodes = NOBODY
    _clear: Nodes = NOBODY
    _reason: str = ""  # why it has paused
    _actions: tuple[Action, ...] = ()

    def admit(self, node: str) -> list[Action]:
        """Add this node to the node set, last in the list; for the leader."""
        if node not in self._admitted and node not in self._node_set.nodes and node in self.reachable:
            self._admitted += (node,)
            self._review()
        return self._take_actions()

    def dismiss(self, node: str) -> list[Action]:
        """Remove this node, which may be the leader unless it is the last; for the leader."""
        self._admitted = tuple(n for n in self._admitted if n != node)
        self._dismissed |= {node}
        self._review()
        return self._take_actions()

    @abstractmethod
    def _review(self) -> None:
        """Change the node set, if that is due and allowed."""

    @property
    def _node_set(self) -> NodeSet:
        assert self.committed is not None
        return self.committed

    @property
    def _reachable_nodes(self) -> Nodes:
        """The reachable nodes of the node set, including this one."""
        return frozenset(self._node_set.nodes) & (self.reachable | {self.node})

    def _send(self, nodes: Iterable[str], message: ElectionMessage) -> None:
        for node in nodes:
            if node in self.reachable:
                self._do(Send(node, message))

    def _do(self, action: Action) -> None:
        self._actions += (action,)

    def _take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, ()
        return list(actions)


# --- The interface ---


class Membership(Protocol):
    """One agent's part in the decision on the leader and the nodes. Every event returns the actions to execute."""

    @property
    def role(self) -> Role:
        """``outside`` until first admitted; ``waiting`` without a leader; ``out`` for ever, once removed."""

    @property
    def leader(self) -> str | None:
        """The node that this one follows; itself if it leads."""

    @property
    def promised(self) -> Term:
        """The highest term that this node obeys."""

    @property
    def reachable(self) -> Set[str]:
        """The connected peers."""

    # Events.

    def begin(self) -> list[Action]:
        """Lead a node set of this node alone, as the first node of a job; others join through it."""

    def linked(self, peer: str) -> list[Action]:
        """Handle a new connection; an earlier one was reported as lost."""

    def lost(self, peer: str, *, closed: bool) -> list[Action]:
        """Handle the end of a connection, or the timeout of a peer.

        Args:
            closed: whether the peer, or the kernel after the end of its process, has closed the connection.
        """

    def heard(self, peer: str, message: ElectionMessage) -> list[Action]:
        """Handle a message of a peer."""

    def on_timeout(self) -> list[Action]:
        """Handle the timeout: :attr:`needs_timer` has been true for that long without another event."""

    def perform(self, request: OwnAction) -> list[Action]:
        """Carry out one of this membership's own actions."""

    # Decisions of the leader.

    def admit(self, node: str) -> list[Action]:
        """Add this node to the node set, last in the list."""

    def dismiss(self, node: str) -> list[Action]:
        """Remove this node, which may be the leader unless it is the last."""

    def clear(self, node: str) -> list[Action]:
        """Record that no worker of this node acts, or will act, in any earlier group.

        The node must have promised the current term before its report.
        """

    def intend(self, nodes: Iterable[str]) -> list[Action]:
        """Prepare for a group with workers on all of these nodes; :meth:`may_form` is asked next."""

    def formed(self, nodes: Iterable[str]) -> None:
        """Record a new group with workers on all of these nodes."""

    # Questions.

    @property
    def needs_timer(self) -> bool:
        """Whether :meth:`on_timeout` is due after a while without events."""

    def may_form(self, nodes: Iterable[str]) -> bool:
        """Return whether this node may form a group of workers on all of these nodes, now."""

    def may_exclude(self, nodes: Set[str]) -> bool:
        """Return whether a group could be formed without these nodes while they stay in the node set."""

    # The end.

    def close(self, *, is_over: bool) -> None:
        """Release all resources; ``is_over``: the job has ended on all nodes, and not for this one alone."""
