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
from paceline.core.job import LaunchSpec
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
from paceline.elastic.hang import Hang, HangDetector
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

# --- Early shutdown. No torch ---


class Shutdown:
    """The shutdown of a job, by request or after a failure.

    Args:
        nodes: the nodes that have joined, by name; the leader adds and removes some.
        planner: starts no workers from then on.

    Attributes:
        requested: the first signal, or None.
        begun: whether the workers got the order to stop.
        deadline: when :meth:`expire` is due, by the monotonic clock.
    """

    def __init__(self, spec: LaunchSpec, nodes: Mapping[str, NodeCommands], planner: GroupPlanner) -> None:
        self._spec = spec
        self._nodes = nodes
        self._planner = planner
        # Ctrl-C may reach the agents of all nodes.
        self._requests = StopRequests(ECHO_S if spec.nodes[1] > 1 else 0.0)
        self.requested: int | None = None
        self.begun = False
        self.deadline = math.inf

    @property
    def is_final(self) -> bool:
        """Whether no workers are started any more, because they stop or have begun to finish."""
        return self.begun or not self._planner.may_spawn

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
        self._planner.stop_spawning()
        for node in self._nodes.values():
            node.kill_all("was ordered to end")

    def _stop(self, number: int) -> None:
        """Tell all workers to finish their step, save, and end; start no more."""
        self.begun = True
        self._planner.stop_spawning()
        for node in self._nodes.values():
            node.stop(number)


# --- The leading agent ---
#
# The :class:`~paceline.elastic.group_planner.GroupPlanner` decides on the groups; this class turns its actions into
# orders to the nodes, and the nodes' reports into its events.


_RESTART = "All restart from the newest checkpoint."


class JobLeader:
    """Leads the workers of a job.

    Args:
        planner: decides on the groups; has no nodes yet.
        here: this node, which serves the rendezvous stores.
        address: of its stores.

    Attributes:
        planner: as given; read-only for others.
        failure_policy: the exits of workers so far.
        beats: each worker's last heartbeat.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        directory: RunDirectory,
        planner: GroupPlanner,
        here: NodeWorkers,
        address: str,
    ) -> None:
        self._spec = spec
        self._directory = directory
        self._here = here
        self._address = address
        self._nodes: dict[str, NodeCommands] = {}  # those that have joined, by name
        self.shutdown = Shutdown(spec, self._nodes, planner)
        has_begun = planner.group is not None
        self.recovery_log = RecoveryLog(directory, first=-1 if has_begun else planner.generation + 1)
        self.planner = planner
        self.failure_policy = FailurePolicy(
            directory, RestartBudget(spec.recovery.max_restarts, first=-1 if has_begun else None)
        )
        self.beats: dict[int, WorkerHeartbeat] = {}
        self._hangs = HangDetector(directory, here.files.do)
        self._restart = RestartAllPolicy(self._kill)
        self._knows_microbatches = False  # whether the run is created
        self._awaits_root_cause = False  # the job ends, and the root cause has not been reported yet

    # Nodes.

    def node_joins(self, name: str, node: NodeCommands, nproc: int, workers: Mapping[int, WorkerState]) -> None:
        """Add a node, with its workers."""
        self._nodes[name] = node
        self.learn_microbatches()
        if self.shutdown.begun:
            node.stop(signal.SIGTERM)
        self._do(self.planner.node_joins(name, nproc, workers))

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
            if self._spec.recovery.recover == "restart":  # as many as began: several may hold one model together
                most = max(most, self.planner.max_workers)
            self._do(self.planner.allow(most))

    def form_group(self) -> None:
        """Form the next group, if one is due."""
        self._do(self.planner.form_group())

    @property
    def deadline(self) -> float:
        """When :meth:`expire` is due, by the monotonic clock."""
        return min(self.shutdown.deadline, self._hangs.deadline)

    @property
    def over(self) -> bool:
        """Whether no worker is left."""
        return not self.planner.workers

    def expire(self, now: float) -> None:
        """Kill overdue workers, and those that block the others."""
        self.shutdown.expire(now)
        match self._hangs.poll():
            case Hang() as hang:
                self._on_hang(hang)
            case suspects:
                self._send(suspects, ReportRequest())

    def _on_hang(self, hang: Hang) -> None:
        if not hang.root_causes:
            self.failure_policy.reason = hang.sentence  # it would hang again
            self.shutdown.kill_all()
            return
        print_status(hang.sentence)
        for worker, why in hang.root_causes.items():
            self._kill((worker,), why)

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
                if worker in self.planner.group_workers():
                    self.recovery_log.lost()
                self.recovery_log.left(why)
                if self._spec.recovery.recover == "restart" and self._has_lost_a_peer(worker):
                    # It must not survive into the next group; its end breaks this one for the others too.
                    self._restart.end(self.planner.generation, (worker,))
                    return
                self._do(self.planner.waits(worker))
                self.form_group()
            case Joined(generation):
                group = self.planner.group
                if group is not None and group.generation == generation:
                    self.recovery_log.joined(group, worker, self._step_of(worker), self.planner.full_size)

    def _has_lost_a_peer(self, worker: int) -> bool:
        """Return whether a worker has left the current group without a request."""
        without_request = self.planner.reform_requested != self.planner.generation
        return self.planner.may_spawn and worker in self.planner.group_workers() and without_request

    def ended(self, end: Ended) -> None:
        """Handle the end of a worker's process."""
        self.beats.pop(end.worker, None)
        if end.retired and end.code == 0:
            self.recovery_log.record("retired", local_index=end.local_index, pid=end.pid, step=end.step)
            self._do(self.planner.exited(end.worker))
        else:
            self._judge(end)
        self.form_group()

    def _judge(self, end: Ended) -> None:
        match self.failure_policy.classify(end, stopping=self.shutdown.begun):
            case "done":
                self._hangs.finishes(end.worker)
                self._do(self.planner.done(end.worker))
                if not self.planner.group_workers():
                    # Only spares are left, without work.
                    self.shutdown.kill_all()
                return
            case "fault":
                self._fault(end)
            case "fatal" if not self.shutdown.begun:
                self.shutdown.within_grace()
        self._do(self.planner.exited(end.worker))

    def _fault(self, end: Ended) -> None:
        generation, again = self.planner.generation, False
        shared = self._restart.shares_fault(end, generation)
        if self._spec.recovery.recover == "restart" and end.worker in self.planner.group_workers():
            # A peer may report a fault, and all may be killed, before the root-cause worker has ended.
            again = not self._restart.counts(generation)
        if shared and again:
            return
        if not shared:
            self.recovery_log.hit()
            if end.worker in self.planner.group_workers():
                # A silent worker was lost at its last message, not at its node's timeout.
                self.recovery_log.lost(time.monotonic() - (end.silent_s if end.killed else 0.0))
            self.recovery_log.record(
                "fault", local_index=end.local_index, pid=end.pid, how=describe_end(end), step=end.step
            )
        group, may_spawn = self.planner.group, self.planner.may_spawn
        if not self.failure_policy.may_go_on(end, group, may_spawn=may_spawn, again=again, shared=shared):
            self._awaits_root_cause = shared
            if not self.shutdown.begun:
                self.shutdown.within_grace()
        elif may_spawn and not end.retired and end.worker in self.planner.workers:  # else its node was lost before
            self.recovery_log.tell(self._describe_loss(end), is_root_cause=not shared)

    def _describe_loss(self, end: Ended) -> str:
        """Describe a fault, and what follows from it, for the user."""
        group, living = self.planner.group, self.planner.group_workers()
        trained = group is not None and end.worker in living
        who = f"rank {group.workers.index(end.worker)}" if group and trained else f"worker {end.local_index}"
        when = f"after step {end.step}, " if end.step >= 0 else ""
        error = "" if end.failure is None else f": {end.failure.type}: {end.failure.message}"
        error = error.partition("\n")[0].rstrip(".")
        if not trained:
            response = "Another one starts."
        elif self._spec.recovery.recover == "restart" or len(living) == 1:
            response = _RESTART
        else:
            response = "The others continue, and another worker starts."
        return f"{when}{who} on {self.planner.node(end.worker)} {describe_end(end)}{error}. {response}"

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
            self._do(self.planner.resize(name, nproc))
        self.form_group()

    def retire(self, nodes: Collection[str]) -> None:
        """Make all workers of these nodes leave after a step.

        Raises:
            ConfigError: the job is ending, or its recovery does not allow it.
        """
        self.resize(dict.fromkeys(nodes, 0), nodes=len(self.planner.nodes) - len(nodes))

    def gather(self) -> None:
        """Make training wait until all wanted workers take part."""
        self.recovery_log.record("gather", step=self.failure_policy.budget.step)
        self._do(self.planner.gather())
        self.form_group()

    # Orders to the workers.

    def _nodes_of(self, group: WorkerGroup) -> list[str]:
        """Return the nodes of a group's workers, by rank."""
        return [self.planner.node(worker) for worker in group.workers]

    def _send(self, workers: Iterable[int], order: Order) -> None:
        for worker in self._living(workers):
            self._nodes[self.planner.node(worker)].send(worker, order)

    def _kill(self, workers: Iterable[int], why: str) -> None:
        for worker in self._living(workers):
            self._nodes[self.planner.node(worker)].kill(worker, why)

    def _living(self, workers: Iterable[int]) -> list[int]:
        return [worker for worker in workers if worker in self.planner.workers]

    # Actions of the planner.

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Start(worker, node, local_index):
                    self._nodes[node].start(worker, local_index)
                case FormGroup(group):
                    self._form(group)
                case RequestReform(group):
                    self._send(group.workers, ReformRequest(group.generation))
                case BreakGroup(generation, workers):
                    self._break(generation, workers)
                case StopWorker(worker):
                    self._send((worker,), ExitRequest())

    def _break(self, generation: int, workers: tuple[int, ...]) -> None:
        self.recovery_log.lost()
        self._hangs.forget()
        # Closing the store frees members that wait in it for a lost one.
        self._here.close_store(generation)
        if self._spec.recovery.recover == "inplace":
            self._send(workers, GroupBroken(generation))
        elif not self._awaits_root_cause:
            self._restart.end(generation, workers)

    def _form(self, group: WorkerGroup) -> None:
        nodes = self._nodes_of(group)
        local_indices = [self.planner.local_index(worker) for worker in group.workers]
        step = max(self._step_of(worker) for worker in group.workers)
        self._here.close_store(group.generation - 1)
        is_asked = self.planner.reform_requested == group.generation - 1
        self.recovery_log.formed(group, local_indices, nodes, step, is_asked=is_asked)
        self._hangs.forms(group, nodes)
        port = self._here.open_store(group.generation, self._address)
        workers_on, assigned_on = Counter(nodes), Counter[str]()
        for rank, (worker, node) in enumerate(zip(group.workers, nodes, strict=True)):
            assignment = Assignment(
                generation=group.generation,
                rank=rank,
                world_size=len(group.workers),
                local_rank=assigned_on[node],
                local_world_size=workers_on[node],
                active=group.active,
                address=self._address,
                port=port,
            )
            assigned_on[node] += 1
            self._nodes[node].send(worker, assignment)


def make_planner(spec: LaunchSpec, generation: int, workers: Iterable[tuple[int, WorkerState]] = ()) -> GroupPlanner:
    """Make a planner without nodes, which continues after the last group of the run.

    Args:
        generation: of that group.
        workers: the running ones, each with the generation of its last group.
    """
    return GroupPlanner(
        nodes={},
        max_workers=spec.local_world_size * spec.nodes[0],
        generation=max([generation, *(generation for generation, _ in workers)]),
        spares=spec.recovery.spares,
        initial_nodes=spec.nodes[0],
        min_nodes=spec.least_nodes,
    )


# --- The leader of a job on one node, which its agent obeys ---


class SingleNodeLeader(JobLeader):
    """Leads a job that has this node only, from its start to its end."""

    def __init__(self, spec: LaunchSpec, directory: RunDirectory, node: NodeWorkers) -> None:
        planner = make_planner(spec, last_generation(directory.ledger))
        super().__init__(spec, directory, planner, node, LOOPBACK)
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

    def signalled(self, number: int) -> None:
        """Handle a signal, which requests a stop; Ctrl-C after another signal requests it immediately."""
        self.shutdown.signalled(number)

    def cancel(self) -> None:
        """Have the job stop, within the grace period."""
        self.shutdown.cancel()

    def close(self) -> None:
        """Do nothing: there are no links."""


# --- The leader of a job on several nodes, in the agent of one of them ---


class MultiNodeLeader(JobLeader):
    """Leads the workers of several nodes, and forms the groups on whose nodes their agents agree.

    Args:
        agents: the agreement, by way of this node's agent.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        directory: RunDirectory,
        planner: GroupPlanner,
        here: NodeWorkers,
        address: str,
        *,
        agents: AgentController,
    ) -> None:
        super().__init__(spec, directory, planner, here, address)
        self._agents = agents
        self._took_part: set[str] = set()  # nodes whose workers were in a group
        if planner.group is not None:
            self.recovery_log.tell("the node that led the run is lost or was cut off. This one leads it from now on.")

    def node_joins(self, name: str, node: NodeCommands, nproc: int, workers: Mapping[int, WorkerState]) -> None:
        """Add a node, with its workers."""
        if any(worker.status != "starting" for worker in workers.values()):
            self._took_part.add(name)
        super().node_joins(name, node, nproc, workers)

    def node_lost(self, name: str, why: str) -> None:
        """Remove a node and all its workers."""
        if name not in self._nodes:
            return
        self.recovery_log.hit()
        self.recovery_log.lost()
        self.recovery_log.record("node lost", node=name, why=why)
        if name in self.planner.nodes_acting:
            restarts = self._spec.recovery.recover == "restart"
            response = _RESTART if restarts else "The other nodes continue."
            self.recovery_log.tell(f"node {name} is lost: {why.rstrip('.')}. {response}")
        actions = self.planner.node_lost(name)
        del self._nodes[name]
        self._do(actions)

    def exclude(self, nodes: frozenset[str]) -> None:
        """Form groups without these nodes, which others cannot reach; include those that were excluded before."""
        if nodes - self.planner.excluded:
            self.recovery_log.hit()
        if nodes != self.planner.excluded:
            self._do(self.planner.exclude(nodes))

    def form_group(self) -> None:
        """Form the next group, if one is due and the agents agree on its nodes."""
        if self._agents.may_form(self.planner.nodes_next):
            super().form_group()

    def _form(self, group: WorkerGroup) -> None:
        nodes = frozenset(self._nodes_of(group))
        self._agents.formed(nodes)
        self._took_part |= nodes
        super()._form(group)

    def _judge(self, end: Ended) -> None:
        """Continue without the node of a newcomer that failed by itself."""
        if self._is_of_newcomer(end.worker) and self.failure_policy.is_unfit(end, stopping=self.shutdown.begun):
            self._agents.reject(self.planner.node(end.worker), self.failure_policy.rejection_message(end))
        else:
            super()._judge(end)

    def _is_of_newcomer(self, worker: int) -> bool:
        """Return whether a worker's node has never taken part, while others have."""
        participating = self._took_part & self._nodes.keys()
        is_known = worker in self.planner.workers
        return is_known and bool(participating) and self.planner.node(worker) not in participating
