"""Paxos over the set of nodes: who leads, and which nodes belong to the job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from paceline.elastic.consensus.messages import (
    NO_TERM,
    Accept,
    Announce,
    Claim,
    ElectionMessage,
    Promise,
    Propose,
    Refuse,
    Resign,
    Roster,
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
    committed: Roster | None = None
    accepted: Vote | None = None
    leader: str | None = None
    reachable: Nodes = frozenset()
    _refused: Nodes = frozenset()  # what this node claims
    _highest: int = 0  # term number heard of
    # The lease of `committed`.
    _winners: Nodes | None = None
    _lease_asked: bool = False
    _actions: tuple[Action, ...] = ()

    @property
    def _roster(self) -> Roster:
        assert self.committed is not None
        return self.committed

    @property
    def _here(self) -> Nodes:
        """The nodes of the roster that can be reached, this one included."""
        return frozenset(self._roster.nodes) & (self.reachable | {self.node})

    def _silent(self, answered: Nodes) -> Nodes:
        return self._here - answered - self._refused

    def _enough(self, nodes: Nodes) -> bool:
        """Whether these could be a quorum."""
        tie = 2 * len(nodes) == len(self._roster.nodes)
        winnable = tie and self.ties and self._winners in (None, nodes)
        return winnable or is_quorum(self._roster, nodes, self._winners)

    def _standing(self, voters: Nodes, lease: bool) -> Literal["quorum", "wait", "hopeless"]:
        """Whether these voters decide, or may yet, by further votes or by the lease, unless it failed."""
        voters &= frozenset(self._roster.nodes)
        if is_quorum(self._roster, voters, self._winners):
            return "quorum"
        silent = self._here - voters if self.role == "leading" else self._silent(voters)
        if silent:
            return "wait"
        if lease and self._winners is None and self._enough(voters):
            if not self._lease_asked:
                self._lease_asked = True
                self._do(TakeLease(self._roster, voters))
            return "wait"
        return "hopeless"

    def _send(self, nodes: Iterable[str], message: ElectionMessage) -> None:
        for node in nodes:
            if node in self.reachable:
                self._do(Send(node, message))

    def _do(self, action: Action) -> None:
        self._actions += (action,)

    def _taken(self) -> list[Action]:
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
    _proposal: Roster | None = None
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
        elif next(node for node in self._roster.nodes if node in here) == self.node:
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
        self._send(self._roster.nodes, Claim(self.promised, self._roster))
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
            following = self._roster.generation + 1
            votes = [v for v in self._promises.values() if v and v.roster.generation == following]
            if not votes:
                self._lead()
                return
            standing = self._standing(self._clear, lease)
            if standing == "quorum":
                # It may be committed already: only this roster can follow.
                self._propose(max(votes, key=lambda vote: vote.term).roster)
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
        roster = self._roster
        missing = [node for node in roster.nodes if node not in self._here]
        refused = [node for node in roster.nodes if node in self._refused & self._here]
        count, most = len(roster.nodes) - len(missing), len(roster.nodes)
        words = [f"{count} of {most} nodes are here, and more than half must agree"]
        words += [f"{', '.join(missing)} cannot be reached"] if missing else []
        words += [f"{', '.join(refused)} did not agree"] if refused else []
        if 2 * count == most and not self.ties:
            words.append("a tie, which only a directory that all nodes share could break")
        elif 2 * count == most and self._winners not in (None, self._here):
            words.append(f"a tie, which {', '.join(sorted(self._winners or ()))} won")
        return "; ".join(words)

    # Leading.

    def _lead(self) -> None:
        self.role = "leading"
        self.leader = self.node
        self._admitted, self._dismissed = (), _NOBODY
        self._do(Lead(self.promised, self._roster))
        self._send(self.reachable, Announce(self.promised, self._roster))
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
        staying = [n for n in self._roster.nodes if n in self._here and n not in self._dismissed]
        # The last one cannot go: a roster of nobody could never be followed by another.
        roster = Roster(self._roster.generation + 1, (*staying, *self._admitted) or (self.node,))
        if roster.nodes == self._roster.nodes:
            return
        still_met = self._view and meets_every_quorum(roster, self._view, self.ties, None)
        if still_met or is_quorum(self._roster, self._clear, self._winners):
            self._propose(roster)

    def _step_down(self) -> None:
        self.role = "waiting"
        self.leader = None
        self._drop_proposal()
        self._do(StepDown(self.promised))
        self._send(self._roster.nodes, Resign(self.promised, self._roster))

    # Proposals, by who leads or claims.

    def _propose(self, roster: Roster) -> None:
        self._proposal = roster
        self.accepted = Vote(self.promised, roster)
        self._accepts = frozenset((self.node,))
        self._send(self._roster.nodes, Propose(self.promised, self._roster, roster))
        self._tally()

    def _tally(self, lease: bool = True) -> None:
        standing = self._standing(self._accepts, lease)
        if standing == "quorum":
            self._commit()
        elif standing == "hopeless":
            self._pause()

    def _commit(self) -> None:
        assert self._proposal is not None
        before, leading = self._roster, self.role == "leading"
        self._settle(self._proposal)
        told = {*before.nodes, *self._roster.nodes}
        if leading or self.node not in self._roster.nodes:
            self._send(told, Announce(self.promised, self._roster))
        if self.node not in self._roster.nodes:
            self._leave()
        elif leading:
            nodes = frozenset(self._roster.nodes)
            self._admitted = tuple(node for node in self._admitted if node not in nodes)
            self._dismissed &= nodes
            self._clear &= nodes
            self._do(Committed(self.promised, self._roster))
            self._review()
        else:
            self._claim_further()

    def _claim_further(self) -> None:
        """The roster has moved on: its new nodes have to promise too."""
        asked = [node for node in self._roster.nodes if node not in self._promises]
        self._send(asked, Claim(self.promised, self._roster))
        self._count()

    def _promise(self, term: Term) -> None:
        self.promised = term
        self._highest = max(self._highest, term.number)
        self._do(Fence(term))

    def _drop_proposal(self) -> None:
        self._proposal, self._accepts = None, _NOBODY

    def _settle(self, roster: Roster) -> None:
        self.committed = roster
        if self.accepted and self.accepted.roster.generation <= roster.generation:
            self.accepted = None
        self._winners, self._lease_asked = None, False
        self._drop_proposal()

    def _leave(self) -> None:
        if self.role == "leading":
            self._do(StepDown(self.promised))
        if self.role != "out":
            self._do(Out(self._roster))
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
# Time enters only as :meth:`Leadership.patience_over`.


@dataclass
class Leadership(Proposer):
    """One agent's part; made by :meth:`found` or :meth:`outside`.

    Every event returns the actions to carry out, in order, before the next event.
    """

    _held: Claim | None = None  # not answered yet, as there is a leader

    @classmethod
    def found(cls, node: str, *, ties: bool) -> tuple[Leadership, list[Action]]:
        """The first node of a job: it leads a roster of itself, and the others join through it."""
        self = cls(node, ties, promised=Term(1, node), committed=Roster(0, (node,)))
        self._lead()
        self._clear = frozenset((node,))
        return self, self._taken()

    @classmethod
    def outside(cls, node: str, *, ties: bool) -> Leadership:
        """A node that is to join; it learns who leads by :class:`Follow`."""
        return cls(node, ties)

    # Events.

    def linked(self, peer: str) -> list[Action]:
        """A new link with this peer stands; an earlier one was reported as lost."""
        self.reachable |= {peer}
        if self.role == "leading":
            self._send((peer,), Announce(self.promised, self._roster))
            if self._proposal and peer in self._roster.nodes:
                self._send((peer,), Propose(self.promised, self._roster, self._proposal))
        elif self.role == "claiming" and peer in self._roster.nodes:
            self._refused -= {peer}
            self._send((peer,), Claim(self.promised, self._roster))
            if self._proposal:
                self._send((peer,), Propose(self.promised, self._roster, self._proposal))
        elif self.role in ("waiting", "paused"):
            self._seek()
        return self._taken()

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
        return self._taken()

    def heard(self, peer: str, message: ElectionMessage) -> list[Action]:
        """A message has come over the link with this peer."""
        self._adopt(message.committed)
        if self.committed is None:
            if isinstance(message, Announce) and self.leader != message.term.node:
                self.leader = message.term.node
                self._do(Follow(message.term, self.leader, message.committed))
            return self._taken()
        match message:
            case Claim():
                self._on_claim(peer, message)
            case Promise():
                if self.role == "claiming" and message.term == self.promised:
                    self._promises = {**self._promises, peer: message.accepted}
                    self._refused -= {peer}
                    self._count()
            case Refuse():
                self._on_refuse(peer, message)
            case Propose():
                self._on_propose(peer, message)
            case Accept(term, _, generation):
                if self._proposal and (term, generation) == (self.promised, self._proposal.generation):
                    self._accepts |= {peer}
                    self._tally()
            case Announce():
                self._on_announce(peer, message)
            case Resign(term):
                if self.role == "following" and term == self.promised:
                    self._leaderless()
        return self._taken()

    def patience_over(self) -> list[Action]:
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
        return self._taken()

    def lease_answered(self, roster: Roster, winners: Nodes | None) -> list[Action]:
        """Who holds the lease of this roster; None: the directory could not be reached."""
        if roster != self.committed or not self._lease_asked:
            return []
        self._lease_asked = False
        self._winners = winners
        if self.role == "leading":
            self._review(lease=winners is not None)
        elif self.role == "claiming":
            self._count(lease=winners is not None)
        return self._taken()

    def admit(self, node: str) -> list[Action]:
        """Leader: take this node into the roster, last in the list."""
        assert self.role == "leading"
        if node not in self._admitted and node not in self._roster.nodes and node in self.reachable:
            self._admitted += (node,)
            self._review()
        return self._taken()

    def dismiss(self, node: str) -> list[Action]:
        """Leader: take this node out in good order; it may be the leader itself, unless it is the last."""
        assert self.role == "leading"
        self._admitted = tuple(n for n in self._admitted if n != node)
        self._dismissed |= {node}
        self._review()
        return self._taken()

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
        return self._taken()

    def formed(self, nodes: Iterable[str]) -> None:
        """Leader: a view is formed now, of workers on all of these nodes."""
        view = frozenset(nodes)
        assert self.may_form(view)
        self._view = view
        self._clear -= view

    # Questions.

    @property
    def impatient(self) -> bool:
        """Whether :meth:`patience_over` is due after a while without events."""
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
            and is_quorum(self._roster, self._clear, self._winners)
            and meets_every_quorum(self._roster, view, self.ties, self._winners)
        )

    # Messages.

    def _on_claim(self, peer: str, claim: Claim) -> None:
        if peer not in self._roster.nodes or self.role == "out" or claim.term <= self.promised:
            self._refuse(peer, claim.term)
        elif self.leader not in (None, peer):
            self._held = claim
        else:
            self._obey(claim.term)
            self._send((peer,), Promise(claim.term, self._roster, self.accepted))

    def _leaderless(self) -> None:
        """The leader is lost: promise whoever has claimed already, or see who is to claim."""
        self.leader = None
        self.role = "waiting"
        held, self._held = self._held, None
        if held and held.term > self.promised and held.term.node in self._here:
            self._on_claim(held.term.node, held)
        else:
            self._seek()

    def _on_refuse(self, peer: str, refusal: Refuse) -> None:
        self._highest = max(self._highest, refusal.promised.number)
        if refusal.term != self.promised or peer not in self._roster.nodes:
            return
        if self.role == "claiming":
            self._refused |= {peer}
            self._count()
        elif self.role == "leading" and refusal.promised > self.promised:
            # A node of the roster that will not follow this term: only a higher one unites them.
            self._step_down()
            self._leaderless()

    def _on_propose(self, peer: str, proposal: Propose) -> None:
        if (
            proposal.term < self.promised
            or proposal.committed != self.committed
            or self.node not in self._roster.nodes
        ):
            self._refuse(peer, proposal.term)
            return
        self._obey(proposal.term)
        self.accepted = Vote(proposal.term, proposal.roster)
        self._send((peer,), Accept(proposal.term, self._roster, proposal.roster.generation))

    def _on_announce(self, peer: str, announced: Announce) -> None:
        if self.role == "out":
            return
        if announced.term < self.promised or announced.committed != self.committed:
            self._refuse(peer, announced.term)
            return
        self._obey(announced.term)
        if announced.term.node not in self._roster.nodes:
            self._leaderless()
            return
        self.role, self.leader = "following", peer
        self._do(Follow(announced.term, peer, self._roster))

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
        self._send((peer,), Refuse(term, self._roster, self.promised))

    def _adopt(self, roster: Roster) -> None:
        """Learn that a roster is committed."""
        if self.committed is None:
            if self.node in roster.nodes:
                self.role = "waiting"
                self._settle(roster)
            return
        if roster.generation <= self.committed.generation:
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
