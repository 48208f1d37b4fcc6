"""The leading agent's part: it decides for the workers of all nodes, and judges how the job ends.

Who belongs to which view is decided by :class:`~paceline.membership.coordinator.Coordinator`; here its
actions become orders to the nodes, and what the nodes report becomes its events.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from paceline.agent.chronicle import Chronicle, say
from paceline.agent.ending import Ending
from paceline.agent.hang_watch import Ask, Hang, HangWatch
from paceline.agent.judgement import Judgement, how_it_ended
from paceline.agent.node import Node
from paceline.agent.policy import Budget
from paceline.agent.reports import Ended, Orders, Said
from paceline.agent.restart import Restart
from paceline.agent.workforce import Workforce
from paceline.errors import RunDirectoryError
from paceline.launchers.local.base import LocalSpec
from paceline.membership.channel import Beat, Broken, Joined, Leave, Reform, Report, Standing, Waits
from paceline.membership.coordinator import Coordinator
from paceline.membership.views import Action, AskToReform, Break, Form, Retire, Seat, Start, View
from paceline.run_directory import RunDirectory


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
        spec: LocalSpec,
        directory: RunDirectory,
        coordinator: Coordinator,
        roster: Roster,
        here: Node,
        address: str,
        *,
        follows: bool = False,
    ) -> None:
        self._spec, self._directory, self._roster = spec, directory, roster
        self._here, self._address = here, address
        self._workforce = Workforce(coordinator)
        self.ending = Ending(spec, self._workforce, coordinator)
        self.chronicle = Chronicle(directory, first=-1 if follows else coordinator.generation + 1)
        self.coordinator = coordinator
        self.judgement = Judgement(directory, Budget(spec.max_restarts, first=-1 if follows else None))
        self.beats: dict[int, Beat] = {}
        self._hangs = HangWatch(directory)
        self._restart = Restart(self._workforce)
        self._culprit_is_to_come = False  # the job ends, and whose fault it is nobody has said yet
        coordinator.hold()

    # Nodes.

    def node_joins(self, name: str, node: Orders, nproc: int, seats: Mapping[int, Seat]) -> None:
        """A node has come, with the workers that it has."""
        self._workforce.joins(name, node, seats.values())
        self.learn_shards()
        if self.ending.begun:
            node.stop(signal.SIGTERM)
        self._do(self.coordinator.node_joins(name, nproc, seats))

    def node_lost(self, name: str, why: str) -> None:
        """A node is gone, and all its workers with it."""
        if name not in self._workforce.nodes:
            return
        self.chronicle.hit()
        self.chronicle.lost()
        self.chronicle.record("node lost", node=name, why=why)
        actions = self.coordinator.node_lost(name)
        del self._workforce.nodes[name]
        self._do(actions)

    @property
    def nodes(self) -> frozenset[str]:
        """All that have come."""
        return frozenset(self._workforce.nodes)

    def learn_shards(self) -> None:
        """So many can compute; before the run is created, whoever begins it checks that they are not more."""
        with suppress(RunDirectoryError, KeyError, TypeError, ValueError):
            if self._directory.exists():
                self.coordinator.most = int(self._directory.read_manifest()["config"]["shards"])

    def settle(self) -> None:
        """Form the next view, where one is due and the agents have agreed on its nodes."""
        if self._roster.may_form(self.coordinator.nodes_next):
            actions = self.coordinator.release()
            self.coordinator.hold()
            self._do(actions)

    @property
    def deadline(self) -> float:
        """When :meth:`expire` is due, by the monotonic clock."""
        return min(self.ending.deadline, self._hangs.deadline)

    @property
    def over(self) -> bool:
        """Whether no worker is left."""
        return not self.coordinator.workers

    def expire(self, now: float) -> None:
        """Kill who has not ended within the time given, and who holds the others up."""
        self.ending.expire(now)
        match self._hangs.turn():
            case Ask(workers):
                self._workforce.tell(workers, Report())
            case Hang() as hang:
                self._on_hang(hang)

    def _on_hang(self, hang: Hang) -> None:
        if not hang.culprits:
            self.judgement.verdict = hang.sentence  # it would happen again
            self.ending.kill_all()
            return
        say(hang.sentence)
        for worker, why in hang.culprits.items():
            self._workforce.kill((worker,), why)

    def conclude(self) -> int:
        """Print one message if the job failed; return its exit code."""
        return self.judgement.conclude(self.ending.asked)

    # What the nodes report.

    def said(self, worker: int, message: Said) -> None:
        """A worker sent something."""
        match message:
            case Beat(step, overdue=overdue):
                self.judgement.budget.stands_at(step)
                self.beats[worker] = message
                self._hangs.beats(worker, overdue=overdue)
            case Standing():
                self._hangs.answers(worker, message)
            case Waits(_, why):
                if worker in self.coordinator.members():
                    self.chronicle.lost()
                self.chronicle.left(why)
                if self._spec.recover == "restart" and self._has_lost_a_peer(worker):
                    # It must not be a survivor of the next view; its end breaks this one for the others too.
                    self._restart.end(self.coordinator.generation, (worker,))
                    return
                self._do(self.coordinator.waits(worker))
                self.settle()
            case Joined(generation):
                view = self.coordinator.view
                if view is not None and view.generation == generation:
                    self.chronicle.joined(view, worker, self._step_of(worker))

    def _has_lost_a_peer(self, worker: int) -> bool:
        """Whether a worker has left the current view though nobody asked it to."""
        left_unasked = not self.chronicle.was_asked_to_reform(self.coordinator.generation)
        return self.coordinator.hiring and worker in self.coordinator.members() and left_unasked

    def ended(self, end: Ended) -> None:
        """A worker's process has ended."""
        self.beats.pop(end.worker, None)
        if end.retired and end.code == 0:
            self.chronicle.record("retired", slot=end.slot, pid=end.pid, step=end.step)
            self._do(self.coordinator.exited(end.worker))
        else:
            self._judge(end)
        self.settle()

    def _judge(self, end: Ended) -> None:
        newcomer = self._workforce.is_of_newcomer(end.worker)
        match self.judgement.of(end, stopping=self.ending.begun, newcomer=newcomer):
            case "done":
                self._hangs.finishes(end.worker)
                self._do(self.coordinator.done(end.worker))
                if not self.coordinator.members():
                    # Only spares are left, and nothing is left for them to do.
                    self.ending.kill_all()
                return
            case "unfit":
                self._roster.send_home(self.coordinator.node(end.worker), self.judgement.why_unfit(end))
                return
            case "fault":
                self._fault(end)
            case "fatal" if not self.ending.begun:
                self.ending.within_grace()
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
            self.chronicle.hit()
            if end.worker in self.coordinator.members():
                # A silent member was lost when it was last heard, not when its node lost patience.
                self.chronicle.lost(time.monotonic() - (end.silent_s if end.killed else 0.0))
            self.chronicle.record("fault", slot=end.slot, pid=end.pid, how=how_it_ended(end), step=end.step)
        view, hiring = self.coordinator.view, self.coordinator.hiring
        if not self.judgement.may_go_on(end, view, hiring=hiring, again=again, shared=shared):
            self._culprit_is_to_come = shared
            if not self.ending.begun:
                self.ending.within_grace()

    def _step_of(self, worker: int) -> int:
        return self.beats[worker].step if worker in self.beats else -1

    # What other commands ask.

    def resize(self, wanted: Mapping[str, int], **event: object) -> None:
        """Want so many workers on these nodes; who joins or leaves does so after a step.

        Raises:
            ConfigError: the job is ending, or they cannot.
        """
        self.ending.refuse_changes()
        self.chronicle.record("scale", **event, step=self.judgement.budget.step)
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
        self.chronicle.record("gather", step=self.judgement.budget.step)
        self._do(self.coordinator.gather())
        self.settle()

    # What the coordinator decides.

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Start(worker, node, slot):
                    self._workforce.start(worker, node, slot)
                case Form(view):
                    self._form(view)
                case AskToReform(view):
                    self.chronicle.asked_to_reform(view.generation)
                    self._workforce.tell(view.members, Reform(view.generation))
                case Break(generation, members):
                    self._break(generation, members)
                case Retire(worker):
                    self._workforce.tell((worker,), Leave())

    def _break(self, generation: int, members: tuple[int, ...]) -> None:
        self.chronicle.lost()
        self._hangs.forget()
        # Those who wait in the store for one who is gone are freed by its end.
        self._here.close_store(generation)
        if self._spec.recover == "inplace":
            self._workforce.tell(members, Broken(generation))
        elif not self._culprit_is_to_come:
            self._restart.end(generation, members)

    def _form(self, view: View) -> None:
        nodes = self._workforce.nodes_of(view)
        slots = [self.coordinator.slot(worker) for worker in view.members]
        step = max(self._step_of(worker) for worker in view.members)
        self._roster.formed(frozenset(nodes))
        self._here.close_store(view.generation - 1)
        self.chronicle.formed(view, slots, nodes, step)
        self._hangs.forms(view, nodes)
        port = self._here.open_store(view.generation, self._address)
        self._workforce.place(view, self._address, port)
