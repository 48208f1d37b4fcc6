"""The following agent's part: this machine's workers obey whoever leads, and are told of there. No torch."""

from __future__ import annotations

from collections.abc import Callable

from paceline.agent.company import Company
from paceline.agent.messages import Clear, Ordered, Workers
from paceline.agent.node import Node
from paceline.agent.reports import Ended
from paceline.membership.channel import Broken
from paceline.membership.roster import Term


class Follower:
    """Of whoever leads, one after another; for a while, that may be nobody.

    Args:
        nproc: how many workers there shall be here for computing.
        node: this machine's workers.
        company: the other agents.
        clear: called with the term of this machine's own agent, once no worker here acts in an older view.
    """

    def __init__(self, nproc: int, node: Node, company: Company, clear: Callable[[Term], None]) -> None:
        self._nproc, self._node, self._company, self._clear = nproc, node, company, clear
        self._followed: Term | None = None  # whose orders are obeyed
        self._fenced: Term | None = None  # this term's node waits to hear that no worker of ours acts
        self._kept: list[Ended] = []

    def obey(self, peer: str, ordered: Ordered) -> None:
        """Carry out an order, unless it is of another term than the one that is followed."""
        if ordered.term == self._followed and peer == ordered.term.node:
            ordered.carry_out(self._node)

    def follow(self, term: Term, leader: str) -> None:
        """Tell the leader of our workers, and obey it from now on."""
        self._followed = term
        self._company.send(leader, Workers(self._nproc, self._node.seats))
        for end in self.take_kept():
            self._company.send(leader, end)

    def fence(self, term: Term) -> None:
        """Have our workers leave what view they are in; the term's node waits to hear of it."""
        self._fenced, self._followed = term, None
        for worker, (generation, seat) in self._node.seats.items():
            if seat.status == "member":
                self._node.tell(worker, Broken(generation))
        self.tell_if_clear()

    def tell_if_clear(self) -> None:
        """Tell who waits for it that no worker of ours acts in a view, once that is so."""
        if self._fenced is None or any(seat.status == "member" for _, seat in self._node.seats.values()):
            return
        term, self._fenced = self._fenced, None
        if term.node == self._company.name:
            self._clear(term)
        else:
            self._company.send(term.node, Clear(term))

    def keep(self, end: Ended) -> None:
        """Keep the report of an end until there is a leader to take it."""
        self._kept.append(end)

    def take_kept(self) -> list[Ended]:
        """The reports that were kept."""
        kept, self._kept = self._kept, []
        return kept
