"""One agent among several: it follows, or leads once a majority has agreed."""

from __future__ import annotations

import math
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from paceline.core.built_in import PARTS
from paceline.core.errors import ConfigError
from paceline.core.job import LaunchSpec
from paceline.core.plugins import import_object
from paceline.core.signals import ECHO_S, StopRequests
from paceline.core.standard_streams import print_status
from paceline.data.ledger import last_generation
from paceline.elastic.consensus.connectivity import LinkMap
from paceline.elastic.consensus.discovery import DiscoveryInfo, PeerDirectory
from paceline.elastic.consensus.membership import (
    Action,
    CannotReform,
    Committed,
    Fence,
    Follow,
    Lead,
    Membership,
    Out,
    OwnAction,
    Pause,
    Send,
    StopLeading,
)
from paceline.elastic.consensus.messages import (
    AddressBook,
    Excluded,
    JobFinished,
    MessageError,
    NodeCommand,
    NodeSet,
    PeersReached,
    Quiesced,
    Rejected,
    RemoteNode,
    Removed,
    SignalReceived,
    Term,
    WorkerEvent,
    WorkerList,
    read,
)
from paceline.elastic.consensus.paxos import PaxosMembership
from paceline.elastic.consensus.transport import PeerNetwork
from paceline.elastic.leader import MultiNodeLeader, make_planner
from paceline.elastic.node import Ended, NodeWorkers, Said
from paceline.elastic.worker_channel import GroupBroken
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import STOPPED, NodeRemovedError

# --- The follower: this node's workers obey the leader, which receives their reports. No torch


class Follower:
    """Follows successive leaders; for a while there may be none.

    Args:
        nproc: number of active workers on this node.
        peers: the other agents.
        clear: called with the term of this node's own agent, once no worker here acts in an earlier group.
    """

    def __init__(self, nproc: int, node: NodeWorkers, peers: PeerDirectory, clear: Callable[[Term], None]) -> None:
        self._nproc = nproc
        self._node = node
        self._peers = peers
        self._clear = clear
        self._followed: Term | None = None  # the term whose orders are obeyed
        self._fenced: Term | None = None  # the term whose node waits until no worker here acts
        self._buffered: list[Ended] = []

    def obey(self, peer: str, command: NodeCommand) -> None:
        """Execute an order, unless it has another term than the followed one."""
        if command.term == self._followed and peer == command.term.node:
            command.carry_out(self._node)

    def follow(self, term: Term, leader: str) -> None:
        """Report this node's workers to the leader, and obey it from now on."""
        self._followed = term
        rows = ((worker, generation, state) for worker, (generation, state) in self._node.workers.items())
        self._peers.send(leader, WorkerList(self._nproc, tuple(rows)))
        for end in self.drain_buffer():
            self._peers.send(leader, end)

    def fence(self, term: Term) -> None:
        """Make this node's workers leave their group; the term's node waits for the report."""
        self._fenced = term
        self._followed = None
        for worker, (generation, state) in self._node.workers.items():
            if state.status == "in_group":
                self._node.send(worker, GroupBroken(generation))
        self.report_quiesced()

    def report_quiesced(self) -> None:
        """Report, once true, that no worker here acts in a group."""
        if self._fenced is None or any(state.status == "in_group" for _, state in self._node.workers.values()):
            return
        term, self._fenced = self._fenced, None
        if term.node == self._peers.name:
            self._clear(term)
        else:
            self._peers.send(term.node, Quiesced(term))

    def buffer(self, end: Ended) -> None:
        """Keep the report of an exit until there is a leader."""
        self._buffered.append(end)

    def drain_buffer(self) -> list[Ended]:
        """Return and clear the buffered reports."""
        buffered, self._buffered = self._buffered, []
        return buffered


# --- The controller of one agent. No torch ---
#
# It executes the actions of a :class:`~paceline.elastic.consensus.membership.Membership`. If this agent leads, a
# :class:`~paceline.elastic.leader.MultiNodeLeader` decides for the workers of all nodes; if another one leads, this
# node's reports are forwarded to it, and its orders are obeyed.
# :class:`~paceline.elastic.consensus.discovery.PeerDirectory` knows the peers.


_TIMEOUT_S = 1.0
_SETTLE_S = 2.0  # nodes connect to the leader first, and to the others a little later
_ETCD_ANSWERS_S = 10.0  # at the start; longer than etcd needs to elect its own leader
_NUMBERS_A_TERM = 1 << 20  # worker numbers that one leader can assign
_GENERATIONS_A_LEADER = 10_000  # more than leaders form


class AgentController:
    """Connects an agent's node, its peers and the consensus.

    Args:
        spec: the job's, as given on this node.
        directory: the run's, shared by all nodes.
        discovery: the result of the search for the others.
        selector: of the agent's loop.

    Attributes:
        name: this agent's.
        nodes: the agreed set of nodes, in the order of succession.
        leader: decides for the workers of all nodes; None if this agent does not lead.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        directory: RunDirectory,
        node: NodeWorkers,
        discovery: DiscoveryInfo,
        selector: selectors.BaseSelector,
    ) -> None:
        self._spec = spec
        self._directory = directory
        self._node = node
        self.name = discovery.name
        self._network = PeerNetwork(
            selector, discovery.listener, discovery.token, discovery.hello, self, spec.recovery.heartbeat_s
        )
        self._peers = PeerDirectory(spec, directory, discovery, self._network, node.files)
        self._membership = self._make_membership(selector)
        self._pending: deque[Action] = deque()
        self._acting = False
        self._timeout_at = math.inf
        self._paused = ""
        self._links = LinkMap(self.name)
        self._links_changed = False  # since the excluded nodes were determined, or since the last report to the leader
        self._told: dict[str, tuple[str, ...]] = {}  # the last messages: excluded nodes, and which they cannot reach
        self._tell_at = math.inf
        self._start_by = math.inf
        self.leader: MultiNodeLeader | None = None
        self._follower = Follower(spec.local_world_size, node, self._peers, partial(self._cleared, self.name))
        self.nodes: tuple[str, ...] = (self.name,)
        self._is_joining = spec.placement.joins
        # Of the job before this one; a node that joins finds one that has begun.
        self._earlier_generation = -2 if spec.placement.joins else last_generation(directory.ledger)
        self._code: int | None = None
        self._is_dismissed = False  # whether this node will leave, as requested
        self._removed = ""  # why the other nodes have removed this one, so that it joins again
        self._requests = StopRequests(ECHO_S)  # Ctrl-C may reach the agents of all nodes
        self._stop_signal: int | None = None  # the stop signal of this node

    def _make_membership(self, selector: selectors.BaseSelector) -> Membership:
        if self._spec.recovery.coordinator is None:
            return PaxosMembership(self.name, self._peers.acquire_witness)
        etcd_membership: Callable[..., Membership] = import_object(PARTS["--coordinator"])
        return etcd_membership(
            self.name,
            self._spec.recovery.coordinator,
            heartbeat_s=self._spec.recovery.heartbeat_s,
            answers_within_s=0.0 if self._spec.placement.joins else _ETCD_ANSWERS_S,
            job=lambda: self._peers.job_key,
            selector=selector,
            act=self._act,
        )

    def close(self) -> None:
        """End all links to other agents."""
        self._network.close()
        self._membership.close(is_over=self._code is not None and self.leader is not None)

    def begin(self) -> None:
        """Start to lead, or connect to the leader."""
        self._peers.begin()
        if self._peers.is_first:
            self._start_by = time.monotonic() + self._spec.recovery.init_timeout_s
            self._act(self._membership.begin())

    # The end.

    @property
    def over(self) -> bool:
        """Whether the job has ended for this node."""
        return bool(self._removed) or self._code is not None or (self.leader is not None and self.leader.over)

    def conclude(self) -> int:
        """Print one message if the job failed; tell the other agents; return the exit code.

        Raises:
            NodeRemovedError: this node can join again.
        """
        if self._removed:
            raise NodeRemovedError(self._removed)
        if self._code is None:
            assert self.leader is not None
            self._code = self.leader.conclude()
            for peer in self._other_nodes:
                self._peers.send(peer, JobFinished(self._code))
        return self._code

    def signalled(self, number: int) -> None:
        """Handle a stop signal; Ctrl-C after another one ends the workers at once.

        In an elastic job this node leaves after a step, and the others continue.
        """
        if self.leader is not None:
            self._stop_signal = number
            self.leader.shutdown.signalled(number)
        elif self._membership.leader is not None:
            match self._requests.hear(number):
                case "first":
                    self._stop_signal = number
                    self._peers.send(self._membership.leader, SignalReceived(number))
                case "end":
                    self._node.kill_all("was ordered to end")
        else:
            self._leave("stopped, as requested, while waiting for other nodes.", 128 + number)

    def cancel(self) -> None:
        """Stop the job within the grace period."""
        if self.leader is not None:
            self.leader.shutdown.cancel()
        else:
            self._node.kill_all("was ordered to end")

    def _leave(self, why: str, code: int | None) -> None:
        self._node.kill_all("was ordered to end")
        if code is None and self._stop_signal is None:
            self._removed = why
            return
        print_status(why)
        requeue, interrupted = STOPPED
        code = code or 0
        if code == 0 and self._stop_signal is not None and not self._directory.has_result():
            code = interrupted if self._stop_signal == signal.SIGINT else requeue
        self._code = code

    # Timeouts.

    @property
    def deadline(self) -> float:
        """When :meth:`expire` is due, by the monotonic clock."""
        if self._links_changed:
            return 0.0
        leader = math.inf if self.leader is None else self.leader.deadline
        return min(leader, self._peers.deadline, self._timeout_at, self._tell_at, self._start_by)

    def expire(self, now: float) -> None:
        """Handle changed links, and the timeout of nodes that do not answer."""
        reason = self._peers.expire(now)
        if reason:
            self._leave(reason, 0 if self._spec.placement.joins and self._directory.has_result() else 2)
            return
        if self.leader is not None:
            self.leader.expire(now)
        if self._links_changed:
            self._links_changed = False
            self._review_links()
        if now >= self._tell_at:
            self._tell_at = math.inf
            self._settle_excluded()
        if now >= self._start_by:
            self._start_by = math.inf
            self._give_up_start()
        if now < self._timeout_at:
            return
        self._timeout_at = math.inf
        if self._membership.role == "paused":
            self._node.files.do_again(self._directory.has_result, self._on_result)
        self._act(self._membership.on_timeout())

    def _on_result(self, is_there: bool) -> None:
        if is_there and self._membership.role == "paused":
            self._leave("the other nodes have finished the run.", 0)

    def _give_up_start(self) -> None:
        """End the job on all its nodes, if there were too few for the first group all the time."""
        if self.leader is None or self.leader.planner.group is not None or not self.leader.planner.lacks_nodes:
            return
        cuts = [f"{name} and {', '.join(others)} cannot reach each other" for name, others in self._cut_from.items()]
        included = len(self.leader.planner.nodes.keys() - self.leader.planner.excluded)
        reason = (
            f"the run begins with {self._spec.nodes[0]} nodes (--nodes). After "
            f"{self._spec.recovery.init_timeout_s:g} s (--init-timeout), the number of nodes that all reach each "
            f"other is {included}{': ' if cuts else ''}{'; '.join(cuts)}. "
            "Start all nodes within that time, check the network between them, or begin with fewer: --nodes MIN:MAX."
        )
        for peer in self._other_nodes:
            self._peers.send(peer, Rejected(reason))
        self.leader.shutdown.kill_all()
        self._leave(reason, 2)

    # Reports of this node.

    def said(self, worker: int, message: Said) -> None:
        """Handle a worker's message."""
        if self.leader is not None:
            self.leader.said(worker, message)
            self._review()
        elif self._follows:
            self._peers.send(self._membership.leader, WorkerEvent(worker, message))
        self._follower.report_quiesced()

    def ended(self, end: Ended) -> None:
        """Handle the end of a worker's process."""
        if self.leader is not None:
            self.leader.ended(end)
            self._review()
        elif self._follows:
            self._peers.send(self._membership.leader, end)
        else:
            self._follower.buffer(end)
        self._follower.report_quiesced()

    @property
    def _follows(self) -> bool:
        """Whether another node's leader knows this node's workers."""
        return self.leader is None and self._membership.leader not in (None, self.name)

    # Events of the other agents.

    def linked(self, peer: str, hello: Mapping[str, Any]) -> None:
        """Handle a new connection."""
        if not self._peers.sees_directory_of(peer, hello):
            self._peers.drop(peer)
            return
        self._links_changed = True
        self._act(self._membership.linked(peer))

    def lost(self, peer: str, why: str, *, closed: bool = False) -> None:
        """Handle the end of a connection, or the timeout of a peer."""
        if self.leader is not None:
            self.leader.node_lost(peer, why)
            if peer not in self.nodes:  # otherwise once this agent knows that it still leads
                self._peers.remove(peer, self._other_nodes)
        self._links_changed = True
        self._links.reports.pop(peer, None)
        self._told.pop(peer, None)
        self._act(self._membership.lost(peer, closed=closed))
        if self._membership.role == "outside" and self._membership.leader is None:
            self._peers.look()

    def refused(self, why: str) -> None:
        """Report a rejected connection."""
        print_status(f"a connection was refused: {why}")

    def heard(self, peer: str, message: Mapping[str, Any]) -> None:
        """Handle a message."""
        try:
            content = read(message)
        except MessageError as error:
            # A peer that sends unreadable messages is dropped.
            self._peers.drop(peer)
            self.lost(peer, f"sent an unreadable message: {error}")
            return
        from_leader = peer == self._membership.leader
        match content:
            case NodeCommand():
                self._follower.obey(peer, content)
            case WorkerEvent() | Ended():
                self._on_report(peer, content)
            case WorkerList():
                self._on_workers(peer, content)
            case Quiesced(term):
                self._cleared(peer, term)
            case PeersReached(peers):
                self._links_changed = True
                self._links.reports[peer] = frozenset(peers)
            case Excluded(unreachable):
                if from_leader:
                    self._tell_excluded(unreachable)
            case SignalReceived(number):
                self._on_signalled(peer, number)
            case AddressBook():
                if from_leader:
                    self._peers.update(content)
            case JobFinished(code):
                if from_leader:
                    self._code = code
            case Removed():
                self._is_dismissed |= from_leader
            case Rejected(why):
                if from_leader:
                    self._leave(why, 2)
            case vote:
                self._act(self._membership.heard(peer, vote))

    def _cleared(self, peer: str, term: Term) -> None:
        """Record that a peer has promised this term, and none of its workers acts in an earlier group."""
        if self.leader is not None and peer in self.leader.planner.nodes_acting:
            return  # it was ordered to form a group after its report
        if term == self._membership.promised:
            self._act(self._membership.clear(peer))
            self._settle()

    def _on_workers(self, peer: str, workers: WorkerList) -> None:
        """Handle the list of a follower's workers, or of a node that wants to join."""
        if self.leader is None:
            return
        num_others = 0 if peer in self.nodes else len(self.leader.planner.nodes.keys() - {peer})
        reason = self._peers.rejection_reason(peer, num_others)
        if reason:
            self._peers.send(peer, Rejected(reason))
            return
        self.leader.planner.observe_generation(max((generation for _, generation, _ in workers.workers), default=-1))
        # The newcomer too, which connects to the earlier nodes, because they may outlive this leader together.
        self._peers.add(peer, self._other_nodes | {peer})
        if peer not in self.leader.planner.nodes:
            # A repeated list may be older than orders sent since.
            remote = RemoteNode(partial(self._peers.send, peer), self._membership.promised)
            states = {worker: state for worker, _, state in workers.workers}
            self._links_changed = True
            self.leader.node_joins(peer, remote, workers.nproc, states)
        self._settle()

    def _tell_excluded(self, unreachable: tuple[str, ...]) -> None:
        """Tell the user that this node is excluded, or no longer."""
        if unreachable:
            print_status(
                f"this node takes no part: it and {', '.join(unreachable)} cannot reach each other, and the largest "
                "set of nodes that all reach each other continues. It waits, and takes part again once they do."
            )
        else:
            print_status("this node takes part again.")

    def _on_report(self, peer: str, report: WorkerEvent | Ended) -> None:
        """Handle a follower's report of a worker."""
        if self.leader is None or peer not in self.leader.planner.nodes:
            return
        if isinstance(report, Ended):
            self.leader.ended(report)
        else:
            self.leader.said(report.worker, report.message)
        self._review()

    def _on_signalled(self, peer: str, number: int) -> None:
        """Handle a node's stop signal: the node leaves if enough others stay; else the job stops."""
        if self.leader is None:
            return
        elastic = self._spec.nodes[1] > self._spec.nodes[0]
        if elastic and len(self.leader.planner.nodes) > self._spec.least_nodes:
            with suppress(ConfigError):  # the job is ending anyway
                self.leader.retire([peer])
        else:
            self.leader.shutdown.signalled(number)

    # Changes of the node set.

    def _review(self) -> None:
        """Update the node set for changes of workers, if this agent leads.

        Nodes are admitted once they have workers that can take part, unless the run is ending. Retired nodes are
        removed once they act in no group, and get the order to end. That precedes the next group, which could not be
        formed without half of the node set.
        """
        if self.leader is not None and not self.leader.shutdown.is_final:
            for name in sorted(self.leader.planner.nodes_next - frozenset(self.nodes)):
                self._act(self._membership.admit(name))
        if self.leader is not None:
            is_leaving = self.leader.planner.is_leaving
            for name in [n for n in self.nodes if n != self.name and is_leaving(n)]:
                if self.leader is not None:
                    # Before it learns that it is no longer in the node set.
                    self._peers.send(name, Removed())
                    self._act(self._membership.dismiss(name))

    def _review_links(self) -> None:
        """Exclude the nodes outside of the largest set that is wholly connected, or report this node's links for that.

        Excluded nodes stay in the node set, and vote.
        """
        if self.leader is None:
            if self._membership.leader is not None:
                self._peers.send(self._membership.leader, PeersReached(tuple(sorted(self._membership.reachable))))
            return
        nodes = list(self.leader.planner.nodes)
        members = [name for name in self.nodes if name in nodes]
        self.leader.exclude(self._links.excluded(members, [name for name in nodes if name not in members]))
        self._review()
        self._settle()
        if self._cut_from != self._told:
            self._tell_at = min(self._tell_at, time.monotonic() + _SETTLE_S)

    @property
    def _cut_from(self) -> dict[str, tuple[str, ...]]:
        """The included nodes that each excluded one cannot reach."""
        if self.leader is None:
            return {}
        planner = self.leader.planner
        included = [name for name in planner.nodes if name not in planner.excluded]
        return {name: self._links.unreachable(name, included) for name in sorted(planner.excluded)}

    def _settle_excluded(self) -> None:
        """Tell excluded nodes that they are, and remove them if they could decide without the others."""
        cut_from = self._cut_from
        for name in [name for name in cut_from | self._told if cut_from.get(name) != self._told.get(name)]:
            unreachable = cut_from.get(name, ())
            self._peers.send(name, Excluded(unreachable))
            self._directory.queue_event("excluded" if unreachable else "included", node=name, cut=list(unreachable))
            if unreachable:
                print_status(f"{name} waits, because it and {', '.join(unreachable)} cannot reach each other.")
            else:
                print_status(f"{name} takes part again.")
        self._told = cut_from
        excluded = cut_from.keys() & frozenset(self.nodes)
        if self.leader is not None and not self._membership.may_exclude(excluded):
            for name in excluded:
                if self.leader is not None:
                    self._act(self._membership.dismiss(name))

    # Requests of the leader.

    @property
    def _other_nodes(self) -> frozenset[str]:
        """The other nodes that have joined this leader."""
        return frozenset(() if self.leader is None else self.leader.planner.nodes.keys() - {self.name})

    def may_form(self, nodes: frozenset[str]) -> bool:
        """Return whether a group of workers on these nodes may be formed now."""
        assert self.leader is not None
        if self._links_changed:
            return False  # not before the excluded nodes are known
        for name in self.leader.planner.nodes.keys() & frozenset(self.nodes) - self.leader.planner.nodes_acting:
            self._act(self._membership.clear(name))
        if nodes:
            self._act(self._membership.intend(nodes))
        return bool(nodes) and self._membership.may_form(nodes)

    def formed(self, nodes: frozenset[str]) -> None:
        """Record that it is formed."""
        self._membership.formed(nodes)

    def reject(self, node: str, why: str) -> None:
        """Remove a node, and send it the reason."""
        assert self.leader is not None
        self._peers.send(node, Rejected(why))
        self.leader.node_lost(node, f"was rejected: {why}")

    def _settle(self) -> None:
        if self.leader is not None:
            self.leader.form_group()

    # Actions of the consensus.

    def _act(self, actions: Sequence[Action]) -> None:
        """Execute actions in order, including those that follow from them."""
        self._pending.extend(actions)
        if self._acting:
            return
        self._acting = True
        try:
            while self._pending:
                self._carry_out(self._pending.popleft())
        finally:
            self._acting = False
        if not self._membership.needs_timer:
            self._timeout_at = math.inf
        elif self._timeout_at == math.inf:
            self._timeout_at = time.monotonic() + _TIMEOUT_S

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send(to, message):
                self._peers.send(to, message)
            case Lead(term, node_set):
                self._lead(term, node_set)
            case Committed(_, node_set):
                self._committed(node_set)
            case StopLeading():
                self.leader = None
            case Fence(term):
                self._follower.fence(term)
            case Follow(term, leader, node_set):
                self._follow(term, leader, node_set)
            case Pause(reason):
                self._pause(reason)
            case CannotReform(reason):
                self._directory.queue_event("coordinator", answers=not reason, why=reason)
                print_status(f"{reason}." if reason else "the coordinator answers again.")
            case OwnAction():
                self._act(self._membership.perform(action))
            case Out() if self._is_dismissed:
                self._leave("this node has left the run; the other nodes continue.", 0)
            case Out():
                self._leave(
                    "this node was removed from the run, because not all other nodes could reach it. They continue.",
                    None,
                )

    def _lead(self, term: Term, node_set: NodeSet) -> None:
        follows = term.number > 1
        workers = self._node.workers
        known = max([self._earlier_generation, *(seen for seen, _ in workers.values())])
        last: int | None = known
        if follows:
            # Not for longer, or the others elect another leader.
            last = self._peers.soon(term, partial(last_generation, self._directory.ledger), within_s=_TIMEOUT_S / 2)
        has_begun = max(known, -1 if last is None else last) > self._earlier_generation
        if last is None:  # then a number that no group of an earlier leader has
            last = known + _GENERATIONS_A_LEADER
        planner = make_planner(self._spec, last, workers.values())
        if follows:
            num_active = self._spec.local_world_size * len(node_set.nodes)
            planner.take_over(term.number * _NUMBERS_A_TERM, num_active, has_begun=has_begun)
            if not has_begun:
                self._start_by = min(self._start_by, time.monotonic() + self._spec.recovery.init_timeout_s)
            self._directory.queue_event("takeover", node=self.name, term=term.number)
        self.nodes = node_set.nodes
        self._links = LinkMap(self.name)
        self._told = {}
        self.leader = MultiNodeLeader(
            self._spec, self._directory, planner, self._node, self._peers.address, agents=self
        )
        self._peers.add_self()
        self._resumed()
        self.leader.node_joins(
            self.name, self._node, self._spec.local_world_size, {w: s for w, (_, s) in workers.items()}
        )
        for end in self._follower.drain_buffer():
            self.leader.ended(end)
        self._settle()

    def _committed(self, node_set: NodeSet) -> None:
        removed = set(self.nodes) - set(node_set.nodes)
        added = set(node_set.nodes) - set(self.nodes)
        self.nodes = node_set.nodes
        if removed or added:
            self._directory.queue_event("machines", nodes=list(node_set.nodes))
        self._resumed()
        for name in removed:
            if self.leader is not None:
                self.leader.node_lost(name, "has left, as asked")
            self._peers.remove(name, self._other_nodes)
        self._links_changed = True
        self._settle()

    def _follow(self, term: Term, leader: str, node_set: NodeSet) -> None:
        self.nodes = node_set.nodes
        self._peers.stop_looking()
        self._resumed()
        if self._is_joining and self.name in node_set.nodes:
            self._is_joining = False
            print_status("this node takes part in the run.")
        self._review_links()
        self._follower.follow(term, leader)

    def _pause(self, reason: str) -> None:
        self.leader = None
        if reason != self._paused:
            self._paused = reason
            self._directory.queue_event("paused", node=self.name, why=reason)
            print_status(f"the run pauses: {reason}.")

    def _resumed(self) -> None:
        if self._paused:
            self._paused = ""
            print_status("the run continues.")
