"""Leads a job: which nodes take part, what is restarted, and how the job ends."""

from __future__ import annotations

import math
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from paceline.core.errors import ConfigError, RunDirectoryError
from paceline.core.launch_spec import LaunchSpec
from paceline.core.signals import ECHO_S, StopRequests, forwarded_signal
from paceline.core.sockets import LOOPBACK
from paceline.data.ledger import generations
from paceline.elastic.coordinator import (
    Action,
    BreakGroup,
    Coordinator,
    FormGroup,
    RequestReform,
    Start,
    StopWorker,
    WorkerGroup,
    WorkerSlot,
)
from paceline.elastic.failure_policy import FailurePolicy, RestartBudget, describe_end
from paceline.elastic.hang import Ask, Hang, HangDetector
from paceline.elastic.node import Ended, NodeCommands, NodeEvents, NodeWorkers, Order, Said
from paceline.elastic.worker_channel import (
    Assignment,
    ExitRequest,
    GroupBroken,
    Joined,
    Ready,
    ReformRequest,
    ReportRequest,
    StallSnapshot,
    WorkerHeartbeat,
)
from paceline.runs.directory import RunDirectory

# --- What is told of a job: what ended each view, who was lost, and how long it took to go on. No torch ---


def append_event(directory: RunDirectory, kind: str, **fields: object) -> None:
    """Note an event; a full disk is no reason to give up the workers."""
    with suppress(OSError):
        directory.append_event(kind, **fields)


def print_status(sentence: str) -> None:
    """Tell the user something; stderr may be a file on a full disk too."""
    with suppress(OSError):
        print(f"paceline: {sentence}", file=sys.stderr, flush=True)


class RecoveryLog:
    """Of the views that one leader forms.

    Args:
        directory: the run's.
        first: the job's first generation, which replaces no other; -1 where another agent has led before.
    """

    def __init__(self, directory: RunDirectory, first: int) -> None:
        self._directory, self._first = directory, first
        self._lost_at: float | None = None  # when the view was hit, or left, that is being replaced
        self._hit = False  # a worker or node was lost since the current view was formed
        self._asked_to_reform = -1  # the generation whose members were asked to leave it
        self._why = ""  # what the first member that left the current view said
        self._joined: set[int] = set()  # those of the current view's members that hold its state

    def record(self, kind: str, **fields: object) -> None:
        """Note an event."""
        append_event(self._directory, kind, **fields)

    def lost(self, since: float | None = None) -> None:
        """The view is hit, or left; by the monotonic clock, since when, if not now."""
        since = time.monotonic() if since is None else since
        self._lost_at = since if self._lost_at is None else min(since, self._lost_at)

    def hit(self) -> None:
        """A worker or node was lost."""
        self._hit = True

    def left(self, why: str) -> None:
        """A worker asks for a view, and says what made it leave its own."""
        self._why = self._why or why

    def asked_to_reform(self, generation: int) -> None:
        """The members of this view were asked to leave it."""
        self._asked_to_reform = generation

    def was_asked_to_reform(self, generation: int) -> bool:
        """Whether the members of this view were asked to leave it."""
        return self._asked_to_reform == generation

    def formed(self, view: WorkerGroup, slots: Sequence[int], nodes: Sequence[str], step: int) -> None:
        """A view is formed.

        Args:
            view: the view.
            slots: its members'.
            nodes: its members'.
            step: where they stand; -1 before they know.
        """
        if view.generation > self._first:
            self.record(
                "view",
                generation=view.generation,
                members=list(slots),
                world_size=len(view.members),
                computing=view.active,
                nodes=len(set(nodes)),
                why=self._why,
                recovery=self._hit or self._asked_to_reform != view.generation - 1,
                step=step,
                seconds=self._since_loss(),
            )
        self._joined.clear()
        self._why, self._hit = "", False

    def joined(self, view: WorkerGroup, worker: int, step: int) -> None:
        """A member of the current view holds its state."""
        self._joined.add(worker)
        if self.is_whole(view) and view.generation > self._first:
            self.record("joined", generation=view.generation, step=step, seconds=self._since_loss())
            self._lost_at = None

    def is_whole(self, view: WorkerGroup | None) -> bool:
        """Whether all members of the current view hold its state."""
        return view is not None and self._joined >= set(view.members)

    def _since_loss(self) -> float | None:
        return None if self._lost_at is None else round(time.monotonic() - self._lost_at, 4)


# --- The nodes of a job, as their leader gives them orders. No torch ---


class WorkerPool:
    """All workers of a job, on whichever node they are.

    Args:
        coordinator: knows where each of them is.

    Attributes:
        nodes: those that have come, by name.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.nodes: dict[str, NodeCommands] = {}
        self._took_part: set[str] = set()  # nodes with workers that were in a view

    def joins(self, name: str, node: NodeCommands, seats: Iterable[WorkerSlot]) -> None:
        """A node has come, with the workers that it has."""
        self.nodes[name] = node
        if any(seat.status != "starting" for seat in seats):
            self._took_part.add(name)

    def is_of_newcomer(self, worker: int) -> bool:
        """Whether a worker runs on a node that never took part, beside others that do."""
        at_work = self._took_part & self.nodes.keys()
        known = worker in self._coordinator.workers
        return known and bool(at_work) and self._coordinator.node(worker) not in at_work

    def start(self, worker: int, node: str, slot: int) -> None:
        """Start a worker."""
        self.nodes[node].start(worker, slot)

    def send(self, workers: Iterable[int], order: Order) -> None:
        """Tell workers something; those that have ended may be among them."""
        for worker in workers:
            if worker in self._coordinator.workers:
                self._node_of(worker).send(worker, order)

    def place(self, view: WorkerGroup, address: str, port: int) -> None:
        """Tell the members of a view to form it.

        Args:
            view: the view.
            address: of its store.
            port: of its store.
        """
        nodes = self.nodes_of(view)
        self._took_part.update(nodes)
        there: Counter[str] = Counter(nodes)
        so_far: Counter[str] = Counter()
        for rank, (worker, node) in enumerate(zip(view.members, nodes, strict=True)):
            place = Assignment(
                generation=view.generation,
                rank=rank,
                world_size=len(view.members),
                local_rank=so_far[node],
                local_world_size=there[node],
                active=view.active,
                address=address,
                port=port,
            )
            so_far[node] += 1
            self.nodes[node].send(worker, place)

    def nodes_of(self, view: WorkerGroup) -> list[str]:
        """Where the members of a new view are, by rank."""
        return [self._coordinator.node(worker) for worker in view.members]

    def kill(self, workers: Iterable[int], why: str) -> None:
        """Fence workers; those that have ended may be among them."""
        for worker in workers:
            if worker in self._coordinator.workers:
                self._node_of(worker).kill(worker, why)

    def stop(self, number: int) -> None:
        """Send all workers this signal, also those that are yet to be forked."""
        for node in self.nodes.values():
            node.stop(number)

    def kill_all(self, why: str) -> None:
        """Kill all workers."""
        for node in self.nodes.values():
            node.kill_all(why)

    def _node_of(self, worker: int) -> NodeCommands:
        return self.nodes[self._coordinator.node(worker)]


# --- Restart recovery: when one member of a view is lost, all others end with it. No torch ---


_WITH_PEERS = "ended with its peers"


class RestartAllPolicy:
    """Ends the members of a view together, and tells which ends are but one fault.

    Args:
        workforce: all workers.
    """

    def __init__(self, workforce: WorkerPool) -> None:
        self._pool = workforce
        self._generation = -1  # whose members are being killed, to be started again
        self._counted = -1  # whose fault was counted

    def end(self, generation: int, members: Iterable[int]) -> None:
        """Kill these members of a view: none of them may survive into the next one."""
        self._generation = generation
        self._pool.kill(members, _WITH_PEERS)

    def shares_fault(self, end: Ended, generation: int) -> bool:
        """Whether a worker ended because another one of the current view was lost."""
        with_peers = end.killed == _WITH_PEERS or (end.failure is not None and end.failure.victim)
        return self._generation == generation and with_peers

    def counts(self, generation: int) -> bool:
        """Whether a fault of this view is its first; the ends of the others belong to the same restart."""
        first = self._counted != generation
        self._counted = generation
        return first


# --- How a job is brought to its end before the work is done. No torch ---


class Shutdown:
    """Begins when somebody asks for it, or when the job has failed.

    Args:
        spec: the job's.
        workforce: who is to stop.
        coordinator: is to start nobody any more.

    Attributes:
        asked: the first signal; None where no signal asked.
        begun: whether the workers were told to stop.
        deadline: when :meth:`expire` is due, by the monotonic clock.
    """

    def __init__(self, spec: LaunchSpec, workforce: WorkerPool, coordinator: Coordinator) -> None:
        self._spec, self._pool, self._coordinator = spec, workforce, coordinator
        # Ctrl-C may reach the agents of all machines.
        self._requests = StopRequests(ECHO_S if spec.nodes[1] > 1 else 0.0)
        self.requested: int | None = None
        self.begun = False
        self.deadline = math.inf

    @property
    def is_final(self) -> bool:
        """Whether nobody is started any more: the workers were told to stop, or have begun to finish."""
        return self.begun or not self._coordinator.may_spawn

    def refuse_changes(self) -> None:
        """Refuse to let anybody join or leave a run that ends, or whose recovery does not allow it.

        Raises:
            ConfigError: says which.
        """
        if self.is_final:
            raise ConfigError("the run is ending, so nobody joins or leaves it any more.")
        if self._spec.recover != "inplace":
            raise ConfigError("with --recover restart nobody joins or leaves a run that is at work.")

    def signalled(self, number: int) -> None:
        """A signal asks the job to stop; Ctrl-C beside another, at once."""
        match self._requests.hear(number):
            case "first":
                self.requested = number
                self._stop(forwarded_signal(number))
            case "end":
                self.kill_all()

    def cancel(self) -> None:
        """Have the job stop, within the grace period."""
        self.requested = self.requested or signal.SIGTERM
        self.within_grace()

    def within_grace(self) -> None:
        """Have all workers stop, and kill who has not after the grace period."""
        self.deadline = time.monotonic() + self._spec.grace_s
        self._stop(signal.SIGTERM)

    def expire(self, now: float) -> None:
        """Kill who has not ended within the time given."""
        if now >= self.deadline:
            self.deadline = math.inf
            self.kill_all()

    def kill_all(self) -> None:
        """Kill all workers; nobody is started any more."""
        self.begun = True
        self._coordinator.may_spawn = False
        self._pool.kill_all("was told to end")

    def _stop(self, number: int) -> None:
        """Have all workers finish their step, save, and end; nobody is started any more."""
        self.begun = True
        self._coordinator.may_spawn = False
        self._pool.stop(number)


# --- The leading agent's part: it decides for the workers of all nodes, and judges how the job ends ---
#
# Who belongs to which view is decided by :class:`~paceline.elastic.coordinator.Coordinator`; here its
# actions become orders to the nodes, and what the nodes report becomes its events.


class Quorum(Protocol):
    """What the agents of a job have agreed on; on one node there is nothing to agree on."""

    def may_form(self, nodes: frozenset[str]) -> bool:
        """Whether a view of workers on these nodes may be formed now."""

    def formed(self, nodes: frozenset[str]) -> None:
        """It is."""

    def reject(self, node: str, why: str) -> None:
        """Do without a node; this is told there."""


class JobController:
    """Leads the workers of a job.

    Args:
        spec: the job's.
        directory: the run's.
        coordinator: decides; it knows no node yet.
        roster: when it may form a view.
        here: this machine's node; it serves the stores in which members meet.
        address: of this machine, where members on all nodes reach its stores.
        follows: another agent has led before this one.

    Attributes:
        coordinator: as given; others only ask it.
        judgement: what has become of workers so far.
        ending: brings the job to its end where somebody asks for that.
        chronicle: what has become of views.
        beats: each worker's last one.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        directory: RunDirectory,
        coordinator: Coordinator,
        roster: Quorum,
        here: NodeWorkers,
        address: str,
        *,
        follows: bool = False,
    ) -> None:
        self._spec, self._directory, self._quorum = spec, directory, roster
        self._here, self._address = here, address
        self._pool = WorkerPool(coordinator)
        self.shutdown = Shutdown(spec, self._pool, coordinator)
        self.recovery_log = RecoveryLog(directory, first=-1 if follows else coordinator.generation + 1)
        self.coordinator = coordinator
        self.failure_policy = FailurePolicy(directory, RestartBudget(spec.max_restarts, first=-1 if follows else None))
        self.beats: dict[int, WorkerHeartbeat] = {}
        self._hangs = HangDetector(directory)
        self._restart = RestartAllPolicy(self._pool)
        self._culprit_is_to_come = False  # the job ends, and whose fault it is nobody has said yet
        coordinator.hold()

    # Nodes.

    def node_joins(self, name: str, node: NodeCommands, nproc: int, seats: Mapping[int, WorkerSlot]) -> None:
        """A node has come, with the workers that it has."""
        self._pool.joins(name, node, seats.values())
        self.learn_microbatches()
        if self.shutdown.begun:
            node.stop(signal.SIGTERM)
        self._do(self.coordinator.node_joins(name, nproc, seats))

    def node_lost(self, name: str, why: str) -> None:
        """A node is gone, and all its workers with it."""
        if name not in self._pool.nodes:
            return
        self.recovery_log.hit()
        self.recovery_log.lost()
        self.recovery_log.record("node lost", node=name, why=why)
        actions = self.coordinator.node_lost(name)
        del self._pool.nodes[name]
        self._do(actions)

    @property
    def nodes(self) -> frozenset[str]:
        """All that have come."""
        return frozenset(self._pool.nodes)

    def learn_microbatches(self) -> None:
        """So many can compute; before the run is created, whoever begins it checks that they are not more."""
        with suppress(RunDirectoryError, KeyError, TypeError, ValueError):
            if self._directory.exists():
                self.coordinator.max_workers = int(self._directory.read_manifest()["config"]["microbatches"])

    def settle(self) -> None:
        """Form the next view, where one is due and the agents have agreed on its nodes."""
        if self._quorum.may_form(self.coordinator.nodes_next):
            actions = self.coordinator.release()
            self.coordinator.hold()
            self._do(actions)

    @property
    def deadline(self) -> float:
        """When :meth:`expire` is due, by the monotonic clock."""
        return min(self.shutdown.deadline, self._hangs.deadline)

    @property
    def over(self) -> bool:
        """Whether no worker is left."""
        return not self.coordinator.workers

    def expire(self, now: float) -> None:
        """Kill who has not ended within the time given, and who holds the others up."""
        self.shutdown.expire(now)
        match self._hangs.poll():
            case Ask(workers):
                self._pool.send(workers, ReportRequest())
            case Hang() as hang:
                self._on_hang(hang)

    def _on_hang(self, hang: Hang) -> None:
        if not hang.culprits:
            self.failure_policy.reason = hang.sentence  # it would happen again
            self.shutdown.kill_all()
            return
        print_status(hang.sentence)
        for worker, why in hang.culprits.items():
            self._pool.kill((worker,), why)

    def conclude(self) -> int:
        """Print one message if the job failed; return its exit code."""
        return self.failure_policy.conclude(self.shutdown.requested)

    # What the nodes report.

    def said(self, worker: int, message: Said) -> None:
        """A worker sent something."""
        match message:
            case WorkerHeartbeat(step, overdue=overdue):
                self.failure_policy.budget.stands_at(step)
                self.beats[worker] = message
                self._hangs.beats(worker, overdue=overdue)
            case StallSnapshot():
                self._hangs.answers(worker, message)
            case Ready(_, why):
                if worker in self.coordinator.members():
                    self.recovery_log.lost()
                self.recovery_log.left(why)
                if self._spec.recover == "restart" and self._has_lost_a_peer(worker):
                    # It must not be a survivor of the next view; its end breaks this one for the others too.
                    self._restart.end(self.coordinator.generation, (worker,))
                    return
                self._do(self.coordinator.waits(worker))
                self.settle()
            case Joined(generation):
                view = self.coordinator.group
                if view is not None and view.generation == generation:
                    self.recovery_log.joined(view, worker, self._step_of(worker))

    def _has_lost_a_peer(self, worker: int) -> bool:
        """Whether a worker has left the current view though nobody asked it to."""
        left_unasked = not self.recovery_log.was_asked_to_reform(self.coordinator.generation)
        return self.coordinator.may_spawn and worker in self.coordinator.members() and left_unasked

    def ended(self, end: Ended) -> None:
        """A worker's process has ended."""
        self.beats.pop(end.worker, None)
        if end.retired and end.code == 0:
            self.recovery_log.record("retired", slot=end.local_index, pid=end.pid, step=end.step)
            self._do(self.coordinator.exited(end.worker))
        else:
            self._judge(end)
        self.settle()

    def _judge(self, end: Ended) -> None:
        newcomer = self._pool.is_of_newcomer(end.worker)
        match self.failure_policy.classify(end, stopping=self.shutdown.begun, newcomer=newcomer):
            case "done":
                self._hangs.finishes(end.worker)
                self._do(self.coordinator.done(end.worker))
                if not self.coordinator.members():
                    # Only spares are left, and nothing is left for them to do.
                    self.shutdown.kill_all()
                return
            case "unfit":
                self._quorum.reject(self.coordinator.node(end.worker), self.failure_policy.rejection_message(end))
                return
            case "fault":
                self._fault(end)
            case "fatal" if not self.shutdown.begun:
                self.shutdown.within_grace()
        self._do(self.coordinator.exited(end.worker))

    def _fault(self, end: Ended) -> None:
        generation, again = self.coordinator.generation, False
        shared = self._restart.shares_fault(end, generation)
        if self._spec.recover == "restart" and end.worker in self.coordinator.members():
            # A peer may tell of a fault, and all be killed, before the culprit has come to its end.
            again = not self._restart.counts(generation)
        if shared and again:
            return
        if not shared:
            self.recovery_log.hit()
            if end.worker in self.coordinator.members():
                # A silent member was lost when it was last heard, not when its node lost patience.
                self.recovery_log.lost(time.monotonic() - (end.silent_s if end.killed else 0.0))
            self.recovery_log.record("fault", slot=end.local_index, pid=end.pid, how=describe_end(end), step=end.step)
        view, hiring = self.coordinator.group, self.coordinator.may_spawn
        if not self.failure_policy.may_go_on(end, view, hiring=hiring, again=again, shared=shared):
            self._culprit_is_to_come = shared
            if not self.shutdown.begun:
                self.shutdown.within_grace()

    def _step_of(self, worker: int) -> int:
        return self.beats[worker].step if worker in self.beats else -1

    # What other commands ask.

    def resize(self, wanted: Mapping[str, int], **event: object) -> None:
        """Want so many workers on these nodes; who joins or leaves does so after a step.

        Raises:
            ConfigError: the job is ending, or they cannot.
        """
        self.shutdown.refuse_changes()
        self.recovery_log.record("scale", **event, step=self.failure_policy.budget.step)
        for name, nproc in wanted.items():
            self._do(self.coordinator.resize(name, nproc))
        self.settle()

    def retire(self, nodes: Collection[str]) -> None:
        """Have all workers of these nodes leave, after a step.

        Raises:
            ConfigError: the job is ending, or they cannot.
        """
        self.resize(dict.fromkeys(nodes, 0), nodes=len(self.coordinator.nodes) - len(nodes))

    def gather(self) -> None:
        """Train on only once all that there should be take part."""
        self.recovery_log.record("gather", step=self.failure_policy.budget.step)
        self._do(self.coordinator.gather())
        self.settle()

    # What the coordinator decides.

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Start(worker, node, slot):
                    self._pool.start(worker, node, slot)
                case FormGroup(view):
                    self._form(view)
                case RequestReform(view):
                    self.recovery_log.asked_to_reform(view.generation)
                    self._pool.send(view.members, ReformRequest(view.generation))
                case BreakGroup(generation, members):
                    self._break(generation, members)
                case StopWorker(worker):
                    self._pool.send((worker,), ExitRequest())

    def _break(self, generation: int, members: tuple[int, ...]) -> None:
        self.recovery_log.lost()
        self._hangs.forget()
        # Those who wait in the store for one who is gone are freed by its end.
        self._here.close_store(generation)
        if self._spec.recover == "inplace":
            self._pool.send(members, GroupBroken(generation))
        elif not self._culprit_is_to_come:
            self._restart.end(generation, members)

    def _form(self, view: WorkerGroup) -> None:
        nodes = self._pool.nodes_of(view)
        slots = [self.coordinator.local_index(worker) for worker in view.members]
        step = max(self._step_of(worker) for worker in view.members)
        self._quorum.formed(frozenset(nodes))
        self._here.close_store(view.generation - 1)
        self.recovery_log.formed(view, slots, nodes, step)
        self._hangs.forms(view, nodes)
        port = self._here.open_store(view.generation, self._address)
        self._pool.place(view, self._address, port)


def make_coordinator(spec: LaunchSpec, directory: RunDirectory, seats: Iterable[tuple[int, WorkerSlot]]) -> Coordinator:
    """A coordinator that knows no node yet, and continues after the last group that was ever formed.

    Args:
        spec: the job's.
        directory: the run's.
        seats: workers that run already, each with the generation of the group that it was in last.
    """
    recorded = max(generations(directory.ledger), default=-1)
    return Coordinator(
        nodes={},
        max_workers=spec.local_world_size * spec.nodes[0],
        generation=max([recorded, *(generation for generation, _ in seats)]),
        spares=spec.spares,
        initial_nodes=spec.nodes[0],
        min_nodes=spec.least_nodes,
    )


# --- What an agent does for its job: lead it alone, where there is one node, or with the agents of other nodes ---


class Controller(NodeEvents, Protocol):
    """Decides for an agent's workers, or has another node's agent decide."""

    @property
    def name(self) -> str:
        """This agent's."""

    @property
    def leader(self) -> JobController | None:
        """Decides for all workers; None where another agent does."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of the job, in the order in which they came."""

    @property
    def over(self) -> bool:
        """Whether the job has ended, as far as this node has a part in it."""

    @property
    def deadline(self) -> float:
        """When :meth:`expire` is due, by the monotonic clock."""

    def begin(self) -> None:
        """Start to lead, or to look for the agent that does."""

    def expire(self, now: float) -> None:
        """Do what is due."""

    def signalled(self, number: int) -> None:
        """A signal asks for a stop; Ctrl-C beside another, at once."""

    def cancel(self) -> None:
        """Have the job stop, within the grace period."""

    def conclude(self) -> int:
        """Print one message if the job failed; return the exit code."""

    def close(self) -> None:
        """End all links to other agents."""


class SingleNodeController:
    """Leads a job that has this node only, from its start to its end.

    Args:
        spec: the job's.
        directory: the run's.
        node: this node's workers.
    """

    def __init__(self, spec: LaunchSpec, directory: RunDirectory, node: NodeWorkers) -> None:
        self._nproc, self._node = spec.local_world_size, node
        self.name = socket.gethostname()
        self.nodes = (self.name,)
        self.leader = JobController(spec, directory, make_coordinator(spec, directory, ()), self, node, LOOPBACK)

    def begin(self) -> None:
        """Start the workers."""
        self.leader.node_joins(self.name, self._node, self._nproc, {})
        self.leader.settle()

    def close(self) -> None:
        """There are no links."""

    # What the agent asks.

    @property
    def over(self) -> bool:
        """Whether no worker is left."""
        return self.leader.over

    @property
    def deadline(self) -> float:
        """When :meth:`expire` is due, by the monotonic clock."""
        return self.leader.deadline

    def expire(self, now: float) -> None:
        """Do what is due."""
        self.leader.expire(now)

    def signalled(self, number: int) -> None:
        """A signal asks for a stop; Ctrl-C beside another, at once."""
        self.leader.shutdown.signalled(number)

    def cancel(self) -> None:
        """Have the job stop, within the grace period."""
        self.leader.shutdown.cancel()

    def conclude(self) -> int:
        """Print one message if the job failed; return the exit code."""
        return self.leader.conclude()

    # What the node reports.

    def said(self, worker: int, message: Said) -> None:
        """A worker sent something."""
        self.leader.said(worker, message)

    def ended(self, end: Ended) -> None:
        """A worker's process has ended."""
        self.leader.ended(end)

    # What the leader asks before it forms a group of workers.

    def may_form(self, nodes: frozenset[str]) -> bool:
        """Whether no worker acts in an older group."""
        return bool(nodes) and not self.leader.coordinator.nodes_acting

    def formed(self, nodes: frozenset[str]) -> None:
        """Nobody else has to know."""

    def reject(self, node: str, why: str) -> None:
        """The only node is never a newcomer that others could do without."""
        raise AssertionError(f"{node} is the only node of the job: {why}")
