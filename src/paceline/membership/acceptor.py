"""What a node knows and has promised, and how votes are counted from where it stands. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from paceline.membership.roster import NO_TERM, Roster, Term, Vote, is_quorum
from paceline.membership.succession import Action, Send, TakeLease
from paceline.membership.votes import Message

Role = Literal["outside", "waiting", "following", "claiming", "leading", "paused", "out"]
Nodes = frozenset[str]


@dataclass
class Acceptor:
    """The part of a :class:`~paceline.membership.leadership.Leadership` that every node has.

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

    def _send(self, nodes: Iterable[str], message: Message) -> None:
        for node in nodes:
            if node in self.reachable:
                self._do(Send(node, message))

    def _do(self, action: Action) -> None:
        self._actions += (action,)

    def _taken(self) -> list[Action]:
        actions, self._actions = self._actions, ()
        return list(actions)
