"""What the agents have agreed on, carried out: who leads the workers, and who is in the job. No torch.

The agreement itself is :class:`~paceline.membership.leadership.Leadership`, a pure state machine; here its
actions are done.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from paceline.agent.chronicle import record, say
from paceline.agent.company import Company
from paceline.agent.follower import Follower
from paceline.agent.leader import Leader
from paceline.agent.messages import SeenOff, SentHome, Workers
from paceline.agent.node import Node
from paceline.agent.remote_node import RemoteNode
from paceline.data.ledger import generations
from paceline.launchers.local.base import LocalSpec
from paceline.membership.coordinator import Coordinator
from paceline.membership.leadership import Leadership
from paceline.membership.roster import Roster, Term
from paceline.membership.succession import (
    Action,
    Committed,
    Fence,
    Follow,
    Lead,
    Out,
    Pause,
    Send,
    StepDown,
    TakeLease,
)
from paceline.membership.votes import Message
from paceline.run_directory import RunDirectory

_PATIENCE_S = 1.0
_NUMBERS_A_TERM = 1 << 20  # worker numbers that one leader can give


class Agreement:
    """One agent's part in it. A job on one machine is a roster of one, which agrees with itself at once.

    Args:
        spec: the job's, as this machine was given it.
        directory: the run's.
        node: this machine's workers.
        company: the other agents.
        leave: called with the reason and the exit code where this machine has no part in the job any more.

    Attributes:
        leader: decides for the workers of all nodes; None where this agent does not lead.
        follower: has this machine's workers obey where another agent leads.
        roster: the nodes of the job.
        is_seen_off: this node will leave, as it was asked to.
    """

    def __init__(
        self,
        spec: LocalSpec,
        directory: RunDirectory,
        node: Node,
        company: Company,
        leave: Callable[[str, int], None],
    ) -> None:
        self._spec, self._directory, self._node, self._company = spec, directory, node, company
        self._leave = leave
        self._name = company.name
        self._leadership = Leadership.outside(self._name, ties=True)
        self._pending: deque[Action] = deque()
        self._acting = False
        self._patience_at = math.inf
        self._paused = ""
        self.leader: Leader | None = None
        self.follower = Follower(spec.nproc, node, company, partial(self.clear, self._name))
        self.roster = Roster(0, (self._name,))
        self.is_seen_off = False

    def begin(self) -> None:
        """Lead, where this agent founds the job."""
        if self._company.founds:
            self._leadership, actions = Leadership.found(self._name, ties=True)
            self._act(actions)

    @property
    def leading_node(self) -> str | None:
        """The node whose agent leads; None where there is none, or it is not known."""
        return self._leadership.leader

    @property
    def deadline(self) -> float:
        """When :meth:`expire` is due, by the monotonic clock."""
        return self._patience_at

    def expire(self, now: float) -> None:
        """Wait no longer for who does not answer."""
        if now < self._patience_at:
            return
        self._patience_at = math.inf
        if self._leadership.role == "paused" and self._directory.result.is_file():
            self._leave("the other machines have finished the run.", 0)
            return
        self._act(self._leadership.patience_over())

    # What the other agents say.

    def linked(self, peer: str) -> None:
        """A link with this peer stands."""
        self._act(self._leadership.linked(peer))

    def lost(self, peer: str) -> None:
        """The link with this peer has ended."""
        self._act(self._leadership.lost(peer))

    def voted(self, peer: str, message: Message) -> None:
        """A peer has sent a message of the agreement's own."""
        self._act(self._leadership.heard(peer, message))

    def clear(self, peer: str, term: Term) -> None:
        """A peer has promised this term, and none of its workers acts in a view that was formed before."""
        if term == self._leadership.promised:
            self._act(self._leadership.clear(peer))
            self._settle()

    def reported(self, peer: str, workers: Workers) -> None:
        """A node that follows tells of its workers: one of the roster, or one that wants to join."""
        if self.leader is None:
            return
        others = 0 if peer in self.roster.nodes else len(self.leader.nodes - {peer})
        why = self._company.objection(peer, others)
        if why:
            self._company.send(peer, SentHome(why))
            return
        self.leader.coordinator.saw(max((generation for generation, _ in workers.seats.values()), default=-1))
        # The newcomer too: it is to link to those that came before it, who outlive this leader with it.
        self._company.enlist(peer, self.followers | {peer})
        if peer not in self.leader.nodes:
            # Told again, it may be older than what was ordered since.
            remote = RemoteNode(partial(self._company.send, peer), self._leadership.promised)
            seats = {worker: seat for worker, (_, seat) in workers.seats.items()}
            self.leader.node_joins(peer, remote, workers.nproc, seats)
        self._settle()

    # Who is in the roster.

    def review(self) -> None:
        """Have the roster follow what has become of workers; where this agent leads."""
        self._admit()
        self._see_off()

    def _admit(self) -> None:
        """Take nodes into the roster once they have workers to take part."""
        if self.leader is not None:
            for name in sorted(self.leader.coordinator.nodes_next - frozenset(self.roster.nodes)):
                self._act(self._leadership.admit(name))

    def _see_off(self) -> None:
        """Take nodes that were retired out of the roster, once they act in no view, and tell them to end.

        That comes before the next view is formed: a view without half of the roster could not be.
        """
        if self.leader is not None:
            is_leaving = self.leader.coordinator.is_leaving
            for name in [n for n in self.roster.nodes if n != self._name and is_leaving(n)]:
                if self.leader is not None:
                    # Before it learns that it is in the roster no more.
                    self._company.send(name, SeenOff())
                    self._act(self._leadership.dismiss(name))

    # What the leader asks.

    @property
    def followers(self) -> frozenset[str]:
        """The other nodes that have come to this leader."""
        return frozenset() if self.leader is None else self.leader.nodes - {self._name}

    def may_form(self, nodes: frozenset[str]) -> bool:
        """Whether a view of workers on these nodes may be formed now."""
        assert self.leader is not None
        for name in self.leader.nodes & frozenset(self.roster.nodes) - self.leader.coordinator.nodes_acting:
            self._act(self._leadership.clear(name))
        return bool(nodes) and self._leadership.may_form(nodes)

    def formed(self, nodes: frozenset[str]) -> None:
        """It is."""
        self._leadership.formed(nodes)

    def send_home(self, node: str, why: str) -> None:
        """Do without a node; this is told there."""
        assert self.leader is not None
        self._company.send(node, SentHome(why))
        self.leader.node_lost(node, f"was sent home: {why}")

    def _settle(self) -> None:
        if self.leader is not None:
            self.leader.settle()

    # What is agreed on.

    def _act(self, actions: Sequence[Action]) -> None:
        """Carry actions out in their order, also those that follow from them."""
        self._pending.extend(actions)
        if self._acting:
            return
        self._acting = True
        try:
            while self._pending:
                self._carry_out(self._pending.popleft())
        finally:
            self._acting = False
        if not self._leadership.impatient:
            self._patience_at = math.inf
        elif self._patience_at == math.inf:
            self._patience_at = time.monotonic() + _PATIENCE_S

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send(to, message):
                self._company.send(to, message)
            case Lead(term, roster):
                self._lead(term, roster)
            case Committed(_, roster):
                self._committed(roster)
            case StepDown():
                self.leader = None
            case Fence(term):
                self.follower.fence(term)
            case Follow(term, leader, roster):
                self._follow(term, leader, roster)
            case Pause(reason):
                self._pause(reason)
            case TakeLease(roster, winners):
                held_by = self._company.take_lease(roster, winners)
                self._act(self._leadership.lease_answered(roster, held_by))
            case Out() if self.is_seen_off:
                self._leave("this machine has left the run; the others go on.", 0)
            case Out():
                self._leave(
                    "this machine was left out of the run, as the others could not reach it. They go on; "
                    f"have it join again with: paceline join {self._directory.path}",
                    1,
                )

    def _lead(self, term: Term, roster: Roster) -> None:
        follows = term.number > 1
        seats = self._node.seats
        recorded = max(generations(self._directory.ledger), default=-1)
        coordinator = Coordinator(
            nodes={},
            most=self._spec.nproc * self._spec.nodes,
            generation=max([recorded, *(generation for generation, _ in seats.values())]),
            spares=self._spec.spares,
            first=self._spec.nodes,
            least=self._spec.least_nodes,
        )
        if follows:
            coordinator.take_over(term.number * _NUMBERS_A_TERM, self._spec.nproc * len(roster.nodes))
            record(self._directory, "takeover", node=self._name, term=term.number)
        self.roster = roster
        self.leader = Leader(
            self._spec, self._directory, coordinator, self, self._node, self._company.address, follows=follows
        )
        self._company.enlist_self()
        self._resumed()
        self.leader.node_joins(
            self._name, self._node, self._spec.nproc, {w: s for w, (_, s) in seats.items()}
        )
        for end in self.follower.take_kept():
            self.leader.ended(end)
        self._settle()

    def _committed(self, roster: Roster) -> None:
        gone = set(self.roster.nodes) - set(roster.nodes)
        came = set(roster.nodes) - set(self.roster.nodes)
        self.roster = roster
        if gone or came:
            record(self._directory, "machines", nodes=list(roster.nodes))
        self._resumed()
        for name in gone & (self.leader.nodes if self.leader is not None else frozenset()):
            assert self.leader is not None
            self.leader.node_lost(name, "has left, as asked")
        self._settle()

    def _follow(self, term: Term, leader: str, roster: Roster) -> None:
        self.roster = roster
        self._company.stop_looking()
        self._resumed()
        self.follower.follow(term, leader)

    def _pause(self, reason: str) -> None:
        self.leader = None
        if reason != self._paused:
            self._paused = reason
            record(self._directory, "paused", node=self._name, why=reason)
            say(f"the run pauses: {reason}.")

    def _resumed(self) -> None:
        if self._paused:
            self._paused = ""
            say("the run goes on.")
