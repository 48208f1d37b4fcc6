"""The leader and the set of nodes by etcd's leases and transactions, without votes of the agents. No torch.

A job has three kinds of keys, below a prefix of its own:

- ``run``: the :class:`~paceline_etcd.client.EtcdRecord` with the term, the node set, and the nodes of the
  last group of workers. Every write is one transaction that fails if ``run`` or ``leader`` has changed since they were
  read, so there is one history of it, and a deposed leader cannot add to that.
- ``leader``: the leading node, bound to its etcd lease.
- ``nodes/NODE``: bound to that node's etcd lease.

The rules:

- *Lead.* A node that has lost the leader takes the lead, in a term one higher, once the leader's key has vanished, or
  the leader itself has closed its connection, as the kernel does for a process that was killed. A node that is only cut
  from the leader waits: the leader, which still has its key, removes it.
- *The larger part leads.* A leader that is cut from more of the nodes that etcd hears of than it reaches resigns, and a
  node takes the lead only if it reaches half of these.
- *Groups.* A group of workers acts as long as all its nodes act in it: once a node has left, it is dead for ever.
  Before the leader forms a group, it writes the group's nodes to ``run``, and it does so only once a node of the group
  written there before is *clear*: the node has promised this leader's term, and acts in no group. So a node of every
  earlier group has left it before a new group forms. Nothing here depends on clocks: etcd leases only decide when to
  try.
- *Without etcd* groups of the same nodes can still be formed, because ``run`` need not change; others wait.
"""

from __future__ import annotations

import math
import os
import selectors
import time
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec

from paceline.core.environment import EtcdEndpoints
from paceline.core.errors import ConfigError
from paceline.elastic.consensus.membership import (
    NOBODY,
    Action,
    CannotReform,
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
    NO_TERM,
    ElectionMessage,
    LeaderHeartbeat,
    Nack,
    NodeSet,
    StepDown,
    Term,
)
from paceline_etcd.client import (
    EtcdClient,
    EtcdCredentials,
    EtcdRecord,
    EtcdSession,
    EtcdSnapshot,
    EtcdUnavailableError,
    Operation,
    Read,
    Reply,
    Resign,
    Unavailable,
    Write,
)

_TICKS_LOSING = 2  # timeouts after the loss of a silent node in which others may be lost for the same reason
_TICKS_UNSEEN = 3  # timeouts after which a node that waits for a leader says so


@dataclass(frozen=True)
class Ask(OwnAction):
    """Execute this operation on the job's keys, and report the reply to :meth:`EtcdLeadership.answered`."""

    operation: Operation


# --- The state machine: events in, actions out. Pure ---


@dataclass
class EtcdLeadership(MembershipState):
    """One agent's part.

    Attributes:
        patience: timeouts for which a leader that reaches the smaller part of the nodes waits before it resigns.
    """

    patience: int = 5
    _seen: EtcdSnapshot = field(default_factory=EtcdSnapshot)
    _asks: bool = False  # an operation has no reply yet
    _trouble: str = ""  # why etcd does not answer
    _gone: Nodes = NOBODY  # peers that have closed their connection themselves
    _ticks: int = 0  # timeouts without another event
    # Leading: the nodes of the next group.
    _next_group: Nodes = NOBODY
    _unsure: frozenset[Nodes] = frozenset()  # groups that it has tried to write, and that may be written yet
    _is_short: bool = False  # it reaches the smaller part of the nodes
    _may_lose_more: bool = False  # a silent node was just lost

    # Events of the driver.

    def begin(self) -> list[Action]:
        """Write the job's record, and lead a node set of this node alone."""
        self.role = "claiming"
        self.committed = NodeSet(0, (self.node,))
        self._claim()
        return self._take_actions()

    def linked(self, peer: str) -> list[Action]:
        """Handle a new connection; an earlier one was reported as lost."""
        self.reachable |= {peer}
        self._gone -= {peer}
        if self.role == "leading":
            self._send((peer,), LeaderHeartbeat(self.promised, self._node_set))
        elif self.role in ("waiting", "paused"):
            self._ask(Read())
        return self._take_actions()

    def lost(self, peer: str, *, closed: bool = False) -> list[Action]:
        """Handle the end of a connection; ``closed``: the peer, or the kernel after its end, has closed it."""
        self.reachable -= {peer}
        if closed:
            self._gone |= {peer}
        if self.role == "leading":
            self._admitted = tuple(node for node in self._admitted if node != peer)
            self._ticks = 0
            # Cut links are noticed one after the other, and the first ones must not look like single losses.
            self._may_lose_more |= not closed
            self._review()
        elif self.leader == peer:
            self.leader = None
            if self.role != "outside":
                self._seek()
        elif self.role in ("waiting", "paused"):
            self._ask(Read())
        return self._take_actions()

    def heard(self, peer: str, message: ElectionMessage) -> list[Action]:
        match message:
            case LeaderHeartbeat(term, node_set):
                self._on_leader_heartbeat(peer, term, node_set)
            case StepDown(term):
                if self.leader == peer and term == self.promised and self.role == "following":
                    self.leader = None
                    self._seek()
            case Nack(term, _, promised):
                if self.role == "leading" and term == self.promised < promised:
                    self._ask(Read())
            case _:
                pass  # of agents that vote
        return self._take_actions()

    def on_timeout(self) -> list[Action]:
        """Read the keys again, and resign after a while with the smaller part of the nodes."""
        self._ticks = min(self._ticks + 1, max(self.patience, _TICKS_UNSEEN))
        if self.role == "leading" and self._is_short and self._ticks >= self.patience and not self._asks:
            self._step_down()
            self._ask(Resign())
        elif self.role not in ("out", "outside"):
            self._may_lose_more &= self._ticks < _TICKS_LOSING
            self._ask(Read())
        return self._take_actions()

    @property
    def needs_timer(self) -> bool:
        """Whether it waits for a key to change, or for etcd to answer."""
        waits = self.role in ("waiting", "claiming", "paused")
        return waits or (self.role == "leading" and bool(self._is_short or self._may_lose_more or self._trouble))

    # Replies of etcd.

    def answered(self, operation: Operation | None, reply: Reply) -> list[Action]:
        """Handle a reply, or what the session has noticed itself (``operation`` is None)."""
        if operation is not None:
            self._asks = False
        is_settled = False
        if isinstance(operation, Write) and isinstance(reply, EtcdSnapshot):
            is_settled, self._unsure = bool(self._unsure), frozenset()  # what is written excludes all that was tried
        if isinstance(reply, Unavailable):
            self._on_unavailable(reply.reason)
        elif reply.record is None and self.role == "leading":
            self._on_unavailable("etcd holds no record of this run any more")
        else:
            self._on_snapshot(reply, is_settled=is_settled)
        return self._take_actions()

    def _on_unavailable(self, reason: str) -> None:
        if self.role == "leading" and not self._trouble:
            self._do(CannotReform(f"{reason}. Training continues; no new worker group can form until it answers"))
        self._trouble = reason
        if self.role in ("waiting", "claiming", "paused"):
            self._pause(reason)

    def _on_snapshot(self, snapshot: EtcdSnapshot, *, is_settled: bool) -> None:
        if self._trouble:
            self._trouble = ""
            if self.role == "leading":
                self._do(CannotReform(""))
        before, self._seen = self._seen, snapshot
        record = snapshot.record
        if record is not None and self.role not in ("out", "outside"):
            if record.term > self.promised.number:
                self._on_term(record)
            elif self.role == "leading" and (record != before.record or is_settled):
                # Also if the record is as before: it was uncertain, and now it is known that a group may form.
                self._on_own_record(NodeSet(record.config_epoch, record.nodes))
            self._adopt(NodeSet(record.config_epoch, record.nodes))
        if self.role == "leading":
            self._review()
        elif self.role in ("waiting", "claiming", "paused"):
            self._consider()

    def _on_term(self, record: EtcdRecord) -> None:
        """Obey a higher term: of another leader, or this node's own."""
        if self.role == "leading":
            self._step_down()  # perhaps the other one does not know yet that it leads: it took its request for lost
        self._promise(Term(record.term, record.leader))
        if record.leader == self.node:
            self.role = "leading"
            self.leader = self.node
            self._admitted = ()
            self._dismissed = NOBODY
            self._clear = NOBODY
            self._next_group = NOBODY
            self._ticks = 0
            self._is_short = False
            self._may_lose_more = False
            self.committed = NodeSet(record.config_epoch, record.nodes)
            self._do(Lead(self.promised, self._node_set))
            self._send(self.reachable, LeaderHeartbeat(self.promised, self._node_set))
        else:
            self.role = "waiting"
            self.leader = None

    def _on_own_record(self, node_set: NodeSet) -> None:
        """Continue with what this leader has written."""
        if self.node not in node_set.nodes:
            self._send(self.reachable, LeaderHeartbeat(self.promised, node_set))
            self._ask(Resign())
            return
        if node_set != self._node_set:
            receivers = {*self._node_set.nodes, *node_set.nodes}
            self.committed = node_set
            self._admitted = tuple(node for node in self._admitted if node not in node_set.nodes)
            self._dismissed &= frozenset(node_set.nodes)
            self._send(receivers, LeaderHeartbeat(self.promised, node_set))
        self._do(Committed(self.promised, node_set))

    # Without a leader.

    def _seek(self) -> None:
        self.role = "waiting"
        self._ticks = 0
        self._ask(Read())

    def _consider(self) -> None:
        """Take the lead if this node may, and no earlier one will."""
        record, here = self._seen.record, self._reachable_nodes
        if record is None:
            if self.promised == NO_TERM and self.committed == NodeSet(0, (self.node,)):
                self._claim()
            else:
                self._pause("etcd holds no record of this run any more: it has ended, or its keys were deleted")
            return
        holder = self._seen.holder
        if holder not in ("", self.node, *self._gone):
            if self._ticks >= _TICKS_UNSEEN and holder not in self.reachable:
                self._pause(f"{holder} leads, and cannot be reached")
            return
        alive = (self._seen.alive - self._gone) & frozenset(self._node_set.nodes)
        if 2 * len(here) < len(alive | here):
            self._pause(f"this node reaches only {len(here)} of the {len(alive | here)} nodes that etcd hears of")
        elif record.group and not here & frozenset(record.group):
            self._pause(f"{', '.join(record.group)} trained last, and cannot be reached")
        elif self._ticks > 0 or next(node for node in record.nodes if node in here) == self.node:
            self._claim()
        else:
            self.role = "waiting"

    def _claim(self) -> None:
        record = self._seen.record or EtcdRecord(0, "", 0, (self.node,))
        self.role = "claiming"
        self._ask(Write(self._seen, msgspec.structs.replace(record, term=record.term + 1, leader=self.node)))

    def _pause(self, reason: str) -> None:
        self.leader = None
        if self.role != "paused" or reason != self._reason:
            self.role = "paused"
            self._reason = reason
            self._do(Pause(reason))

    # Following.

    def _on_leader_heartbeat(self, peer: str, term: Term, node_set: NodeSet) -> None:
        if self.role == "out":
            return
        if self.committed is None and self.node not in node_set.nodes:
            if self.leader != term.node:
                self.leader = term.node
                self._do(Follow(term, peer, node_set))
            return
        if term < self.promised:
            self._send((peer,), Nack(term, self.committed or node_set, self.promised))
            return
        if term > self.promised:
            if self.role == "leading":
                self._stop_leading()
            self._promise(term)
        self._adopt(node_set)
        if self.node not in self._node_set.nodes:
            return
        if term.node not in self._node_set.nodes:  # it has left
            self.leader = None
            self._seek()
        else:
            self.role = "following"
            self.leader = peer
            self._do(Follow(term, peer, self._node_set))

    def _adopt(self, node_set: NodeSet) -> None:
        """Learn that a node set is committed."""
        if self.committed is None:
            self.role = "waiting"
            self.committed = node_set
            self._ask(Read())  # which begins this node's session
        elif node_set.config_epoch > self.committed.config_epoch:
            self.committed = node_set
        if self.node not in self._node_set.nodes:
            if self.role == "leading":
                self._stop_leading()
            self.role = "out"
            self.leader = None
            self._do(Out(self._node_set))

    def _promise(self, term: Term) -> None:
        self.promised = term
        self._do(Fence(term))

    # Leading.

    def clear(self, node: str) -> list[Action]:
        """Record that no worker of this node acts, or will act, in any earlier group."""
        if node not in self._clear:
            self._clear |= {node}
            if self.role == "leading":
                self._review()
        return self._take_actions()

    def intend(self, nodes: Iterable[str]) -> list[Action]:
        """Write the nodes of the group that the leader wants to form next."""
        self._next_group = frozenset(nodes)
        if self.role == "leading":
            self._review()
        return self._take_actions()

    def may_form(self, nodes: Iterable[str]) -> bool:
        """Return whether this node may form a group of workers on all of these nodes, now."""
        group, record = frozenset(nodes), self._seen.record
        return (
            self.role == "leading"
            and record is not None
            and (record.term, record.leader) == (self.promised.number, self.node)
            and self._unsure <= {group}
            and group == frozenset(record.group)
            and group <= self._reachable_nodes
            and self._is_last_group_dead
        )

    def formed(self, nodes: Iterable[str]) -> None:
        """Record a new group with workers on all of these nodes."""
        group = frozenset(nodes)
        assert self.may_form(group)
        self._clear -= group

    def may_exclude(self, nodes: Set[str]) -> bool:
        """Return True: a node outside of the last group decides nothing."""
        return True

    @property
    def _is_last_group_dead(self) -> bool:
        record = self._seen.record
        return record is None or not record.group or bool(self._clear & frozenset(record.group))

    def _review(self) -> None:
        """Write the next record, if it differs."""
        record, here = self._seen.record, self._reachable_nodes
        if self._asks or self._trouble or self._may_lose_more or record is None:
            return
        before = self._node_set.nodes
        alive = (self._seen.alive - self._gone) & frozenset(before)
        self._is_short = 2 * len(here) < len(alive | here)
        if self._is_short:
            return
        staying = (node for node in before if node in here and node not in self._dismissed)
        # The last node cannot leave, because no node could add another one.
        nodes = (*staying, *self._admitted) or (self.node,)
        may_regroup = self._is_last_group_dead and self._next_group and self._next_group <= frozenset(nodes)
        following = EtcdRecord(
            term=self.promised.number,
            leader=self.node,
            config_epoch=record.config_epoch + (nodes != record.nodes),
            nodes=nodes,
            group=tuple(sorted(self._next_group)) if may_regroup else record.group,
        )
        if following != record or self._seen.holder != self.node or self._unsure:
            self._unsure |= {frozenset(following.group)}
            self._ask(Write(self._seen, following))

    def _stop_leading(self) -> None:
        self.role = "waiting"
        self.leader = None
        self._do(StopLeading(self.promised))

    def _step_down(self) -> None:
        self._stop_leading()
        self._ticks = 0
        self._send(self.reachable, StepDown(self.promised, self._node_set))

    # Actions.

    def _ask(self, operation: Operation) -> None:
        if not self._asks:
            self._asks = True
            self._do(Ask(operation))


# --- The state machine with its session ---


class EtcdMembership(EtcdLeadership):
    """A :class:`~paceline.elastic.consensus.membership.Membership` by etcd.

    Args:
        heartbeat_s: a node that is silent for this long counts as lost.
        answers_within_s: how long to wait for the cluster; 0: do not check.
        job: returns the name of the job's keys, which other nodes learn from the first one.
        act: executes the actions that follow from replies.

    Raises:
        ConfigError: the cluster does not answer, or rejects this user.
    """

    def __init__(
        self,
        node: str,
        coordinator: EtcdEndpoints,
        *,
        heartbeat_s: float,
        answers_within_s: float,
        job: Callable[[], str],
        selector: selectors.BaseSelector,
        act: Callable[[Sequence[Action]], None],
    ) -> None:
        ttl_s = math.ceil(heartbeat_s) + 2
        super().__init__(node, patience=ttl_s + 1)
        client = EtcdClient(coordinator, EtcdCredentials.from_environment(), min(2.0, max(1.0, ttl_s / 4)))
        if answers_within_s:
            _check(client, time.monotonic() + answers_within_s)
        self._job = job
        self._selector = selector
        self._act = act
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        selector.register(self._woken, selectors.EVENT_READ, self._on_replies)
        self._session = EtcdSession(client, node, ttl_s, partial(os.eventfd_write, self._woken, 1))

    def perform(self, request: OwnAction) -> list[Action]:
        """Have the session execute an operation."""
        assert isinstance(request, Ask)
        self._session.submit(request.operation, self._job())
        return []

    def close(self, *, is_over: bool) -> None:
        """End the session; delete the job's keys if this node leads and the job is over."""
        self._session.close(deletes=is_over and self.role == "leading")
        self._selector.unregister(self._woken)
        os.close(self._woken)

    def _on_replies(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._woken)
        for operation, reply in self._session.take_replies():
            self._act(self.answered(operation, reply))


def _check(client: EtcdClient, deadline: float) -> None:
    while True:
        try:
            client.check()
            return
        except EtcdUnavailableError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{error}. Check --coordinator, and the certificates that ETCDCTL_CACERT, ETCDCTL_CERT and "
                    "ETCDCTL_KEY name."
                ) from error
            time.sleep(0.5)
