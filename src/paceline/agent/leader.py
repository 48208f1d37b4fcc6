"""The leading agent's part: it decides for the workers of all nodes, and judges how the job ends.

Who belongs to which view is decided by :class:`~paceline.membership.coordinator.Coordinator`; here its
actions become orders to the nodes, and what the nodes report becomes its events.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from paceline.agent.control_socket import Status, WorkerStatus
from paceline.agent.hang_watch import Ask, Hang, HangWatch
from paceline.agent.node import Ended, Order, Said
from paceline.agent.orders import Orders
from paceline.agent.policy import Budget, describe_code, is_corruption, meaning
from paceline.agent.repetition import describe_repetition
from paceline.distributed.process import ECHO_S, StopRequests, describe, passed_on
from paceline.errors import ConfigError, RunDirectoryError
from paceline.launchers.base import JobSpec
from paceline.launchers.failures import Exit, conclude
from paceline.membership.channel import Beat, Broken, Joined, Leave, Place, Reform, Report, Standing, Waits
from paceline.membership.coordinator import (
    Action,
    AskToReform,
    Break,
    Coordinator,
    Form,
    Retire,
    Seat,
    Start,
    View,
)
from paceline.run_directory import RunDirectory

_WITH_PEERS = "ended with its peers"


class Here(Protocol):
    """This machine: it serves the stores in which members meet."""

    def pid_of(self, number: int) -> int | None:
        """A worker's process, where it runs here."""

    def open_store(self, generation: int, address: str) -> int:
        """Serve one for this generation; return its port."""

    def close_store(self, generation: int) -> None:
        """Serve it no longer."""


class Roster(Protocol):
    """What the agents have agreed on."""

    def may_form(self, nodes: frozenset[str]) -> bool:
        """Whether a view of workers on these nodes may be formed now."""

    def formed(self, nodes: frozenset[str]) -> None:
        """It is."""

    def send_home(self, node: str, why: str) -> None:
        """Do without a node; this is told there."""


class Leader:
    """Leads the workers of a job.

    Args:
        spec: the job's.
        directory: the run's.
        coordinator: decides; it knows no node yet.
        roster: when it may form a view.
        here: this machine.
        address: of this machine, where members on all nodes reach its stores.
        follows: another agent has led before this one.
    """

    def __init__(
        self,
        spec: JobSpec,
        directory: RunDirectory,
        coordinator: Coordinator,
        roster: Roster,
        here: Here,
        address: str,
        *,
        follows: bool = False,
    ) -> None:
        self._spec, self._directory, self._coordinator, self._roster = spec, directory, coordinator, roster
        self._nodes: dict[str, Orders] = {}
        self._here, self._address = here, address
        self._beats: dict[int, Beat] = {}  # each worker's last one
        self._recoveries = 0
        self._budget = Budget(spec.max_restarts, first=-1 if follows else None)
        self._first = -1 if follows else coordinator.generation + 1
        self._exits: list[Exit] = []  # those that decide the job's exit code
        self._lost: list[Exit] = []  # faults after which nobody was started
        self._distrusted: set[int] = set()  # slots whose worker was found to compute wrongly
        self._verdict = ""
        # Ctrl-C may reach the agents of all machines.
        self._requests = StopRequests(ECHO_S if (spec.most_nodes or spec.nodes) > 1 else 0.0)
        self._asked: int | None = None  # the first signal
        self._stopping = False
        self._deadline = math.inf
        self._lost_at: float | None = None  # when the view was hit, or left, that is being replaced
        self._hit = False  # a worker or node was lost since the current view was formed
        self._asked_to_reform = -1  # the generation whose members were asked to leave it
        self._why = ""  # what the first member that left the current view said
        self._joined: set[int] = set()  # those of the current view's members that hold its state
        self._hangs = HangWatch(directory)
        self._took_part: set[str] = set()  # nodes with workers that were in a view
        self._restarting = -1  # the generation whose members are being killed, to be started again
        coordinator.hold()

    # Nodes.

    def node_joins(self, name: str, node: Orders, nproc: int, seats: Mapping[int, Seat]) -> None:
        """A node has come, with the workers that it has."""
        self._nodes[name] = node
        if any(seat.status != "starting" for seat in seats.values()):
            self._took_part.add(name)
        self._learn_shards()
        if self._stopping:
            node.stop(signal.SIGTERM)
        self._do(self._coordinator.node_joins(name, nproc, seats))

    def saw(self, generation: int) -> None:
        """An earlier leader has formed this view."""
        self._coordinator.saw(generation)

    def node_lost(self, name: str, why: str) -> None:
        """A node is gone, and all its workers with it."""
        if name not in self._nodes:
            return
        self._hit = True
        self._lost_at = self._lost_at or time.monotonic()
        self._record("node lost", node=name, why=why)
        actions = self._coordinator.node_lost(name)
        del self._nodes[name]
        self._do(actions)

    @property
    def nodes(self) -> frozenset[str]:
        """All that have come."""
        return frozenset(self._nodes)

    @property
    def nodes_present(self) -> frozenset[str]:
        """Those of the next view, as far as its members are there."""
        return self._coordinator.nodes_present

    @property
    def nodes_retired(self) -> frozenset[str]:
        """Those that are to leave."""
        return self._coordinator.nodes_retired

    @property
    def nodes_acting(self) -> frozenset[str]:
        """Those with workers that may act in a view."""
        return self._coordinator.nodes_acting

    def _learn_shards(self) -> None:
        """So many can compute; before the run is created, whoever begins it checks that they are not more."""
        with suppress(RunDirectoryError, KeyError, TypeError, ValueError):
            if self._directory.exists():
                self._coordinator.most = int(self._directory.read_manifest()["config"]["shards"])

    def settle(self) -> None:
        """Form the next view, where one is due and the agents have agreed on its nodes."""
        if self._roster.may_form(self._coordinator.nodes_present):
            actions = self._coordinator.release()
            self._coordinator.hold()
            self._do(actions)

    @property
    def deadline(self) -> float:
        """When :meth:`expire` is due, by the monotonic clock."""
        return min(self._deadline, self._hangs.deadline)

    @property
    def over(self) -> bool:
        """Whether no worker is left."""
        return not self._coordinator.workers

    def expire(self, now: float) -> None:
        """Kill who has not ended within the time given, and who holds the others up."""
        if now >= self._deadline:
            self._deadline = math.inf
            self.kill_all()
        match self._hangs.turn():
            case Ask(workers):
                self._tell(workers, Report())
            case Hang() as hang:
                self._on_hang(hang)

    def _on_hang(self, hang: Hang) -> None:
        if not hang.culprits:
            self._verdict = hang.sentence  # it would happen again
            self.kill_all()
            return
        print(f"paceline: {hang.sentence}", file=sys.stderr, flush=True)
        for worker, why in hang.culprits.items():
            if worker in self._coordinator.workers:
                self._node_of(worker).kill(worker, why)

    def conclude(self) -> int:
        """Print one message if the job failed; return its exit code."""
        return conclude(self._directory, self._exits or self._lost, self._asked, self._verdict)

    # The end, when somebody asks for it.

    def signalled(self, number: int) -> None:
        """A signal asks the job to stop; Ctrl-C after that, at once."""
        match self._requests.hear(number):
            case "first":
                self._asked = number
                self._stop(passed_on(number))
            case "end":
                self.kill_all()

    def cancel(self) -> None:
        """Have the job stop, within the grace period."""
        self._asked = self._asked or signal.SIGTERM
        self._stop_within_grace()

    def kill_all(self) -> None:
        """Kill all workers; nobody is started any more."""
        self._stopping = True
        self._coordinator.hiring = False
        for node in self._nodes.values():
            node.kill_all("was told to end")

    def _stop(self, number: int) -> None:
        """Have all workers finish their step, save, and end; nobody is started any more."""
        self._stopping = True
        self._coordinator.hiring = False
        for node in self._nodes.values():
            node.stop(number)

    def _stop_within_grace(self) -> None:
        self._deadline = time.monotonic() + self._spec.grace_s
        self._stop(signal.SIGTERM)

    # What the nodes report.

    def said(self, worker: int, message: Said) -> None:
        """A worker sent something."""
        match message:
            case Beat(step, overdue=overdue):
                self._budget.stands_at(step)
                self._beats[worker] = message
                self._hangs.beats(worker, overdue=overdue)
            case Standing():
                self._hangs.answers(worker, message)
            case Waits(_, why):
                if worker in self._coordinator.members():
                    self._lost_at = self._lost_at or time.monotonic()
                self._why = self._why or why
                if self._spec.recover == "restart" and self._has_lost_a_peer(worker):
                    # It must not be a survivor of the next view; its end breaks this one for the others too.
                    self._restarting = self._coordinator.generation
                    self._node_of(worker).kill(worker, _WITH_PEERS)
                    return
                self._do(self._coordinator.waits(worker))
                self.settle()
            case Joined(generation):
                self._has_joined(worker, generation)

    def _has_lost_a_peer(self, worker: int) -> bool:
        """Whether a worker has left the current view though nobody asked it to."""
        coordinator = self._coordinator
        left_unasked = self._asked_to_reform != coordinator.generation
        return coordinator.hiring and worker in coordinator.members() and left_unasked

    def _has_joined(self, worker: int, generation: int) -> None:
        view = self._coordinator.view
        if view is None or view.generation != generation:
            return
        self._joined.add(worker)
        if self._joined >= set(view.members) and generation > self._first:
            self._record(
                "joined", generation=generation, step=self._step_of(worker), seconds=self._since_loss()
            )
            self._lost_at = None

    def ended(self, end: Ended) -> None:
        """A worker's process has ended."""
        self._judge(end)
        self.settle()

    def _judge(self, end: Ended) -> None:
        now = time.time()
        what = meaning(
            end.code,
            end.failure,
            finished=self._directory.result.is_file(),
            stopping=self._stopping,
            progressed=self._budget.progressed,
            distrusted=end.slot in self._distrusted,
        )
        if is_corruption(end.failure):
            self._distrusted.add(end.slot)
        self._beats.pop(end.worker, None)
        if end.retired and end.code == 0:
            self._record("retired", slot=end.slot, pid=end.pid, step=end.step)
            self._do(self._coordinator.exited(end.worker))
            return
        if what == "done":
            self._exits.append(Exit(end.slot, max(end.code, 0), now))
            self._hangs.finishes(end.worker)
            self._do(self._coordinator.done(end.worker))
            if not self._coordinator.members():
                # Only spares are left, and nothing is left for them to do.
                self.kill_all()
            return
        if self._is_unfit(end):
            assert end.failure is not None
            what_failed = describe(end.failure, self._directory)
            why = f"this machine cannot take part in the run, and the others go on:\n  {what_failed}"
            self._roster.send_home(self._coordinator.node(end.worker), why)
            return
        if what == "fault" and not (self._stopping and end.killed):
            self._fault(end, now)
        else:
            self._exits.append(Exit(end.slot, end.code, now, stopped=what != "fatal"))
            if what == "fatal" and not self._stopping:
                self._stop_within_grace()
        self._do(self._coordinator.exited(end.worker))

    def _is_unfit(self, end: Ended) -> bool:
        """Whether a worker failed by itself on a machine that never took part, beside others that do."""
        if self._stopping or end.killed or end.failure is None or end.failure.victim:
            return False
        if end.worker not in self._coordinator.workers:
            return False
        at_work = self._took_part & self._nodes.keys()
        return bool(at_work) and self._coordinator.node(end.worker) not in at_work

    def _fault(self, end: Ended, now: float) -> None:
        if self._restarting == self._coordinator.generation and (
            end.killed == _WITH_PEERS or (end.failure is not None and end.failure.victim)
        ):
            return  # one fault, that all of them share
        self._hit = True
        how = end.killed or describe_code(end.code)
        # A silent member was lost when it was last heard, not when its node lost patience.
        lost = time.monotonic() - (end.silent_s if end.killed else 0.0)
        if end.worker in self._coordinator.members():
            self._lost_at = min(lost, self._lost_at or lost)
        self._recoveries += 1
        self._record("fault", slot=end.slot, pid=end.pid, how=how, step=end.step)
        if not self._coordinator.hiring:
            self._lost.append(Exit(end.slot, end.code, now))
        elif not end.retired and not self._budget.spend():
            self._exits.append(Exit(end.slot, end.code, now))
            view = self._coordinator.view
            members = () if view is None else view.members
            self._verdict = describe_repetition(
                self._directory,
                steps=self._budget.step,
                replacements=self._budget.most,
                how=how,
                failure=end.failure,
                rank=members.index(end.worker) if end.worker in members else None,
                ranks=len(members) if view is None or view.computing is None else view.computing,
            )
            self._stop_within_grace()

    def _step_of(self, worker: int) -> int:
        return self._beats[worker].step if worker in self._beats else -1

    # What other commands ask for.

    def status(self) -> Status:
        """Where the job stands."""
        coordinator = self._coordinator
        members = coordinator.members()
        others = [worker for worker in coordinator.workers if worker not in members]
        return Status(
            generation=-1 if coordinator.view is None else coordinator.generation,
            target=coordinator.target,
            whole=coordinator.view is not None and self._joined >= set(coordinator.view.members),
            stopping=self._stopping or not coordinator.hiring,
            recoveries=self._recoveries,
            step=max((self._step_of(worker) for worker in members), default=-1),
            workers=tuple(
                WorkerStatus(
                    rank=members.index(worker) if worker in members else None,
                    slot=coordinator.slot(worker),
                    node=coordinator.node(worker),
                    pid=self._here.pid_of(worker),
                    step=self._step_of(worker),
                    phase=self._beats[worker].phase if worker in self._beats else "starting",
                )
                for worker in (*members, *others)
            ),
        )

    def scale(self, nproc: int) -> None:
        """Want another number of workers on each node; who joins or leaves does so after a step.

        Raises:
            ConfigError: there cannot be so many, or the job is ending.
        """
        coordinator = self._coordinator
        self._require_going_on()
        if nproc < 1:
            raise ConfigError(f"--nproc must be at least 1, but is {nproc}.")
        self._learn_shards()
        total = nproc * len(coordinator.nodes)
        if total > coordinator.most:
            raise ConfigError(
                f"{total} processes cannot share {coordinator.most} shards: each needs at least one. "
                f"Use --nproc {coordinator.most // len(coordinator.nodes)} or fewer. "
                "A run's number of shards is fixed when it is created."
            )
        before = coordinator.target
        self._record("scale", before=before, target=total + coordinator.spares, step=self._budget.step)
        for name in coordinator.nodes:
            self._do(coordinator.resize(name, nproc))
        self.settle()

    def retire(self, nodes: Collection[str]) -> None:
        """Have all workers of these nodes leave, after a step.

        Raises:
            ConfigError: the job is ending.
        """
        self._require_going_on()
        self._record("scale", nodes=len(self._coordinator.nodes) - len(nodes), step=self._budget.step)
        for name in nodes:
            self._do(self._coordinator.resize(name, 0))
        self.settle()

    def is_idle(self, node: str) -> bool:
        """Whether a node has been retired, and no worker is left there."""
        wanted = self._coordinator.nodes.get(node)
        return wanted == 0 and all(self._coordinator.node(w) != node for w in self._coordinator.workers)

    def gather(self) -> None:
        """Train on only once all that there should be take part."""
        self._record("gather", step=self._budget.step)
        self._do(self._coordinator.gather())
        self.settle()

    def _require_going_on(self) -> None:
        if self._stopping or not self._coordinator.hiring:
            raise ConfigError("the run is ending, so nobody joins or leaves it any more.")
        if self._spec.recover != "inplace":
            raise ConfigError("with --recover restart nobody joins or leaves a run that is at work.")

    # What the coordinator decides.

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Start(worker, node, slot):
                    self._nodes[node].start(worker, slot)
                case Form(view):
                    self._form(view)
                case AskToReform(view):
                    self._asked_to_reform = view.generation
                    self._tell(view.members, Reform(view.generation))
                case Break(generation, members):
                    self._break(generation, members)
                case Retire(worker):
                    self._tell((worker,), Leave())

    def _break(self, generation: int, members: tuple[int, ...]) -> None:
        self._lost_at = self._lost_at or time.monotonic()
        self._hangs.forget()
        # Those who wait in the store for one who is gone are freed by its end.
        self._here.close_store(generation)
        if self._spec.recover == "inplace":
            self._tell(members, Broken(generation))
            return
        self._restarting = generation
        for worker in members:
            if worker in self._coordinator.workers:
                self._node_of(worker).kill(worker, _WITH_PEERS)

    def _form(self, view: View) -> None:
        nodes = [self._coordinator.node(worker) for worker in view.members]
        self._roster.formed(frozenset(nodes))
        self._took_part.update(nodes)
        if view.generation > self._first:
            self._here.close_store(view.generation - 1)
            self._record(
                "view",
                generation=view.generation,
                members=[self._coordinator.slot(worker) for worker in view.members],
                world_size=len(view.members),
                computing=view.computing,
                nodes=len(set(nodes)),
                why=self._why,
                recovery=self._hit or self._asked_to_reform != view.generation - 1,
                step=max(self._step_of(worker) for worker in view.members),
                seconds=self._since_loss(),
            )
        self._joined.clear()
        self._why, self._hit = "", False
        self._hangs.forms(view, nodes)
        port = self._here.open_store(view.generation, self._address)
        there: Counter[str] = Counter(nodes)
        so_far: Counter[str] = Counter()
        for rank, (worker, node) in enumerate(zip(view.members, nodes, strict=True)):
            place = Place(
                generation=view.generation,
                rank=rank,
                world_size=len(view.members),
                local_rank=so_far[node],
                local_world_size=there[node],
                computing=view.computing,
                address=self._address,
                port=port,
            )
            so_far[node] += 1
            self._nodes[node].tell(worker, place)

    def _tell(self, workers: Sequence[int], order: Order) -> None:
        for worker in workers:
            # One that has ended may be in the view still.
            if worker in self._coordinator.workers:
                self._node_of(worker).tell(worker, order)

    def _node_of(self, worker: int) -> Orders:
        return self._nodes[self._coordinator.node(worker)]

    def _since_loss(self) -> float | None:
        return None if self._lost_at is None else round(time.monotonic() - self._lost_at, 4)

    def _record(self, kind: str, **fields: object) -> None:
        # A full disk is no reason to give up the workers.
        with suppress(OSError):
            self._directory.append_event(kind, **fields)
