"""Forms groups of workers, one after the other, as workers come and go."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# --- Views, and what :class:`~paceline.elastic.coordinator.Coordinator` asks its driver to do. No torch ---


Status = Literal["starting", "waiting", "member"]


@dataclass(frozen=True)
class WorkerGroup:
    """One generation of the group.

    Attributes:
        generation: rises by one with every view.
        members: worker ids; the position is the rank.
        computing: how many of them, from rank 0 on, compute micro-batches; the others are spares.
    """

    generation: int
    members: tuple[int, ...]
    active: int


@dataclass(frozen=True)
class Start:
    """Start this worker on this node, in this slot."""

    worker: int
    node: str
    local_index: int


@dataclass(frozen=True)
class FormGroup:
    """Tell these members to form this view."""

    group: WorkerGroup


@dataclass(frozen=True)
class RequestReform:
    """Tell the view's members to leave it together, after a step."""

    group: WorkerGroup


@dataclass(frozen=True)
class BreakGroup:
    """Tell these members that the view is broken, should they not feel it by themselves."""

    generation: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class StopWorker:
    """Tell a worker to end: it is not needed any more."""

    worker: int


Action = Start | FormGroup | RequestReform | BreakGroup | StopWorker


@dataclass(frozen=True)
class WorkerSlot:
    """Where a worker is on its node, and what it does."""

    local_index: int
    status: Status


# --- The membership protocol of the leading agent, as a pure state machine: events in, actions out ---
#
# A *view* is one generation of the group: a number and its members, in the order of their ranks.
# A worker is *starting* until it first asks for a view, then *waiting* until it is in one, then a
# *member*. A view is broken once a member has died or has left it. Then every living member leaves
# it too (a death is felt by all as a lost peer), asks for a new one, and the next generation is
# formed of all that wait: survivors first, in their old order, so that rank 0 is one that holds the
# state, then those who join. Where nobody survives, the next view waits for all, like the first. No view
# is formed while a living member of the last one may still act in it; whoever never leaves it is silent,
# and is killed by the agent before that.
#
# Workers run on *nodes*, the machines of a job, each of which has an agent. Nodes come and go; with a node
# all its workers are gone. While the agents have not agreed on who they are, views are *held*: none is
# formed.
#
# A worker that ends in good order, because the run is finished or was asked to stop, breaks nothing:
# the others of its view are about to end too. Whoever loses it before that asks for a new view.


@dataclass
class _Worker:
    node: str
    local_index: int
    status: Status = "starting"
    retiring: bool = False  # not needed; may still be taken back
    told: bool = False  # ... but not once it was told


@dataclass
class Coordinator:
    """Decides who is started, who forms which view and who is sent home.

    Attributes:
        nodes: how many workers each node shall have for computing, in the order in which they came.
        most: how many may compute (the number of micro-batches); who is more waits.
        generation: the last view's.
        spares: how many workers there shall be besides, who hold the state and compute only when needed.
        first: the first view waits for so many nodes.
        least: with fewer nodes no view is formed.
        view: the current view, None before the first.
        held: whether the forming of views has to wait.
        hiring: whether who is lacking is started.
        gathering: the next view waits for all that there should be, as the first one did.
    """

    nodes: dict[str, int]
    max_workers: int
    generation: int
    spares: int = 0
    initial_nodes: int = 1
    min_nodes: int = 1
    group: WorkerGroup | None = None
    frozen: bool = False
    may_spawn: bool = True
    wait_for_all: bool = False
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)  # those who ended in good order
    _vacant: int = 0  # places for computing on nodes that were lost: spares fill them
    _next_worker: int = 0
    _asked: int = -1  # the generation whose members were asked to re-form
    _broken: int = -1  # the generation whose members were told that it is broken
    _invalid_view: int = -1  # the generation that is broken whoever lives: its leader is gone

    def begin(self) -> list[Action]:
        """Start the first workers."""
        return self._decide()

    def take_over(self, first_worker: int, places: int) -> None:
        """Lead workers that another leader has started: :meth:`node_joins` says which.

        Args:
            first_worker: where the numbers of new workers begin: above all that another leader gave.
            places: for computing, on all nodes that there were.
        """
        self._vacant = places
        self._next_worker, self.initial_nodes = first_worker, self.min_nodes
        self.group, self._invalid_view = WorkerGroup(self.generation, (), 0), self.generation

    def observe_view(self, generation: int) -> None:
        """Another leader has formed this view; later ones get higher numbers."""
        if generation > self.generation:
            if self.group is not None and self._invalid_view == self.group.generation:
                self.group, self._invalid_view = WorkerGroup(generation, self.group.members, 0), generation
            self.generation = generation

    def waits(self, worker: int) -> list[Action]:
        """A worker has left its view, or never had one, and asks for the next."""
        if worker in self._workers:
            self._workers[worker].status = "waiting"
        return self._decide()

    def exited(self, worker: int) -> list[Action]:
        """A worker's process has ended."""
        self._workers.pop(worker, None)
        return self._decide()

    def done(self, worker: int) -> list[Action]:
        """A worker's process has ended in good order; from now on nobody is started."""
        self._workers.pop(worker, None)
        self._done.add(worker)
        self.may_spawn = False
        return self._decide()

    def node_joins(self, node: str, nproc: int, seats: Mapping[int, WorkerSlot] | None = None) -> list[Action]:
        """A node has come.

        Args:
            node: its name.
            nproc: how many workers it shall have for computing.
            seats: those that it has already, from before this coordinator led.
        """
        self.nodes[node] = nproc
        self._vacant = max(0, self._vacant - nproc)
        for worker, seat in (seats or {}).items():
            self._workers[worker] = _Worker(node, seat.local_index, seat.status)
            if seat.status == "member" and self.group is not None and self._invalid_view == self.group.generation:
                self.group = WorkerGroup(self.generation, (*self.group.members, worker), 0)
                self._broken = min(self._broken, self.generation - 1)
        return self._decide()

    def resize(self, node: str, nproc: int) -> list[Action]:
        """Another number of workers is wanted on a node; at least 1 over all nodes."""
        self.nodes[node] = nproc
        return self._decide()

    def gather(self) -> list[Action]:
        """Have the next view wait for all; where some are missing in a healthy one, it is left for that."""
        self.wait_for_all = len(self.members()) < self._full
        return self._decide()

    def node_lost(self, node: str) -> list[Action]:
        """A node is gone, and all its workers with it."""
        self._vacant += self.nodes.pop(node, 0)
        self._workers = {w: worker for w, worker in self._workers.items() if worker.node != node}
        return self._decide()

    def hold(self) -> None:
        """Form no view until :meth:`release`."""
        self.frozen = True

    def release(self) -> list[Action]:
        """Form views again."""
        self.frozen = False
        return self._decide()

    @property
    def target(self) -> int:
        """How many workers there shall be, spares included."""
        return sum(self.nodes.values()) + self.spares

    @property
    def _full(self) -> int:
        """How many a view has when nobody is missing."""
        return min(self.target, self.max_workers + self.spares)

    @property
    def workers(self) -> tuple[int, ...]:
        """All that live, by slot."""
        return tuple(sorted(self._workers, key=lambda worker: self._workers[worker].local_index))

    def local_index(self, worker: int) -> int:
        """A worker's slot."""
        return self._workers[worker].local_index

    def node(self, worker: int) -> str:
        """The node that a worker runs on."""
        return self._workers[worker].node

    @property
    def nodes_acting(self) -> frozenset[str]:
        """The nodes with workers that may act in a view."""
        return frozenset(w.node for w in self._workers.values() if w.status == "member")

    @property
    def nodes_next(self) -> frozenset[str]:
        """The nodes of the next view's members, if it were formed of those who are there now."""
        return frozenset(self._workers[w].node for w in self._next_members(("waiting", "member")))

    def is_leaving(self, node: str) -> bool:
        """Whether a node shall have no worker, and none of its workers may act in a view."""
        return self.nodes.get(node) == 0 and node not in self.nodes_acting

    def members(self) -> tuple[int, ...]:
        """The living members of the current view, by rank."""
        return () if self.group is None else tuple(w for w in self.group.members if w in self._workers)

    def _decide(self) -> list[Action]:
        actions: list[Action] = self._staff()
        members = self.members()
        if self.group is not None and not self._is_broken(members):
            self._ask_for_change(members, actions)
            return actions
        acting = [w for w in members if self._workers[w].status == "member"]
        if acting:
            if self.group is not None and self._broken < self.group.generation:
                self._broken = self.group.generation
                actions.append(BreakGroup(self.group.generation, tuple(acting)))
            return actions
        if not self.frozen and len(self.nodes) >= (self.initial_nodes if self.group is None else self.min_nodes):
            self._form(members, actions)
        return actions

    def _staff(self) -> list[Action]:
        """Start whom a node lacks, and mark whom it does not need.

        Who holds the state is kept before who does not, and lower ranks before higher ones. A member is
        told only when the next view forms without it: should the others die before, it is still needed.
        """
        actions: list[Action] = []
        members = self.members()
        for node, wanted in self._wanted().items():
            here = [w for w in self.workers if self.node(w) == node and not self._workers[w].told]
            for _ in range(wanted - len(here) if self.may_spawn else 0):
                taken = {worker.local_index for worker in self._workers.values()}
                slot = next(slot for slot in itertools.count() if slot not in taken)
                self._workers[self._next_worker] = _Worker(node, slot)
                actions.append(Start(self._next_worker, node, slot))
                here.append(self._next_worker)
                self._next_worker += 1
            rank_of = {worker: rank for rank, worker in enumerate(members)}
            here.sort(key=lambda w: (rank_of.get(w, len(members)), self._workers[w].status == "starting"))
            for place, worker in enumerate(here):
                self._workers[worker].retiring = place >= wanted
                if self._workers[worker].retiring and worker not in members:
                    actions.append(self._retire(worker))
        return actions

    def _retire(self, worker: int) -> StopWorker:
        self._workers[worker].told = True
        return StopWorker(worker)

    def _wanted(self) -> dict[str, int]:
        """How many workers each node shall have; spares are dealt out from the last node on."""
        wanted = dict(self.nodes)
        hosts = [node for node in reversed(self.nodes) if self.nodes[node]]
        for node in itertools.islice(itertools.cycle(hosts), self.spares):
            wanted[node] += 1
        return wanted

    def _is_broken(self, members: tuple[int, ...]) -> bool:
        assert self.group is not None
        if self._invalid_view == self.group.generation:
            return True
        lost = [w for w in self.group.members if w not in members and w not in self._done]
        return bool(lost) or any(self._workers[w].status == "waiting" for w in members)

    def _ask_for_change(self, members: tuple[int, ...], actions: list[Action]) -> None:
        """A healthy view changes only for who waits to join it and who is to leave it."""
        assert self.group is not None
        joining = [w for w in self._able(("waiting",)) if w not in members]
        room = self.max_workers + self.spares - len(members)
        leaving = any(self._workers[w].retiring for w in members)
        changes = (joining and room > 0) or leaving or self.wait_for_all
        if self._asked < self.group.generation and changes:
            self._asked = self.group.generation
            actions.append(RequestReform(self.group))

    def _form(self, survivors: tuple[int, ...], actions: list[Action]) -> None:
        """Form the next view of all that wait, if there is anything to wait for no longer."""
        waiting = self._able(("waiting",))
        for_all = self.wait_for_all or not survivors
        if for_all and len(waiting) < min(self._full, len(self._workers)):
            return
        for worker in survivors:
            if self._workers[worker].retiring:
                actions.append(self._retire(worker))
        chosen = self._next_members(("waiting",))
        if not chosen:
            return
        self.wait_for_all = False
        self.generation += 1
        computing = max(1, min(len(chosen), sum(self.nodes.values()) + self._vacant, self.max_workers))
        self.group = WorkerGroup(self.generation, chosen, computing)
        for worker in chosen:
            self._workers[worker].status = "member"
        actions.append(FormGroup(self.group))

    def _next_members(self, statuses: tuple[Status, ...]) -> tuple[int, ...]:
        """Survivors of the current view first, in their order, then who else; as many as there may be."""
        able, survivors = self._able(statuses), self.members()
        order = [w for w in survivors if w in able] + [w for w in able if w not in survivors]
        return tuple(order[: self.max_workers + self.spares])

    def _able(self, statuses: tuple[Status, ...]) -> list[int]:
        workers = self._workers
        return [w for w in self.workers if workers[w].status in statuses and not workers[w].retiring]
