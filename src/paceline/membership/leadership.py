"""Who leads several agents, and which nodes there are, as a pure state machine: events in, actions out.

Each agent holds one :class:`Leadership`. It is Paxos with one instance for each roster: the acceptors of
roster *g + 1* are the nodes of roster *g* (L. Lamport, D. Malkhi, L. Zhou, "Reconfiguring a State Machine",
2010, with a window of one). What is decided is only who is in the job, a few times an hour; what workers
do is the leader's :class:`~paceline.membership.coordinator.Coordinator`'s affair.

- *Claim.* Who has lost the leader and is the first in the list that it can reach claims a term of its own;
  a quorum must promise to follow no lower one. What they have accepted and may be committed, the claimant
  has accepted again in its own term, before it leads.
- *Stay.* A node that can reach its leader promises nothing to others before it loses it; a leader that
  cannot reach a quorum resigns.
- *Change.* The leader takes lost nodes out and admitted ones in, by one committed roster after the other.
- *Views.* A view acts as long as all its nodes act in it, so it is dead for ever once one of them has left.
  Nodes leave when they promise a higher term. A view is formed only where every quorum of the roster meets
  it, and once a quorum is *clear*: acts in no older view. A roster is proposed only once a quorum is
  clear, or where every quorum of it meets the view that may act. So nobody forms a view before a node of
  any earlier one has left that.

Time enters only as :meth:`Leadership.patience_over`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.membership.acceptor import Nodes
from paceline.membership.proposer import Proposer
from paceline.membership.roster import Roster, Term, Vote, is_quorum, meets_every_quorum
from paceline.membership.succession import Action, Follow
from paceline.membership.votes import Accept, Announce, Claim, Message, Promise, Propose, Refuse, Resign


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

    def heard(self, peer: str, message: Message) -> list[Action]:
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
