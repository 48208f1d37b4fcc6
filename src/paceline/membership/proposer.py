"""How a node comes to lead, and how it changes the roster: the proposer's side. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.membership.acceptor import Acceptor, Nodes
from paceline.membership.roster import Roster, Term, Vote, is_quorum, meets_every_quorum
from paceline.membership.succession import Committed, Fence, Lead, Out, Pause, StepDown
from paceline.membership.votes import Announce, Claim, Propose, Resign

_NOBODY: Nodes = frozenset()


@dataclass
class Proposer(Acceptor):
    """The part of a :class:`~paceline.membership.leadership.Leadership` that claims, leads and proposes."""

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
