"""Paxos over the set of nodes: the leader, and the nodes of the job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Literal

from paceline.elastic.consensus.membership import (
    NOBODY,
    Action,
    Committed,
    Fence,
    Follow,
    Lead,
    MembershipState,
    Nodes,
    Out,
    OwnAction,
    Pause,
    StopLeading,
)
from paceline.elastic.consensus.messages import (
    Accept,
    Accepted,
    ElectionMessage,
    LeaderHeartbeat,
    Nack,
    NodeSet,
    Prepare,
    Promise,
    StepDown,
    Term,
    Vote,
    is_quorum,
    meets_every_quorum,
)


@dataclass(frozen=True)
class AcquireWitness(OwnAction):
    """Take the witness of this node set for these of its nodes, and answer with :meth:`Leadership.witness_answered`."""

    roster: NodeSet
    holders: frozenset[str]


# --- The acceptor: a node's knowledge and promises, and the counting of votes. No torch ---


@dataclass
class Acceptor(MembershipState):
    """The part of a :class:`Leadership` that every node has.

    Attributes:
        ties: whether there is a witness directory that all nodes share; without one, a tie pauses.
        accepted: its accepted successor of the committed node set.
    """

    ties: bool = field(kw_only=True)
    accepted: Vote | None = None
    _refused: Nodes = frozenset()  # nodes that refused this node's claim
    _highest: int = 0  # highest known term number
    # The witness of `committed`.
    _holders: Nodes | None = None
    _witness_asked: bool = False

    def _silent(self, answered: Nodes) -> Nodes:
        return self._reachable_nodes - answered - self._refused

    def _enough(self, nodes: Nodes) -> bool:
        """Return whether these nodes could be a quorum."""
        tie = 2 * len(nodes) == len(self._node_set.nodes)
        winnable = tie and self.ties and self._holders in (None, nodes)
        return winnable or is_quorum(self._node_set, nodes, self._holders)

    def _standing(self, voters: Nodes, lease: bool) -> Literal["quorum", "wait", "hopeless"]:
        """Return whether these voters decide, or may yet, by further votes or by the witness, unless it failed."""
        voters &= frozenset(self._node_set.nodes)
        if is_quorum(self._node_set, voters, self._holders):
            return "quorum"
        silent = self._reachable_nodes - voters if self.role == "leading" else self._silent(voters)
        if silent:
            return "wait"
        if lease and self._holders is None and self._enough(voters):
            if not self._witness_asked:
                self._witness_asked = True
                self._do(AcquireWitness(self._node_set, voters))
            return "wait"
        return "hopeless"


# --- The proposer: how a node becomes the leader, and changes the node set. No torch ---


@dataclass
class Proposer(Acceptor):
    """The part of a :class:`Leadership` that claims, leads and proposes."""

    # A claim: the nodes that have promised, with their accepted votes.
    _promises: Mapping[str, Vote | None] = field(default_factory=dict)
    # A proposal in flight, and the nodes that have accepted it.
    _proposal: NodeSet | None = None
    _accepts: Nodes = NOBODY
    _view: Nodes = NOBODY  # leading: the nodes of the last group

    # Without a leader.

    def _seek(self) -> None:
        """Claim the leadership unless an earlier node that can is reachable."""
        here = self._reachable_nodes
        if not self._enough(here):
            self._pause()
        elif next(node for node in self._node_set.nodes if node in here) == self.node:
            self._claim()
        else:
            self.role = "waiting"

    def _claim(self) -> None:
        self._promise(Term(max(self._highest, self.promised.number) + 1, self.node))
        self.role = "claiming"
        self.leader = None
        self._clear, self._view = NOBODY, NOBODY
        self._promises = {self.node: self.accepted}
        self._refused = NOBODY
        self._drop_proposal()
        self._send(self._node_set.nodes, Prepare(self.promised, self._node_set))
        self._count()

    def _count(self, lease: bool = True) -> None:
        """Evaluate the claim: lead, wait, or give up."""
        if self._proposal:
            self._tally(lease)
            return
        standing = self._standing(frozenset(self._promises), lease)
        if standing == "hopeless":
            self._pause()
        elif standing == "quorum":
            following = self._node_set.config_epoch + 1
            votes = [v for v in self._promises.values() if v and v.node_set.config_epoch == following]
            if not votes:
                self._lead()
                return
            standing = self._standing(self._clear, lease)
            if standing == "quorum":
                # It may be committed already, so only this node set can be the successor.
                self._propose(max(votes, key=lambda vote: vote.term).node_set)
            elif standing == "hopeless":
                self._pause()

    def _pause(self) -> None:
        if self.role == "leading":
            self._step_down()
        self._drop_proposal()
        self.leader = None
        reason = self._why_paused()
        if self.role != "paused" or reason != self._reason:
            self.role, self._reason = "paused", reason
            self._do(Pause(reason))

    def _why_paused(self) -> str:
        roster = self._node_set
        missing = [node for node in roster.nodes if node not in self._reachable_nodes]
        refused = [node for node in roster.nodes if node in self._refused & self._reachable_nodes]
        count, most = len(roster.nodes) - len(missing), len(roster.nodes)
        words = [f"{count} of {most} nodes are reachable, and more than half must agree"]
        words += [f"{', '.join(missing)} cannot be reached"] if missing else []
        words += [f"{', '.join(refused)} did not agree"] if refused else []
        if 2 * count == most and not self.ties:
            words.append("a tie, which only a directory that all nodes share could break")
        elif 2 * count == most and self._holders not in (None, self._reachable_nodes):
            words.append(f"a tie, which {', '.join(sorted(self._holders or ()))} won")
        return "; ".join(words)

    # Leading.

    def _lead(self) -> None:
        self.role = "leading"
        self.leader = self.node
        self._admitted, self._dismissed = (), NOBODY
        self._do(Lead(self.promised, self._node_set))
        self._send(self.reachable, LeaderHeartbeat(self.promised, self._node_set))
        self._review()

    def _review(self, lease: bool = True) -> None:
        """Propose the next node set, if it is due and allowed; step down without a quorum."""
        standing = self._standing(self._reachable_nodes, lease)
        if standing == "hopeless":
            self._pause()
        if standing != "quorum":
            return
        if self._proposal:
            self._tally(lease)
            return
        staying = [n for n in self._node_set.nodes if n in self._reachable_nodes and n not in self._dismissed]
        # The last node cannot leave, because an empty node set could have no successor.
        roster = NodeSet(self._node_set.config_epoch + 1, (*staying, *self._admitted) or (self.node,))
        if roster.nodes == self._node_set.nodes:
            return
        still_met = self._view and meets_every_quorum(roster, self._view, self.ties, None)
        if still_met or is_quorum(self._node_set, self._clear, self._holders):
            self._propose(roster)

    def _step_down(self) -> None:
        self.role = "waiting"
        self.leader = None
        self._drop_proposal()
        self._do(StopLeading(self.promised))
        self._send(self._node_set.nodes, StepDown(self.promised, self._node_set))

    # Proposals of a leader or a claimant.

    def _propose(self, node_set: NodeSet) -> None:
        self._proposal = node_set
        self.accepted = Vote(self.promised, node_set)
        self._accepts = frozenset((self.node,))
        self._send(self._node_set.nodes, Accept(self.promised, self._node_set, node_set))
        self._tally()

    def _tally(self, lease: bool = True) -> None:
        standing = self._standing(self._accepts, lease)
        if standing == "quorum":
            self._commit()
        elif standing == "hopeless":
            self._pause()

    def _commit(self) -> None:
        assert self._proposal is not None
        previous, leading = self._node_set, self.role == "leading"
        self._settle(self._proposal)
        receivers = {*previous.nodes, *self._node_set.nodes}
        if leading or self.node not in self._node_set.nodes:
            self._send(receivers, LeaderHeartbeat(self.promised, self._node_set))
        if self.node not in self._node_set.nodes:
            self._leave()
        elif leading:
            nodes = frozenset(self._node_set.nodes)
            self._admitted = tuple(node for node in self._admitted if node not in nodes)
            self._dismissed &= nodes
            self._clear &= nodes
            self._do(Committed(self.promised, self._node_set))
            self._review()
        else:
            self._claim_further()

    def _claim_further(self) -> None:
        """Request promises from the new nodes of a changed node set."""
        new_nodes = [node for node in self._node_set.nodes if node not in self._promises]
        self._send(new_nodes, Prepare(self.promised, self._node_set))
        self._count()

    def _promise(self, term: Term) -> None:
        self.promised = term
        self._highest = max(self._highest, term.number)
        self._do(Fence(term))

    def _drop_proposal(self) -> None:
        self._proposal, self._accepts = None, NOBODY

    def _settle(self, node_set: NodeSet) -> None:
        self.committed = node_set
        if self.accepted and self.accepted.node_set.config_epoch <= node_set.config_epoch:
            self.accepted = None
        self._holders, self._witness_asked = None, False
        self._drop_proposal()

    def _leave(self) -> None:
        if self.role == "leading":
            self._do(StopLeading(self.promised))
        if self.role != "out":
            self._do(Out(self._node_set))
        self.role, self.leader = "out", None


# --- The leadership and the node set as a pure state machine: events in, actions out ---
#
# Each agent has one :class:`Leadership`. It is Paxos with one instance for each node set: the acceptors of node set
# *g + 1* are the nodes of node set *g* (L. Lamport, D. Malkhi, L. Zhou, "Reconfiguring a State Machine", 2010, with a
# window of one). It only decides which nodes are in the job, a few times an hour; the leader's
# :class:`~paceline.elastic.group_planner.GroupPlanner` decides on the workers.
#
# - *Claim.* A node that has lost the leader, and is the first in the list that it can reach, claims a term; a quorum
#   must promise to follow no lower one. Before it leads, the claimant proposes again, in its own term, an accepted
#   node set that may be committed.
# - *Stay.* A node that can reach its leader makes no promise to others; a leader without a quorum steps down.
# - *Change.* The leader removes lost nodes and adds admitted ones, by one committed node set after the other.
# - *Groups.* A group acts as long as all its nodes act in it: once one has left, by promising a higher term, it is dead
#   for ever. A group is formed only if every quorum of the node set contains one of its nodes, and once a quorum is
#   *clear*: acts in no earlier group. A node set is proposed only once a quorum is clear, or if each of its quorums
#   contains a node of the group that may act. So no group forms before a node of every earlier one has left that one.
#
# Time enters only as :meth:`Leadership.on_timeout`.


@dataclass
class Leadership(Proposer):
    """One agent's part; :class:`PaxosMembership` adds the witness.

    Every event returns the actions to execute, in order, before the next event.
    """

    _held: Prepare | None = None  # not answered yet, because there is a leader

    # Events.

    def begin(self) -> list[Action]:
        """Lead a node set of this node alone."""
        self.promised, self.committed = Term(1, self.node), NodeSet(0, (self.node,))
        self._lead()
        self._clear = frozenset((self.node,))
        return self._take_actions()

    def linked(self, peer: str) -> list[Action]:
        """Handle a new connection; an earlier one was reported as lost."""
        self.reachable |= {peer}
        if self.role == "leading":
            self._send((peer,), LeaderHeartbeat(self.promised, self._node_set))
            if self._proposal and peer in self._node_set.nodes:
                self._send((peer,), Accept(self.promised, self._node_set, self._proposal))
        elif self.role == "claiming" and peer in self._node_set.nodes:
            self._refused -= {peer}
            self._send((peer,), Prepare(self.promised, self._node_set))
            if self._proposal:
                self._send((peer,), Accept(self.promised, self._node_set, self._proposal))
        elif self.role in ("waiting", "paused"):
            self._seek()
        return self._take_actions()

    def lost(self, peer: str) -> list[Action]:
        """Handle the end of a connection, or the timeout of a peer."""
        self.reachable -= {peer}
        if self._held and self._held.term.node == peer:
            self._held = None
        if self.role == "leading":
            self._admitted = tuple(node for node in self._admitted if node != peer)
            self._review()
        elif self.role == "claiming":
            self._count()
        elif self.role in ("following", "waiting") and self.leader in (peer, None):
            self._leaderless()
        elif self.role == "outside" and self.leader == peer:
            self.leader = None
        return self._take_actions()

    def heard(self, peer: str, message: ElectionMessage) -> list[Action]:
        """Handle a message of a peer."""
        self._adopt(message.committed)
        if self.committed is None:
            if isinstance(message, LeaderHeartbeat) and self.leader != message.term.node:
                self.leader = message.term.node
                self._do(Follow(message.term, self.leader, message.committed))
            return self._take_actions()
        match message:
            case Prepare():
                self._on_prepare(peer, message)
            case Promise():
                if self.role == "claiming" and message.term == self.promised:
                    self._promises = {**self._promises, peer: message.accepted}
                    self._refused -= {peer}
                    self._count()
            case Nack():
                self._on_nack(peer, message)
            case Accept():
                self._on_accept(peer, message)
            case Accepted(term, _, generation):
                if self._proposal and (term, generation) == (self.promised, self._proposal.config_epoch):
                    self._accepts |= {peer}
                    self._tally()
            case LeaderHeartbeat():
                self._on_leader_heartbeat(peer, message)
            case StepDown(term):
                if self.role == "following" and term == self.promised:
                    self._leaderless()
        return self._take_actions()

    def on_timeout(self) -> list[Action]:
        """Handle the timeout: :attr:`needs_timer` has been true for that long without another event."""
        if self.role == "claiming":
            # Do not wait for nodes that have not answered.
            silent = self._silent(self._accepts if self._proposal else frozenset(self._promises))
            self._refused |= silent
            self._count()
        elif self.role in ("waiting", "paused"):
            if self._enough(self._reachable_nodes):
                self._claim()
            else:
                self._pause()
        return self._take_actions()

    def witness_answered(self, node_set: NodeSet, winners: Nodes | None) -> list[Action]:
        """Handle the holders of this node set's witness; None: the directory was not accessible."""
        if node_set != self.committed or not self._witness_asked:
            return []
        self._witness_asked = False
        self._holders = winners
        if self.role == "leading":
            self._review(lease=winners is not None)
        elif self.role == "claiming":
            self._count(lease=winners is not None)
        return self._take_actions()

    def clear(self, node: str) -> list[Action]:
        """Record that no worker of this node acts, or will act, in any earlier group; for a leader or claimant.

        The node must have promised the current term before its report. A report of a node that was ordered to form a
        group counts only after that order, unless the order was lost with its connection.
        """
        self._clear |= {node}
        if self.role == "leading":
            self._review()
        elif self.role == "claiming":
            self._count()
        return self._take_actions()

    def formed(self, nodes: Iterable[str]) -> None:
        """Record a new group with workers on all of these nodes; for the leader."""
        view = frozenset(nodes)
        assert self.may_form(view)
        self._view = view
        self._clear -= view

    # Questions.

    @property
    def needs_timer(self) -> bool:
        """Whether :meth:`on_timeout` is due after a while without events."""
        return self.role in ("claiming", "waiting", "paused")

    def may_form(self, nodes: Iterable[str]) -> bool:
        """Return whether this node may form a group of workers on all of these nodes, now.

        If not: nodes outside of the node set must be admitted, nodes of the node set without workers in the group
        dismissed if they are half of it or more, and others must become clear.
        """
        view = frozenset(nodes)
        return (
            self.role == "leading"
            and self._proposal is None
            and view <= self._reachable_nodes
            and is_quorum(self._node_set, self._clear, self._holders)
            and meets_every_quorum(self._node_set, view, self.ties, self._holders)
        )

    # Messages.

    def _on_prepare(self, peer: str, claim: Prepare) -> None:
        if peer not in self._node_set.nodes or self.role == "out" or claim.term <= self.promised:
            self._refuse(peer, claim.term)
        elif self.leader not in (None, peer):
            self._held = claim
        else:
            self._obey(claim.term)
            self._send((peer,), Promise(claim.term, self._node_set, self.accepted))

    def _leaderless(self) -> None:
        """Handle the loss of the leader: promise a pending claim, or determine the next claimant."""
        self.leader = None
        self.role = "waiting"
        held, self._held = self._held, None
        if held and held.term > self.promised and held.term.node in self._reachable_nodes:
            self._on_prepare(held.term.node, held)
        else:
            self._seek()

    def _on_nack(self, peer: str, refusal: Nack) -> None:
        self._highest = max(self._highest, refusal.promised.number)
        if refusal.term != self.promised or peer not in self._node_set.nodes:
            return
        if self.role == "claiming":
            self._refused |= {peer}
            self._count()
        elif self.role == "leading" and refusal.promised > self.promised:
            # A node that will not follow this term; only a higher one can unite them.
            self._step_down()
            self._leaderless()

    def _on_accept(self, peer: str, proposal: Accept) -> None:
        if (
            proposal.term < self.promised
            or proposal.committed != self.committed
            or self.node not in self._node_set.nodes
        ):
            self._refuse(peer, proposal.term)
            return
        self._obey(proposal.term)
        self.accepted = Vote(proposal.term, proposal.node_set)
        self._send((peer,), Accepted(proposal.term, self._node_set, proposal.node_set.config_epoch))

    def _on_leader_heartbeat(self, peer: str, announced: LeaderHeartbeat) -> None:
        if self.role == "out":
            return
        if announced.term < self.promised or announced.committed != self.committed:
            self._refuse(peer, announced.term)
            return
        self._obey(announced.term)
        if announced.term.node not in self._node_set.nodes:
            self._leaderless()
            return
        self.role, self.leader = "following", peer
        self._do(Follow(announced.term, peer, self._node_set))

    def _obey(self, term: Term) -> None:
        """Promise a term, and follow no lower one, including this node's own."""
        if term == self.promised:
            return
        if self.role == "leading":
            self._step_down()
        self._promise(term)
        self.role = "waiting"
        self.leader = None
        self._drop_proposal()

    def _refuse(self, peer: str, term: Term) -> None:
        self._send((peer,), Nack(term, self._node_set, self.promised))

    def _adopt(self, node_set: NodeSet) -> None:
        """Learn that a node set is committed."""
        if self.committed is None:
            if self.node in node_set.nodes:
                self.role = "waiting"
                self._settle(node_set)
            return
        if node_set.config_epoch <= self.committed.config_epoch:
            return
        if self.role == "leading":
            self._step_down()
        self._settle(node_set)
        if self.node not in node_set.nodes:
            self._leave()
        elif self.role == "claiming":
            self._claim_further()
        elif self.leader is not None and self.leader not in node_set.nodes:
            self._leaderless()


# --- The membership that needs nothing but the agents and, for ties, a directory that they share ---


class PaxosMembership(Leadership):
    """A :class:`~paceline.elastic.consensus.membership.Membership` by votes of the agents.

    Args:
        node: this agent's name.
        acquire_witness: takes a node set's witness for some of its nodes; returns its holders, or None if the directory
            is not accessible.
    """

    def __init__(self, node: str, acquire_witness: Callable[[NodeSet, Nodes], Nodes | None]) -> None:
        super().__init__(node, ties=True)
        self._acquire_witness = acquire_witness

    def lost(self, peer: str, *, closed: bool = False) -> list[Action]:
        """Handle the end of a connection: a quorum decides, in whichever way it has ended."""
        return super().lost(peer)

    def intend(self, nodes: Iterable[str]) -> list[Action]:
        """Do nothing: a quorum that is clear is all that a group needs."""
        return []

    def close(self, *, is_over: bool) -> None:
        """Do nothing: witnesses stay for ever."""

    def perform(self, request: OwnAction) -> list[Action]:
        """Take a witness."""
        assert isinstance(request, AcquireWitness)
        return self.witness_answered(request.roster, self._acquire_witness(request.roster, request.holders))

    def may_exclude(self, nodes: Set[str]) -> bool:
        """Return whether the other nodes are in every quorum, so that these could not decide without them."""
        return meets_every_quorum(self._node_set, frozenset(self._node_set.nodes) - nodes, self.ties, None)
