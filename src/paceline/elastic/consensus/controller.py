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

from paceline.core.errors import ConfigError
from paceline.core.launch_spec import LaunchSpec
from paceline.core.signals import ECHO_S, StopRequests
from paceline.elastic.consensus.discovery import DiscoveryInfo, PeerDirectory
from paceline.elastic.consensus.messages import (
    AddressBook,
    ElectionMessage,
    JobFinished,
    MessageError,
    NodeCommand,
    NodeSet,
    Quiesced,
    Rejected,
    Removed,
    SignalReceived,
    Term,
    WorkerEvent,
    WorkerList,
    read,
)
from paceline.elastic.consensus.paxos import (
    AcquireWitness,
    Action,
    Committed,
    Fence,
    Follow,
    Lead,
    Leadership,
    Out,
    Pause,
    Send,
    StopLeading,
)
from paceline.elastic.consensus.transport import PeerNetwork
from paceline.elastic.controller import JobController, append_event, make_coordinator, print_status
from paceline.elastic.node import Ended, NodeWorkers, Order, Said
from paceline.elastic.worker_channel import GroupBroken
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import STOPPED

# --- Another machine's node, as its leader sees it. No torch ---


class RemoteNode:
    """Takes :class:`~paceline.elastic.node.Orders` to the agent that carries them out.

    Args:
        send: over the link to that agent.
        term: the leader's.
    """

    def __init__(self, send: Callable[[NodeCommand], None], term: Term) -> None:
        self._send = send
        self._term = term

    def start(self, number: int, slot: int) -> None:
        """Start a worker."""
        self._send(NodeCommand(self._term, "start", (number, slot)))

    def send(self, number: int, order: Order) -> None:
        """Tell a worker something."""
        self._send(NodeCommand(self._term, "send", (number, order)))

    def kill(self, number: int, why: str) -> None:
        """Fence a worker."""
        self._send(NodeCommand(self._term, "kill", (number, why)))

    def stop(self, number: int) -> None:
        """Signal all workers."""
        self._send(NodeCommand(self._term, "stop", (number,)))

    def kill_all(self, why: str) -> None:
        """Kill all workers."""
        self._send(NodeCommand(self._term, "kill_all", (why,)))


# --- The following agent's part: this machine's workers obey whoever leads, and are told of there. No torch


class Follower:
    """Of whoever leads, one after another; for a while, that may be nobody.

    Args:
        nproc: how many workers there shall be here for computing.
        node: this machine's workers.
        company: the other agents.
        clear: called with the term of this machine's own agent, once no worker here acts in an older view.
    """

    def __init__(self, nproc: int, node: NodeWorkers, company: PeerDirectory, clear: Callable[[Term], None]) -> None:
        self._nproc, self._node, self._peers, self._clear = nproc, node, company, clear
        self._followed: Term | None = None  # whose orders are obeyed
        self._fenced: Term | None = None  # this term's node waits to hear that no worker of ours acts
        self._kept: list[Ended] = []

    def obey(self, peer: str, ordered: NodeCommand) -> None:
        """Carry out an order, unless it is of another term than the one that is followed."""
        if ordered.term == self._followed and peer == ordered.term.node:
            ordered.carry_out(self._node)

    def follow(self, term: Term, leader: str) -> None:
        """Tell the leader of our workers, and obey it from now on."""
        self._followed = term
        self._peers.send(leader, WorkerList(self._nproc, self._node.seats))
        for end in self.drain_buffer():
            self._peers.send(leader, end)

    def fence(self, term: Term) -> None:
        """Have our workers leave what view they are in; the term's node waits to hear of it."""
        self._fenced, self._followed = term, None
        for worker, (generation, seat) in self._node.seats.items():
            if seat.status == "member":
                self._node.send(worker, GroupBroken(generation))
        self.report_quiesced()

    def report_quiesced(self) -> None:
        """Tell who waits for it that no worker of ours acts in a view, once that is so."""
        if self._fenced is None or any(seat.status == "member" for _, seat in self._node.seats.values()):
            return
        term, self._fenced = self._fenced, None
        if term.node == self._peers.name:
            self._clear(term)
        else:
            self._peers.send(term.node, Quiesced(term))

    def buffer(self, end: Ended) -> None:
        """Keep the report of an end until there is a leader to take it."""
        self._kept.append(end)

    def drain_buffer(self) -> list[Ended]:
        """The reports that were kept."""
        kept, self._kept = self._kept, []
        return kept


# --- What the agents have agreed on, carried out: who leads the workers, and who is in the job. No torch ---
#
# The agreement itself is :class:`~paceline.elastic.consensus.paxos.Leadership`, a pure state machine; here
# its actions are done.


_PATIENCE_S = 1.0
_NUMBERS_A_TERM = 1 << 20  # worker numbers that one leader can give


class ConsensusDriver:
    """One agent's part in it.

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
        is_removed: this node will leave, as it was asked to.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        directory: RunDirectory,
        node: NodeWorkers,
        company: PeerDirectory,
        leave: Callable[[str, int], None],
    ) -> None:
        self._spec, self._directory, self._node, self._peers = spec, directory, node, company
        self._leave = leave
        self._name = company.name
        self._leadership = Leadership.outside(self._name, ties=True)
        self._pending: deque[Action] = deque()
        self._acting = False
        self._patience_at = math.inf
        self._paused = ""
        self.leader: JobController | None = None
        self.follower = Follower(spec.local_world_size, node, company, partial(self.clear, self._name))
        self.node_set = NodeSet(0, (self._name,))
        self.is_removed = False

    def begin(self) -> None:
        """Lead, where this agent founds the job."""
        if self._peers.is_first:
            self._leadership, actions = Leadership.bootstrap(self._name, ties=True)
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
        self._act(self._leadership.on_timeout())

    # What the other agents say.

    def linked(self, peer: str) -> None:
        """A link with this peer stands."""
        self._act(self._leadership.linked(peer))

    def lost(self, peer: str) -> None:
        """The link with this peer has ended."""
        self._act(self._leadership.lost(peer))

    def voted(self, peer: str, message: ElectionMessage) -> None:
        """A peer has sent a message of the agreement's own."""
        self._act(self._leadership.heard(peer, message))

    def clear(self, peer: str, term: Term) -> None:
        """A peer has promised this term, and none of its workers acts in a view that was formed before."""
        if term == self._leadership.promised:
            self._act(self._leadership.clear(peer))
            self._settle()

    def reported(self, peer: str, workers: WorkerList) -> None:
        """A node that follows tells of its workers: one of the roster, or one that wants to join."""
        if self.leader is None:
            return
        others = 0 if peer in self.node_set.nodes else len(self.leader.nodes - {peer})
        why = self._peers.rejection_reason(peer, others)
        if why:
            self._peers.send(peer, Rejected(why))
            return
        self.leader.coordinator.observe_view(max((generation for generation, _ in workers.seats.values()), default=-1))
        # The newcomer too: it is to link to those that came before it, who outlive this leader with it.
        self._peers.add(peer, self.followers | {peer})
        if peer not in self.leader.nodes:
            # Told again, it may be older than what was ordered since.
            remote = RemoteNode(partial(self._peers.send, peer), self._leadership.promised)
            seats = {worker: seat for worker, (_, seat) in workers.seats.items()}
            self.leader.node_joins(peer, remote, workers.nproc, seats)
        self._settle()

    # Who is in the roster.

    def review(self) -> None:
        """Have the roster follow what has become of workers; where this agent leads."""
        self._admit()
        self._remove()

    def _admit(self) -> None:
        """Take nodes into the roster once they have workers to take part."""
        if self.leader is not None:
            for name in sorted(self.leader.coordinator.nodes_next - frozenset(self.node_set.nodes)):
                self._act(self._leadership.admit(name))

    def _remove(self) -> None:
        """Take nodes that were retired out of the roster, once they act in no view, and tell them to end.

        That comes before the next view is formed: a view without half of the roster could not be.
        """
        if self.leader is not None:
            is_leaving = self.leader.coordinator.is_leaving
            for name in [n for n in self.node_set.nodes if n != self._name and is_leaving(n)]:
                if self.leader is not None:
                    # Before it learns that it is in the roster no more.
                    self._peers.send(name, Removed())
                    self._act(self._leadership.dismiss(name))

    # What the leader asks.

    @property
    def followers(self) -> frozenset[str]:
        """The other nodes that have come to this leader."""
        return frozenset() if self.leader is None else self.leader.nodes - {self._name}

    def may_form(self, nodes: frozenset[str]) -> bool:
        """Whether a view of workers on these nodes may be formed now."""
        assert self.leader is not None
        for name in self.leader.nodes & frozenset(self.node_set.nodes) - self.leader.coordinator.nodes_acting:
            self._act(self._leadership.clear(name))
        return bool(nodes) and self._leadership.may_form(nodes)

    def formed(self, nodes: frozenset[str]) -> None:
        """It is."""
        self._leadership.formed(nodes)

    def reject(self, node: str, why: str) -> None:
        """Do without a node; this is told there."""
        assert self.leader is not None
        self._peers.send(node, Rejected(why))
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
        if not self._leadership.needs_timer:
            self._patience_at = math.inf
        elif self._patience_at == math.inf:
            self._patience_at = time.monotonic() + _PATIENCE_S

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send(to, message):
                self._peers.send(to, message)
            case Lead(term, roster):
                self._lead(term, roster)
            case Committed(_, roster):
                self._committed(roster)
            case StopLeading():
                self.leader = None
            case Fence(term):
                self.follower.fence(term)
            case Follow(term, leader, roster):
                self._follow(term, leader, roster)
            case Pause(reason):
                self._pause(reason)
            case AcquireWitness(roster, winners):
                held_by = self._peers.acquire_witness(roster, winners)
                self._act(self._leadership.witness_answered(roster, held_by))
            case Out() if self.is_removed:
                self._leave("this machine has left the run; the others go on.", 0)
            case Out():
                self._leave(
                    "this machine was left out of the run, as the others could not reach it. They go on; "
                    f"have it join again with: paceline join {self._directory.path}",
                    1,
                )

    def _lead(self, term: Term, roster: NodeSet) -> None:
        follows = term.number > 1
        seats = self._node.seats
        coordinator = make_coordinator(self._spec, self._directory, seats.values())
        if follows:
            coordinator.take_over(term.number * _NUMBERS_A_TERM, self._spec.local_world_size * len(roster.nodes))
            append_event(self._directory, "takeover", node=self._name, term=term.number)
        self.node_set = roster
        self.leader = JobController(
            self._spec, self._directory, coordinator, self, self._node, self._peers.address, follows=follows
        )
        self._peers.add_self()
        self._resumed()
        self.leader.node_joins(
            self._name, self._node, self._spec.local_world_size, {w: s for w, (_, s) in seats.items()}
        )
        for end in self.follower.drain_buffer():
            self.leader.ended(end)
        self._settle()

    def _committed(self, roster: NodeSet) -> None:
        gone = set(self.node_set.nodes) - set(roster.nodes)
        came = set(roster.nodes) - set(self.node_set.nodes)
        self.node_set = roster
        if gone or came:
            append_event(self._directory, "machines", nodes=list(roster.nodes))
        self._resumed()
        for name in gone & (self.leader.nodes if self.leader is not None else frozenset()):
            assert self.leader is not None
            self.leader.node_lost(name, "has left, as asked")
        self._settle()

    def _follow(self, term: Term, leader: str, roster: NodeSet) -> None:
        self.node_set = roster
        self._peers.stop_looking()
        self._resumed()
        self.follower.follow(term, leader)

    def _pause(self, reason: str) -> None:
        self.leader = None
        if reason != self._paused:
            self._paused = reason
            append_event(self._directory, "paused", node=self._name, why=reason)
            print_status(f"the run pauses: {reason}.")

    def _resumed(self) -> None:
        if self._paused:
            self._paused = ""
            print_status("the run continues.")


# --- One agent among those of its job: what happens to it, and who has to know. No torch ---
#
# Where this agent leads, a :class:`~paceline.elastic.controller.Leader` decides for the workers of all nodes;
# where another one leads, what this machine's workers say is passed on to that one, and its orders are
# obeyed. Who leads is :class:`~paceline.elastic.consensus.controller.Agreement`'s affair, who belongs here
# :class:`~paceline.elastic.consensus.discovery.Company`'s.


class AgentController:
    """What an agent knows of the others, and does for them.

    Args:
        spec: the job's, as this machine was given it.
        directory: the run's; the same one on all machines.
        node: this machine's workers.
        meeting: how to meet the others.
        selector: of the agent's loop.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        directory: RunDirectory,
        node: NodeWorkers,
        meeting: DiscoveryInfo,
        selector: selectors.BaseSelector,
    ) -> None:
        self._spec, self._directory, self._node = spec, directory, node
        self._network = PeerNetwork(selector, meeting.listener, meeting.token, meeting.hello, self, spec.heartbeat_s)
        self._peers = PeerDirectory(spec, directory, meeting, self._network)
        self._consensus = ConsensusDriver(spec, directory, node, self._peers, self._leave)
        self._code: int | None = None
        self._requests = StopRequests(ECHO_S)  # Ctrl-C may reach the agents of all machines
        self._asked: int | None = None  # the signal that asked this machine to leave

    def begin(self) -> None:
        """Start to lead, or to look for the agent that does."""
        self._peers.begin()
        self._consensus.begin()

    def close(self) -> None:
        """End all links to other agents."""
        self._network.close()

    @property
    def name(self) -> str:
        """This agent's."""
        return self._peers.name

    @property
    def leader(self) -> JobController | None:
        """Decides for all workers; None where this agent does not."""
        return self._consensus.leader

    @property
    def nodes(self) -> tuple[str, ...]:
        """The machines that the agents have agreed on."""
        return self._consensus.node_set.nodes

    # The end.

    @property
    def over(self) -> bool:
        """Whether the job has ended, as far as this machine has a part in it."""
        return self._code is not None or (self.leader is not None and self.leader.over)

    def conclude(self) -> int:
        """Print one message if the job failed; tell the other agents; return the exit code."""
        if self._code is None:
            assert self.leader is not None
            self._code = self.leader.conclude()
            for peer in self._consensus.followers:
                self._peers.send(peer, JobFinished(self._code))
        return self._code

    def signalled(self, number: int) -> None:
        """A signal asks for a stop; Ctrl-C beside another, at once.

        Where machines may come and go, this one leaves after a step, and the others go on.
        """
        if self.leader is not None:
            self.leader.shutdown.signalled(number)
        elif self._consensus.leading_node is not None:
            match self._requests.hear(number):
                case "first":
                    self._asked = number
                    self._peers.send(self._consensus.leading_node, SignalReceived(number))
                case "end":
                    self._node.kill_all("was told to end")
        else:
            self._leave("stopped, as asked, while it waited for other machines.", 128 + number)

    def cancel(self) -> None:
        """Have the job stop, within the grace period."""
        if self.leader is not None:
            self.leader.shutdown.cancel()
        else:
            self._node.kill_all("was told to end")

    def _leave(self, why: str, code: int) -> None:
        print_status(why)
        self._node.kill_all("was told to end")
        requeue, interrupted = STOPPED
        if code == 0 and self._asked is not None and not self._directory.result.is_file():
            code = interrupted if self._asked == signal.SIGINT else requeue
        self._code = code

    # Time.

    @property
    def deadline(self) -> float:
        """When :meth:`expire` is due, by the monotonic clock."""
        leader = math.inf if self.leader is None else self.leader.deadline
        return min(leader, self._peers.deadline, self._consensus.deadline)

    def expire(self, now: float) -> None:
        """Do what is due."""
        why = self._peers.expire(now)
        if why:
            self._leave(why, 2)
            return
        if self.leader is not None:
            self.leader.expire(now)
        self._consensus.expire(now)

    # What this machine's node reports.

    def said(self, worker: int, message: Said) -> None:
        """A worker sent something."""
        if self.leader is not None:
            self.leader.said(worker, message)
            self._consensus.review()
        elif self._follows:
            self._peers.send(self._consensus.leading_node, WorkerEvent(worker, message))
        self._consensus.follower.report_quiesced()

    def ended(self, end: Ended) -> None:
        """A worker's process has ended."""
        if self.leader is not None:
            self.leader.ended(end)
            self._consensus.review()
        elif self._follows:
            self._peers.send(self._consensus.leading_node, end)
        else:
            self._consensus.follower.buffer(end)
        self._consensus.follower.report_quiesced()

    @property
    def _follows(self) -> bool:
        """Whether there is a leader elsewhere that knows of our workers."""
        return self.leader is None and self._consensus.leading_node not in (None, self.name)

    # What the other agents do.

    def linked(self, peer: str, hello: Mapping[str, Any]) -> None:
        """A link with this peer stands."""
        if self._peers.sees_directory_of(peer, hello):
            self._consensus.linked(peer)
        else:
            self._peers.drop(peer)

    def lost(self, peer: str, why: str) -> None:
        """The link has ended, or the peer was silent for too long."""
        if self.leader is not None:
            self.leader.node_lost(peer, why)
            self._peers.remove(peer, self._consensus.followers)
        self._consensus.lost(peer)

    def refused(self, why: str) -> None:
        """Somebody was sent away who does not belong here."""
        print_status(f"a connection was refused: {why}")

    def heard(self, peer: str, message: Mapping[str, Any]) -> None:
        """A message has come."""
        try:
            content = read(message)
        except MessageError as error:
            # Better without it.
            self._peers.drop(peer)
            self.lost(peer, f"sent what cannot be read: {error}")
            return
        from_leader = peer == self._consensus.leading_node
        match content:
            case NodeCommand():
                self._consensus.follower.obey(peer, content)
            case WorkerEvent() | Ended():
                self._on_report(peer, content)
            case WorkerList():
                self._consensus.reported(peer, content)
            case Quiesced(term):
                self._consensus.clear(peer, term)
            case SignalReceived(number):
                self._on_signalled(peer, number)
            case AddressBook():
                if from_leader:
                    self._peers.update(content)
            case JobFinished(code):
                if from_leader:
                    self._code = code
            case Removed():
                self._consensus.is_removed |= from_leader
            case Rejected(why):
                if from_leader:
                    self._leave(why, 2)
            case vote:
                self._consensus.voted(peer, vote)

    def _on_report(self, peer: str, report: WorkerEvent | Ended) -> None:
        """What became of a worker on a node that follows."""
        if self.leader is None or peer not in self.leader.nodes:
            return
        if isinstance(report, Ended):
            self.leader.ended(report)
        else:
            self.leader.said(report.worker, report.message)
        self._consensus.review()

    def _on_signalled(self, peer: str, number: int) -> None:
        """A machine was asked to stop: it leaves, where enough others stay; else the job stops."""
        if self.leader is None:
            return
        elastic = self._spec.nodes[1] > self._spec.nodes[0]
        if elastic and len(self.leader.nodes) > self._spec.least_nodes:
            with suppress(ConfigError):  # the job is ending anyway
                self.leader.retire([peer])
        else:
            self.leader.shutdown.signalled(number)
