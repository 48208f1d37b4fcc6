"""The leader of a job: its nodes, restarts, and the end of the job."""

from __future__ import annotations

import math
import signal
import socket
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from paceline.core.errors import ConfigError, RunDirectoryError
from paceline.core.launch_spec import LaunchSpec
from paceline.core.signals import ECHO_S, StopRequests, forwarded_signal
from paceline.core.sockets import LOOPBACK
from paceline.core.standard_streams import print_status
from paceline.data.ledger import last_generation
from paceline.elastic.failure_policy import FailurePolicy, RecoveryLog, RestartAllPolicy, RestartBudget, describe_end
from paceline.elastic.group_planner import (
    Action,
    BreakGroup,
    FormGroup,
    GroupPlanner,
    RequestReform,
    Start,
    StopWorker,
    WorkerGroup,
    WorkerState,
)
from paceline.elastic.hang import AskWorkers, Hang, HangDetector
from paceline.elastic.node import Ended, NodeCommands, NodeWorkers, Order, Said
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

if TYPE_CHECKING:
    from paceline.elastic.consensus.agent_controller import AgentController

Controller: TypeAlias = "SingleNodeLeader | AgentController"
"""What decides for an agent's workers, or obeys the decisions of another node's agent."""

# --- The worker pool: orders to the workers of all nodes. No torch ---


class WorkerPool:
    """All workers of a job, on all nodes.

    Args:
        coordinator: knows their nodes.

    Attributes:
        nodes: the nodes that have joined, by name.
    """

    def __init__(self, coordinator: GroupPlanner) -> None:
        self._coordinator = coordinator
        self.nodes: dict[str, NodeCommands] = {}
        self._took_part: set[str] = set()  # nodes whose workers were in a group

    def joins(self, name: str, node: NodeCommands, seats: Iterable[WorkerState]) -> None:
        """Add a node, with its workers."""
        self.nodes[name] = node
        if any(seat.status != "starting" for seat in seats):
            self._took_part.add(name)

    def is_of_newcomer(self, worker: int) -> bool:
        """Return whether a worker's node has never taken part, while others have."""
        participating = self._took_part & self.nodes.keys()
        known = worker in self._coordinator.workers
        return known and bool(participating) and self._coordinator.node(worker) not in participating

    def start(self, worker: int, node: str, local_index: int) -> None:
        self.nodes[node].start(worker, local_index)

    def send(self, workers: Iterable[int], order: Order) -> None:
        """Send an order to workers that have not ended."""
        for worker in workers:
            if worker in self._coordinator.workers:
                self._node_of(worker).send(worker, order)

    def place(self, view: WorkerGroup, address: str, port: int) -> None:
        """Tell the members of a group to form it.

        Args:
            address: of its store.
            port: of its store.
        """
        nodes = self.nodes_of(view)
        self._took_part.update(nodes)
        workers_on: Counter[str] = Counter(nodes)
        assigned_on: Counter[str] = Counter()
        for rank, (worker, node) in enumerate(zip(view.members, nodes, strict=True)):
            assignment = Assignment(
                generation=view.generation,
                rank=rank,
                world_size=len(view.members),
                local_rank=assigned_on[node],
                local_world_size=workers_on[node],
                active=view.active,
                address=address,
                port=port,
            )
            assigned_on[node] += 1
            self.nodes[node].send(worker, assignment)

    def nodes_of(self, view: WorkerGroup) -> list[str]:
        """Return the nodes of a group's members, by rank."""
        return [self._coordinator.node(worker) for worker in view.members]

    def kill(self, workers: Iterable[int], why: str) -> None:
        """Fence workers that have not ended."""
        for worker in workers:
            if worker in self._coordinator.workers:
                self._node_of(worker).kill(worker, why)

    def stop(self, number: int) -> None:
        """Signal all workers, including those not forked yet."""
        for node in self.nodes.values():
            node.stop(number)

    def kill_all(self, why: str) -> None:
        for node in self.nodes.values():
            node.kill_all(why)

    def _node_of(self, worker: int) -> NodeCommands:
        return self.nodes[self._coordinator.node(worker)]


# --- Early shutdown. No torch ---


class Shutdown:
    """The shutdown of a job, by request or after a failure.

    Args:
        coordinator: starts no workers from then on.

    Attributes:
        requested: the first signal, or None.
        begun: whether the workers got the order to stop.
        deadline: when :meth:`expire` is due, by the monotonic clock.
    """

    def __init__(self, spec: LaunchSpec, workforce: WorkerPool, coordinator: GroupPlanner) -> None:
        self._spec = spec
        self._pool = workforce
        self._coordinator = coordinator
        # Ctrl-C may reach the agents of all nodes.
        self._requests = StopRequests(ECHO_S if spec.nodes[1] > 1 else 0.0)
        self.requested: int | None = None
        self.begun = False
        self.deadline = math.inf

    @property
    def is_final(self) -> bool:
        """Whether no workers are started any more, because they stop or have begun to finish."""
        return self.begun or not self._coordinator.may_spawn

    def refuse_changes(self) -> None:
        """Reject a change of workers if the run is ending, or its recovery does not allow one.

        Raises:
            ConfigError: names the reason.
        """
        if self.is_final:
            raise ConfigError("the run is ending, so its workers can no longer change.")
        if self._spec.recovery.recover != "inplace":
            raise ConfigError("--recover restart does not allow a change of workers in a running job.")

    def signalled(self, number: int) -> None:
        """Handle a stop signal; Ctrl-C after another one ends the job at once."""
        match self._requests.hear(number):
            case "first":
                self.requested = number
                self._stop(forwarded_signal(number))
            case "end":
                self.kill_all()

    def cancel(self) -> None:
        """Stop the job within the grace period."""
        self.requested = self.requested or signal.SIGTERM
        self.within_grace()

    def within_grace(self) -> None:
        """Tell all workers to stop, and kill the remaining ones after the grace period."""
        self.deadline = time.monotonic() + self._spec.recovery.grace_s
        self._stop(signal.SIGTERM)

    def expire(self, now: float) -> None:
        """Kill workers after the grace period."""
        if now >= self.deadline:
            self.deadline = math.inf
            self.kill_all()

    def kill_all(self) -> None:
        """Kill all workers, and start no more."""
        self.begun = True
        self._coordinator.may_spawn = False
        self._pool.kill_all("was ordered to end")

    def _stop(self, number: int) -> None:
        """Tell all workers to finish their step, save, and end; start no more."""
        self.begun = True
        self._coordinator.may_spawn = False
        self._pool.stop(number)


# --- The leading agent ---
#
# The :class:`~paceline.elastic.group_planner.GroupPlanner` decides on the groups; this class turns its actions into
# orders to the nodes, and the nodes' reports into its events.


class JobLeader:
    """Leads the workers of a job.

    Args:
        coordinator: decides; has no nodes yet.
        quorum: the agreement on the set of nodes.
        here: this node, which serves the rendezvous stores.
        address: this node's address for members on all nodes.
        follows: whether another agent has led before.

    Attributes:
        coordinator: as given; read-only for others.
        failure_policy: the exits of workers so far.
        beats: each worker's last heartbeat.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        directory: RunDirectory,
        coordinator: GroupPlanner,
        quorum: Controller,
        here: NodeWorkers,
        address: str,
        *,
        follows: bool = False,
    ) -> None:
        self._spec = spec
        self._directory = directory
        self._quorum = quorum
        self._here = here
        self._address = address
        self._pool = WorkerPool(coordinator)
        self.shutdown = Shutdown(spec, self._pool, coordinator)
        self.recovery_log = RecoveryLog(directory, first=-1 if follows else coordinator.generation + 1)
        self.coordinator = coordinator
        self.failure_policy = FailurePolicy(
            directory, RestartBudget(spec.recovery.max_restarts, first=-1 if follows else None)
        )
        self.beats: dict[int, WorkerHeartbeat] = {}
        self._hangs = HangDetector(directory, here.files.do)
        self._restart = RestartAllPolicy(self._pool.kill)
        self._knows_microbatches = False  # whether the run is created
        self._culprit_is_to_come = False  # the job ends, and the root cause has not been reported yet
        coordinator.hold()

    # Nodes.

    def node_joins(self, name: str, node: NodeCommands, nproc: int, seats: Mapping[int, WorkerState]) -> None:
        """Add a node, with its workers."""
        self._pool.joins(name, node, seats.values())
        self.learn_microbatches()
        if self.shutdown.begun:
            node.stop(signal.SIGTERM)
        self._do(self.coordinator.node_joins(name, nproc, seats))

    def node_lost(self, name: str, why: str) -> None:
        """Remove a node and all its workers."""
        if name not in self._pool.nodes:
            return
        self.recovery_log.hit()
        self.recovery_log.lost()
        self.recovery_log.record("node lost", node=name, why=why)
        actions = self.coordinator.node_lost(name)
        del self._pool.nodes[name]
        self._do(actions)

    def exclude(self, nodes: frozenset[str]) -> None:
        """Form groups without these nodes, which others cannot reach; include those that were excluded before."""
        if nodes - self.coordinator.excluded:
            self.recovery_log.hit()
        if nodes != self.coordinator.excluded:
            self._do(self.coordinator.exclude(nodes))

    def learn_microbatches(self) -> None:
        """Read the maximum number of active workers, once the run is created.

        Until then it is that of the least number of nodes; nodes beyond that take part after a step.
        """
        if not self._knows_microbatches:
            self._here.files.do_again(self._read_microbatches, self._on_microbatches)

    def _read_microbatches(self) -> int | None:
        with suppress(OSError, RunDirectoryError, KeyError, TypeError, ValueError):
            if self._directory.exists():
                return int(self._directory.read_manifest()["config"]["microbatches"])
        return None

    def _on_microbatches(self, most: int | None) -> None:
        if most is not None:
            self._knows_microbatches = True
            self._do(self.coordinator.allow(most))

    def settle(self) -> None:
        """Form the next group, if one is due and the agents agree on its nodes."""
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
        """Kill overdue workers, and those that block the others."""
        self.shutdown.expire(now)
        match self._hangs.poll():
            case AskWorkers(workers):
                self._pool.send(workers, ReportRequest())
            case Hang() as hang:
                self._on_hang(hang)

    def _on_hang(self, hang: Hang) -> None:
        if not hang.culprits:
            self.failure_policy.reason = hang.sentence  # it would hang again
            self.shutdown.kill_all()
            return
        print_status(hang.sentence)
        for worker, why in hang.culprits.items():
            self._pool.kill((worker,), why)

    def conclude(self) -> int:
        """Print one message if the job failed; return its exit code."""
        return self.failure_policy.conclude(self.shutdown.requested)

    # Reports of the nodes.

    def said(self, worker: int, message: Said) -> None:
        """Handle a worker's message."""
        match message:
            case WorkerHeartbeat(step, overdue=overdue):
                self.failure_policy.budget.stands_at(step)
                self.beats[worker] = message
                self._hangs.beats(worker, overdue=overdue)
                self.learn_microbatches()
            case StallSnapshot():
                self._hangs.answers(worker, message)
            case Ready(_, why):
                if worker in self.coordinator.members():
                    self.recovery_log.lost()
                self.recovery_log.left(why)
                if self._spec.recovery.recover == "restart" and self._has_lost_a_peer(worker):
                    # It must not survive into the next group; its end breaks this one for the others too.
                    self._restart.end(self.coordinator.generation, (worker,))
                    return
                self._do(self.coordinator.waits(worker))
                self.settle()
            case Joined(generation):
                view = self.coordinator.group
                if view is not None and view.generation == generation:
                    self.recovery_log.joined(view, worker, self._step_of(worker))

    def _has_lost_a_peer(self, worker: int) -> bool:
        """Return whether a worker has left the current group without a request."""
        without_request = not self.recovery_log.was_asked_to_reform(self.coordinator.generation)
        return self.coordinator.may_spawn and worker in self.coordinator.members() and without_request

    def ended(self, end: Ended) -> None:
        """Handle the end of a worker's process."""
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
                    # Only spares are left, without work.
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
        if self._spec.recovery.recover == "restart" and end.worker in self.coordinator.members():
            # A peer may report a fault, and all may be killed, before the root-cause worker has ended.
            again = not self._restart.counts(generation)
        if shared and again:
            return
        if not shared:
            self.recovery_log.hit()
            if end.worker in self.coordinator.members():
                # A silent member was lost at its last message, not at its node's timeout.
                self.recovery_log.lost(time.monotonic() - (end.silent_s if end.killed else 0.0))
            self.recovery_log.record("fault", slot=end.local_index, pid=end.pid, how=describe_end(end), step=end.step)
        view, hiring = self.coordinator.group, self.coordinator.may_spawn
        if not self.failure_policy.may_go_on(end, view, hiring=hiring, again=again, shared=shared):
            self._culprit_is_to_come = shared
            if not self.shutdown.begun:
                self.shutdown.within_grace()

    def _step_of(self, worker: int) -> int:
        return self.beats[worker].step if worker in self.beats else -1

    # Requests of other commands.

    def resize(self, wanted: Mapping[str, int], **event: object) -> None:
        """Set the number of workers on these nodes; they join or leave after a step.

        Raises:
            ConfigError: the job is ending, or its recovery does not allow it.
        """
        self.shutdown.refuse_changes()
        self.recovery_log.record("scale", **event, step=self.failure_policy.budget.step)
        for name, nproc in wanted.items():
            self._do(self.coordinator.resize(name, nproc))
        self.settle()

    def retire(self, nodes: Collection[str]) -> None:
        """Make all workers of these nodes leave after a step.

        Raises:
            ConfigError: the job is ending, or its recovery does not allow it.
        """
        self.resize(dict.fromkeys(nodes, 0), nodes=len(self.coordinator.nodes) - len(nodes))

    def gather(self) -> None:
        """Make training wait until all wanted workers take part."""
        self.recovery_log.record("gather", step=self.failure_policy.budget.step)
        self._do(self.coordinator.gather())
        self.settle()

    # Actions of the coordinator.

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
        # Closing the store frees members that wait in it for a lost one.
        self._here.close_store(generation)
        if self._spec.recovery.recover == "inplace":
            self._pool.send(members, GroupBroken(generation))
        elif not self._culprit_is_to_come:
            self._restart.end(generation, members)

    def _form(self, view: WorkerGroup) -> None:
        nodes = self._pool.nodes_of(view)
        local_indices = [self.coordinator.local_index(worker) for worker in view.members]
        step = max(self._step_of(worker) for worker in view.members)
        self._quorum.formed(frozenset(nodes))
        self._here.close_store(view.generation - 1)
        self.recovery_log.formed(view, local_indices, nodes, step)
        self._hangs.forms(view, nodes)
        port = self._here.open_store(view.generation, self._address)
        self._pool.place(view, self._address, port)


def make_planner(spec: LaunchSpec, generation: int, seats: Iterable[tuple[int, WorkerState]]) -> GroupPlanner:
    """Make a coordinator without nodes, which continues after the last group of the run.

    Args:
        generation: of that group.
        seats: the running workers, each with the generation of its last group.
    """
    return GroupPlanner(
        nodes={},
        max_workers=spec.local_world_size * spec.nodes[0],
        generation=max([generation, *(generation for generation, _ in seats)]),
        spares=spec.recovery.spares,
        initial_nodes=spec.nodes[0],
        min_nodes=spec.least_nodes,
    )


# --- What an agent does for its job: lead it alone, where there is one node, or with the agents of other nodes ---


class SingleNodeLeader(JobLeader):
    """Leads a job that has this node only, from its start to its end."""

    def __init__(self, spec: LaunchSpec, directory: RunDirectory, node: NodeWorkers) -> None:
        coordinator = make_planner(spec, last_generation(directory.ledger), ())
        super().__init__(spec, directory, coordinator, self, node, LOOPBACK)
        self._nproc = spec.local_world_size
        self.name = socket.gethostname()
        self.nodes = (self.name,)

    @property
    def leader(self) -> JobLeader:
        """What decides for all workers: itself."""
        return self

    def begin(self) -> None:
        """Start the workers."""
        self.node_joins(self.name, self._here, self._nproc, {})
        self.settle()

    def signalled(self, number: int) -> None:
        """Handle a signal, which requests a stop; Ctrl-C after another signal requests it immediately."""
        self.shutdown.signalled(number)

    def cancel(self) -> None:
        """Have the job stop, within the grace period."""
        self.shutdown.cancel()

    def close(self) -> None:
        """Do nothing: there are no links."""

    # Queries before a group of workers is formed.

    def may_form(self, nodes: frozenset[str]) -> bool:
        """Return whether no worker acts in an older group."""
        return bool(nodes) and not self.coordinator.nodes_acting

    def formed(self, nodes: frozenset[str]) -> None:
        """Do nothing: there is no other agent."""

    def reject(self, node: str, why: str) -> None:
        """Raise: the only node never joins a running job."""
        raise AssertionError(f"{node} is the only node of the job: {why}")
