"""Paxos over the set of nodes: who leads, and which nodes belong to the job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from paceline.elastic.consensus.messages import (
    NO_TERM,
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

# --- What one agent's :class:`~paceline.elastic.consensus.paxos.Leadership` asks its driver to do. No torch


@dataclass(frozen=True)
class Send:
    """Send this message to this node, over the link that stands."""

    to: str
    message: ElectionMessage


@dataclass(frozen=True)
class Lead:
    """This node leads from now on: coordinate the workers of the roster's nodes, once they have reported."""

    term: Term
    node_set: NodeSet


@dataclass(frozen=True)
class Committed:
    """This node leads still, and the roster has changed: views may be formed with the new one."""

    term: Term
    node_set: NodeSet


@dataclass(frozen=True)
class StopLeading:
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
    node_set: NodeSet


@dataclass(frozen=True)
class Pause:
    """Form no view: too few of the roster can be reached.

    Attributes:
        reason: for people: who is missing, and how many of how many are needed.
    """

    reason: str


@dataclass(frozen=True)
class AcquireWitness:
    """Take the lease of this roster for these of its nodes, and answer with ``witness_answered``."""

    roster: NodeSet
    holders: frozenset[str]


@dataclass(frozen=True)
class Out:
    """This node is in the roster no more: end its workers. It can join again under another name."""

    roster: NodeSet


Action = Send | Lead | Committed | StopLeading | Fence | Follow | Pause | AcquireWitness | Out


# --- What a node knows and has promised, and how votes are counted from where it stands. No torch ---


Role = Literal["outside", "waiting", "following", "claiming", "leading", "paused", "out"]
Nodes = frozenset[str]


@dataclass
class Acceptor:
    """The part of a :class:`~paceline.elastic.consensus.paxos.Leadership` that every node has.

    All values are replaced, never changed in place.

    Attributes:
        node: this agent's name.
        ties: whether there is a lease directory that all nodes share; without one, a tie pauses.
        role: ``outside`` until first admitted; ``waiting`` without a leader, for an earlier node to claim;
            ``out`` for ever, once left out.
        promised: the highest term that it has promised to follow.
        committed: the last roster that it knows to be agreed.
        accepted: what it has accepted to follow that one.
        leader: whom it follows; itself where it leads.
        reachable: the peers with which a link stands.
    """

    node: str
    ties: bool
    role: Role = "outside"
    promised: Term = NO_TERM
    committed: NodeSet | None = None
    accepted: Vote | None = None
    leader: str | None = None
    reachable: Nodes = frozenset()
    _refused: Nodes = frozenset()  # what this node claims
    _highest: int = 0  # term number heard of
    # The lease of `committed`.
    _holders: Nodes | None = None
    _witness_asked: bool = False
    _actions: tuple[Action, ...] = ()

    @property
    def _node_set(self) -> NodeSet:
        assert self.committed is not None
        return self.committed

    @property
    def _here(self) -> Nodes:
        """The nodes of the roster that can be reached, this one included."""
        return frozenset(self._node_set.nodes) & (self.reachable | {self.node})

    def _silent(self, answered: Nodes) -> Nodes:
        return self._here - answered - self._refused

    def _enough(self, nodes: Nodes) -> bool:
        """Whether these could be a quorum."""
        tie = 2 * len(nodes) == len(self._node_set.nodes)
        winnable = tie and self.ties and self._holders in (None, nodes)
        return winnable or is_quorum(self._node_set, nodes, self._holders)

    def _standing(self, voters: Nodes, lease: bool) -> Literal["quorum", "wait", "hopeless"]:
        """Whether these voters decide, or may yet, by further votes or by the lease, unless it failed."""
        voters &= frozenset(self._node_set.nodes)
        if is_quorum(self._node_set, voters, self._holders):
            return "quorum"
        silent = self._here - voters if self.role == "leading" else self._silent(voters)
        if silent:
            return "wait"
        if lease and self._holders is None and self._enough(voters):
            if not self._witness_asked:
                self._witness_asked = True
                self._do(AcquireWitness(self._node_set, voters))
            return "wait"
        return "hopeless"

    def _send(self, nodes: Iterable[str], message: ElectionMessage) -> None:
        for node in nodes:
            if node in self.reachable:
                self._do(Send(node, message))

    def _do(self, action: Action) -> None:
        self._actions += (action,)

    def _take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, ()
        return list(actions)


# --- How a node comes to lead, and how it changes the roster: the proposer's side. No torch ---


_NOBODY: Nodes = frozenset()


@dataclass
class Proposer(Acceptor):
    """The part of a :class:`~paceline.elastic.consensus.paxos.Leadership` that claims, leads and proposes."""

    # A claim: who has promised, and what each had accepted; who has refused.
    _promises: Mapping[str, Vote | None] = field(default_factory=dict)
    # A proposal in flight, and who has accepted it.
    _proposal: NodeSet | None = None
    _accepts: Nodes = _NOBODY
    # Leading: who is to come and go, who acts in no view, and the nodes of the view formed last.
    _admitted: tuple[str, ...] = ()
    _dismissed: Nodes = _NOBODY
    _clear: Nodes = _NOBODY
    _view: Nodes = _NOBODY
    _reason: str = ""

    # Without a leader.

    def _seek(self) -> None:
        """Claim where no earlier node can be reached that will."""
        here = self._here
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
        self._clear, self._view = _NOBODY, _NOBODY
        self._promises = {self.node: self.accepted}
        self._refused = _NOBODY
        self._drop_proposal()
        self._send(self._node_set.nodes, Prepare(self.promised, self._node_set))
        self._count()

    def _count(self, lease: bool = True) -> None:
        """See how far the claim is: lead, wait, or give up."""
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
                # It may be committed already: only this roster can follow.
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
        missing = [node for node in roster.nodes if node not in self._here]
        refused = [node for node in roster.nodes if node in self._refused & self._here]
        count, most = len(roster.nodes) - len(missing), len(roster.nodes)
        words = [f"{count} of {most} nodes are here, and more than half must agree"]
        words += [f"{', '.join(missing)} cannot be reached"] if missing else []
        words += [f"{', '.join(refused)} did not agree"] if refused else []
        if 2 * count == most and not self.ties:
            words.append("a tie, which only a directory that all nodes share could break")
        elif 2 * count == most and self._holders not in (None, self._here):
            words.append(f"a tie, which {', '.join(sorted(self._holders or ()))} won")
        return "; ".join(words)

    # Leading.

    def _lead(self) -> None:
        self.role = "leading"
        self.leader = self.node
        self._admitted, self._dismissed = (), _NOBODY
        self._do(Lead(self.promised, self._node_set))
        self._send(self.reachable, LeaderHeartbeat(self.promised, self._node_set))
        self._review()

    def _review(self, lease: bool = True) -> None:
        """Propose the next roster, if it is due and may be; resign where too few are left."""
        standing = self._standing(self._here, lease)
        if standing == "hopeless":
            self._pause()
        if standing != "quorum":
            return
        if self._proposal:
            self._tally(lease)
            return
        staying = [n for n in self._node_set.nodes if n in self._here and n not in self._dismissed]
        # The last one cannot go: a roster of nobody could never be followed by another.
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

    # Proposals, by who leads or claims.

    def _propose(self, roster: NodeSet) -> None:
        self._proposal = roster
        self.accepted = Vote(self.promised, roster)
        self._accepts = frozenset((self.node,))
        self._send(self._node_set.nodes, Accept(self.promised, self._node_set, roster))
        self._tally()

    def _tally(self, lease: bool = True) -> None:
        standing = self._standing(self._accepts, lease)
        if standing == "quorum":
            self._commit()
        elif standing == "hopeless":
            self._pause()

    def _commit(self) -> None:
        assert self._proposal is not None
        before, leading = self._node_set, self.role == "leading"
        self._settle(self._proposal)
        told = {*before.nodes, *self._node_set.nodes}
        if leading or self.node not in self._node_set.nodes:
            self._send(told, LeaderHeartbeat(self.promised, self._node_set))
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
        """The roster has moved on: its new nodes have to promise too."""
        asked = [node for node in self._node_set.nodes if node not in self._promises]
        self._send(asked, Prepare(self.promised, self._node_set))
        self._count()

    def _promise(self, term: Term) -> None:
        self.promised = term
        self._highest = max(self._highest, term.number)
        self._do(Fence(term))

    def _drop_proposal(self) -> None:
        self._proposal, self._accepts = None, _NOBODY

    def _settle(self, roster: NodeSet) -> None:
        self.committed = roster
        if self.accepted and self.accepted.node_set.config_epoch <= roster.config_epoch:
            self.accepted = None
        self._holders, self._witness_asked = None, False
        self._drop_proposal()

    def _leave(self) -> None:
        if self.role == "leading":
            self._do(StopLeading(self.promised))
        if self.role != "out":
            self._do(Out(self._node_set))
        self.role, self.leader = "out", None


# --- Who leads several agents, and which nodes there are, as a pure state machine: events in, actions out ---
#
# Each agent holds one :class:`Leadership`. It is Paxos with one instance for each roster: the acceptors of
# roster *g + 1* are the nodes of roster *g* (L. Lamport, D. Malkhi, L. Zhou, "Reconfiguring a State Machine",
# 2010, with a window of one). What is decided is only who is in the job, a few times an hour; what workers
# do is the leader's :class:`~paceline.elastic.coordinator.Coordinator`'s affair.
#
# - *Claim.* Who has lost the leader and is the first in the list that it can reach claims a term of its own;
#   a quorum must promise to follow no lower one. What they have accepted and may be committed, the claimant
#   has accepted again in its own term, before it leads.
# - *Stay.* A node that can reach its leader promises nothing to others before it loses it; a leader that
#   cannot reach a quorum resigns.
# - *Change.* The leader takes lost nodes out and admitted ones in, by one committed roster after the other.
# - *Views.* A view acts as long as all its nodes act in it, so it is dead for ever once one of them has left.
#   Nodes leave when they promise a higher term. A view is formed only where every quorum of the roster meets
#   it, and once a quorum is *clear*: acts in no older view. A roster is proposed only once a quorum is
#   clear, or where every quorum of it meets the view that may act. So nobody forms a view before a node of
#   any earlier one has left that.
#
# Time enters only as :meth:`Leadership.on_timeout`.


@dataclass
class Leadership(Proposer):
    """One agent's part; made by :meth:`found` or :meth:`outside`.

    Every event returns the actions to carry out, in order, before the next event.
    """

    _held: Prepare | None = None  # not answered yet, as there is a leader

    @classmethod
    def bootstrap(cls, node: str, *, ties: bool) -> tuple[Leadership, list[Action]]:
        """The first node of a job: it leads a roster of itself, and the others join through it."""
        self = cls(node, ties, promised=Term(1, node), committed=NodeSet(0, (node,)))
        self._lead()
        self._clear = frozenset((node,))
        return self, self._take_actions()

    @classmethod
    def outside(cls, node: str, *, ties: bool) -> Leadership:
        """A node that is to join; it learns who leads by :class:`Follow`."""
        return cls(node, ties)

    # Events.

    def linked(self, peer: str) -> list[Action]:
        """A new link with this peer stands; an earlier one was reported as lost."""
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
        """The link with this peer has ended, or was ended because nothing came over it for too long."""
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
        """A message has come over the link with this peer."""
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
        """:attr:`impatient` has been true, and nothing else has happened, for as long as one is to wait."""
        if self.role == "claiming":
            # Who has not answered yet is not waited for.
            silent = self._silent(self._accepts if self._proposal else frozenset(self._promises))
            self._refused |= silent
            self._count()
        elif self.role in ("waiting", "paused"):
            if self._enough(self._here):
                self._claim()
            else:
                self._pause()
        return self._take_actions()

    def witness_answered(self, roster: NodeSet, winners: Nodes | None) -> list[Action]:
        """Who holds the lease of this roster; None: the directory could not be reached."""
        if roster != self.committed or not self._witness_asked:
            return []
        self._witness_asked = False
        self._holders = winners
        if self.role == "leading":
            self._review(lease=winners is not None)
        elif self.role == "claiming":
            self._count(lease=winners is not None)
        return self._take_actions()

    def admit(self, node: str) -> list[Action]:
        """Leader: take this node into the roster, last in the list."""
        assert self.role == "leading"
        if node not in self._admitted and node not in self._node_set.nodes and node in self.reachable:
            self._admitted += (node,)
            self._review()
        return self._take_actions()

    def dismiss(self, node: str) -> list[Action]:
        """Leader: take this node out in good order; it may be the leader itself, unless it is the last."""
        assert self.role == "leading"
        self._admitted = tuple(n for n in self._admitted if n != node)
        self._dismissed |= {node}
        self._review()
        return self._take_actions()

    def clear(self, node: str) -> list[Action]:
        """Who leads, or claims to: no worker of this node acts in any view formed so far, nor will again.

        It must have promised the present term when it said so. Of a node that was ordered to form a view,
        only what it has said after that order counts, unless the order was lost with its link.
        """
        self._clear |= {node}
        if self.role == "leading":
            self._review()
        elif self.role == "claiming":
            self._count()
        return self._take_actions()

    def formed(self, nodes: Iterable[str]) -> None:
        """Leader: a view is formed now, of workers on all of these nodes."""
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
        """Whether this node may form a view of workers on all of these nodes, now.

        If not: nodes that are not in the roster must be admitted, nodes of the roster without workers in
        the view dismissed where they are half of it or more, and others must have become clear.
        """
        view = frozenset(nodes)
        return (
            self.role == "leading"
            and self._proposal is None
            and view <= self._here
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
        """The leader is lost: promise whoever has claimed already, or see who is to claim."""
        self.leader = None
        self.role = "waiting"
        held, self._held = self._held, None
        if held and held.term > self.promised and held.term.node in self._here:
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
            # A node of the roster that will not follow this term: only a higher one unites them.
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
        """Promise a term; nobody of a lower one is followed any more, this node itself included."""
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

    def _adopt(self, roster: NodeSet) -> None:
        """Learn that a roster is committed."""
        if self.committed is None:
            if self.node in roster.nodes:
                self.role = "waiting"
                self._settle(roster)
            return
        if roster.config_epoch <= self.committed.config_epoch:
            return
        if self.role == "leading":
            self._step_down()
        self._settle(roster)
        if self.node not in roster.nodes:
            self._leave()
        elif self.role == "claiming":
            self._claim_further()
        elif self.leader is not None and self.leader not in roster.nodes:
            self._leaderless()
