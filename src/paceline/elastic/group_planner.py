"""Forms successive groups of workers as workers come and go."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# --- Worker groups, and the actions of a :class:`~paceline.elastic.group_planner.GroupPlanner`. No torch ---


Status = Literal["starting", "waiting", "in_group"]


@dataclass(frozen=True)
class WorkerGroup:
    """One generation of the group.

    Attributes:
        generation: rises by one with every group.
        workers: their ids, by rank.
        active: number of members, from rank 0 on, that compute micro-batches; the others are spares.
    """

    generation: int
    workers: tuple[int, ...]
    active: int


@dataclass(frozen=True)
class Start:
    """Start this worker on this node, with this local index."""

    worker: int
    node: str
    local_index: int


@dataclass(frozen=True)
class FormGroup:
    """Tell the members to form this group."""

    group: WorkerGroup


@dataclass(frozen=True)
class RequestReform:
    """Tell the group's members to leave it together, after a step."""

    group: WorkerGroup


@dataclass(frozen=True)
class BreakGroup:
    """Tell these members that the group is broken, in case they have not noticed."""

    generation: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class StopWorker:
    """Tell a surplus worker to end."""

    worker: int


Action = Start | FormGroup | RequestReform | BreakGroup | StopWorker


@dataclass(frozen=True)
class WorkerState:
    """A worker's local index, and its status."""

    local_index: int
    status: Status


# --- The membership protocol of the leading agent, as a pure state machine: events in, actions out ---
#
# A *group* is one generation: a number and its members, in the order of their ranks. A worker is *starting* until it
# first requests a group, then *waiting* until it is in one, then *in a group*. A group is broken once a member has died
# or left. Every living member then leaves it too (all see a lost peer) and requests a new one, and the next generation
# is formed of all waiting workers: survivors first, in their old order, so that rank 0 has the state, then newcomers.
# Without survivors the next group waits for all, like the first. No group is formed while a living member of the last
# one may still act in it; the agent kills members that do not leave.
#
# Workers run on *nodes*, each with an agent. Nodes come and go, together with all their workers. A node that
# the leader reaches, but another one does not, is *excluded*: its workers leave their group and wait, with the state
# that they have, until it is included again. Groups are formed by an event of its own, :meth:`form_group`, because
# agents of several nodes have to agree before.
#
# A worker that ends normally, because the run is finished or stops, does not break its group, because the other members
# are about to end too. A member that loses it before that requests a new group.


@dataclass
class _Worker:
    node: str
    local_index: int
    status: Status = "starting"
    retiring: bool = False  # surplus, but may still be kept
    is_told: bool = False  # ... unless it got the order to end


@dataclass
class GroupPlanner:
    """Decides which workers start, form a group or end.

    Attributes:
        nodes: number of active workers of each node, in the order of their arrival.
        max_workers: maximum number of active workers (the number of micro-batches); surplus ones wait.
        generation: the last group's.
        spares: number of further workers, which hold the state and compute only when needed.
        initial_nodes: the first group waits for this many nodes.
        min_nodes: with fewer nodes no group is formed.
        group: the current group, None before the first.
        may_spawn: whether missing workers are started.
        wait_for_all: whether the next group waits for all workers, as the first one did.
        excluded: the nodes whose workers are in no group.
        reform_requested: the last generation whose workers got the order to leave it.
    """

    nodes: dict[str, int]
    max_workers: int
    generation: int
    spares: int = 0
    initial_nodes: int = 1
    min_nodes: int = 1
    group: WorkerGroup | None = None
    may_spawn: bool = True
    wait_for_all: bool = False
    excluded: frozenset[str] = frozenset()
    reform_requested: int = -1
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)  # workers that ended normally
    _vacant: int = 0  # active workers of lost nodes, for spares to fill
    _next_worker: int = 0
    _broken: int = -1  # the generation whose members know that it is broken
    _invalid_generation: int = -1  # the generation that is obsolete because its leader is gone

    def take_over(self, first_worker: int, num_active: int, *, has_begun: bool) -> None:
        """Lead workers that another leader started and :meth:`node_joins` reports.

        Args:
            first_worker: the first number of new workers, above all that another leader assigned.
            num_active: number of active workers of all earlier nodes.
            has_begun: whether there was a group; otherwise the first one waits for all initial nodes.
        """
        self._next_worker = first_worker
        if not has_begun:
            return
        self._vacant = num_active
        self.initial_nodes = self.min_nodes
        self.group = WorkerGroup(self.generation, (), 0)
        self._invalid_generation = self.generation

    def observe_generation(self, generation: int) -> None:
        """Record another leader's group; later ones get higher numbers."""
        if generation > self.generation:
            if self.group is not None and self._invalid_generation == self.group.generation:
                self.group = WorkerGroup(generation, self.group.workers, 0)
                self._invalid_generation = generation
            self.generation = generation

    def waits(self, worker: int) -> list[Action]:
        """Record that a worker has left its group, or never had one, and requests the next."""
        if worker in self._workers:
            self._workers[worker].status = "waiting"
        return self._decide()

    def exited(self, worker: int) -> list[Action]:
        """Record that a worker's process has ended."""
        self._workers.pop(worker, None)
        return self._decide()

    def done(self, worker: int) -> list[Action]:
        """Record that a worker has ended normally; from now on none is started."""
        self._workers.pop(worker, None)
        self._done.add(worker)
        self.may_spawn = False
        return self._decide()

    def node_joins(self, node: str, nproc: int, workers: Mapping[int, WorkerState] | None = None) -> list[Action]:
        """Add a node.

        Args:
            nproc: its number of active workers.
            workers: those that it already has, from before this leader led.
        """
        self.nodes[node] = nproc
        self._vacant = max(0, self._vacant - nproc)
        for worker, state in (workers or {}).items():
            self._workers[worker] = _Worker(node, state.local_index, state.status)
            if (
                state.status == "in_group"
                and self.group is not None
                and self._invalid_generation == self.group.generation
            ):
                self.group = WorkerGroup(self.generation, (*self.group.workers, worker), 0)
                self._broken = min(self._broken, self.generation - 1)
        return self._decide()

    def resize(self, node: str, nproc: int) -> list[Action]:
        """Set another number of workers on a node; at least 1 over all nodes."""
        self.nodes[node] = nproc
        return self._decide()

    def allow(self, max_workers: int) -> list[Action]:
        """Set the maximum number of active workers; those that wait take part after a step."""
        self.max_workers = max_workers
        return self._decide()

    def gather(self) -> list[Action]:
        """Make the next group wait for all workers; leave a healthy but incomplete one."""
        self.wait_for_all = len(self.group_workers()) < self.full_size
        return self._decide()

    def exclude(self, nodes: frozenset[str]) -> list[Action]:
        """Form groups without these nodes, and only these, from now on; a group that one of them is in is broken."""
        self.excluded = nodes
        return self._decide()

    def node_lost(self, node: str) -> list[Action]:
        """Remove a node and all its workers."""
        self._vacant += self.nodes.pop(node, 0)
        self.excluded -= {node}
        self._workers = {w: worker for w, worker in self._workers.items() if worker.node != node}
        return self._decide()

    def form_group(self) -> list[Action]:
        """Form the next group, if one is due."""
        return self._decide(forms=True)

    def stop_spawning(self) -> None:
        """Start no more workers."""
        self.may_spawn = False

    @property
    def target(self) -> int:
        """The wanted number of workers, including spares."""
        return sum(self.nodes.values()) + self.spares

    @property
    def full_size(self) -> int:
        """The size of a complete group."""
        target = sum(nproc for node, nproc in self.nodes.items() if node not in self.excluded) + self.spares
        return min(target, self.max_workers + self.spares)

    @property
    def workers(self) -> tuple[int, ...]:
        """All living workers, by local index."""
        return tuple(sorted(self._workers, key=lambda worker: self._workers[worker].local_index))

    def local_index(self, worker: int) -> int:
        return self._workers[worker].local_index

    def node(self, worker: int) -> str:
        return self._workers[worker].node

    @property
    def nodes_acting(self) -> frozenset[str]:
        """The nodes with workers that may act in a group."""
        return frozenset(w.node for w in self._workers.values() if w.status == "in_group")

    @property
    def nodes_next(self) -> frozenset[str]:
        """The nodes of the next group's members, as far as these have started."""
        statuses: tuple[Status, ...] = ("waiting", "in_group")
        # Of too many workers those are members that come first, whichever of them has started first.
        chosen = self._choose_workers(("starting", *statuses) if self._waits_for_all else statuses)
        return frozenset(self._workers[w].node for w in chosen if self._workers[w].status != "starting")

    @property
    def _waits_for_all(self) -> bool:
        return self.wait_for_all or not self.group_workers()

    def is_leaving(self, node: str) -> bool:
        """Return whether a node should have no worker, and none of its workers may act in a group."""
        return self.nodes.get(node) == 0 and node not in self.nodes_acting

    def group_workers(self) -> tuple[int, ...]:
        """Return the living members of the current group, by rank."""
        return () if self.group is None else tuple(w for w in self.group.workers if w in self._workers)

    def _decide(self, *, forms: bool = False) -> list[Action]:
        actions: list[Action] = self._staff()
        in_group = self.group_workers()
        if self.group is not None and not self._is_broken(in_group):
            self._ask_for_change(in_group, actions)
            return actions
        acting = [w for w in in_group if self._workers[w].status == "in_group"]
        if acting:
            if self.group is not None and self._broken < self.group.generation:
                self._broken = self.group.generation
                actions.append(BreakGroup(self.group.generation, tuple(acting)))
            return actions
        if forms and not self.lacks_nodes:
            self._form(in_group, actions)
        return actions

    @property
    def lacks_nodes(self) -> bool:
        """Whether there are too few nodes for the next group."""
        return len(self.nodes.keys() - self.excluded) < (self.initial_nodes if self.group is None else self.min_nodes)

    def _staff(self) -> list[Action]:
        """Start the missing workers of each node, and mark surplus ones.

        Workers with the state are kept before others, and lower ranks before higher ones. A member is ordered to end
        only when the next group forms without it, because it is still needed if others die before.
        """
        actions: list[Action] = []
        in_group = self.group_workers()
        for node, wanted in self._wanted().items():
            workers_here = [w for w in self.workers if self.node(w) == node and not self._workers[w].is_told]
            for _ in range(wanted - len(workers_here) if self.may_spawn else 0):
                used_indices = {worker.local_index for worker in self._workers.values()}
                local_index = next(local_index for local_index in itertools.count() if local_index not in used_indices)
                self._workers[self._next_worker] = _Worker(node, local_index)
                actions.append(Start(self._next_worker, node, local_index))
                workers_here.append(self._next_worker)
                self._next_worker += 1
            rank_of = {worker: rank for rank, worker in enumerate(in_group)}
            workers_here.sort(key=lambda w: (rank_of.get(w, len(in_group)), self._workers[w].status == "starting"))
            for position, worker in enumerate(workers_here):
                self._workers[worker].retiring = position >= wanted
                if self._workers[worker].retiring and worker not in in_group:
                    actions.append(self._retire(worker))
        return actions

    def _retire(self, worker: int) -> StopWorker:
        self._workers[worker].is_told = True
        return StopWorker(worker)

    def _wanted(self) -> dict[str, int]:
        """Return the number of workers of each node; spares are assigned from the last node on."""
        wanted = dict(self.nodes)
        hosts = [node for node in reversed(self.nodes) if self.nodes[node]]
        for node in itertools.islice(itertools.cycle(hosts), self.spares):
            wanted[node] += 1
        return wanted

    def _is_broken(self, in_group: tuple[int, ...]) -> bool:
        assert self.group is not None
        if self._invalid_generation == self.group.generation:
            return True
        lost = [w for w in self.group.workers if w not in in_group and w not in self._done]
        is_excluded = any(self.node(w) in self.excluded for w in in_group)
        return bool(lost) or is_excluded or any(self._workers[w].status == "waiting" for w in in_group)

    def _ask_for_change(self, in_group: tuple[int, ...], actions: list[Action]) -> None:
        """Request a re-form of a healthy group if workers wait to join or should leave."""
        assert self.group is not None
        joining = [w for w in self._eligible(("waiting",)) if w not in in_group]
        vacancies = self.max_workers + self.spares - len(in_group)
        leaving = any(self._workers[w].retiring for w in in_group)
        changes = (joining and vacancies > 0) or leaving or self.wait_for_all
        if self.reform_requested < self.group.generation and changes:
            self.reform_requested = self.group.generation
            actions.append(RequestReform(self.group))

    def _form(self, survivors: tuple[int, ...], actions: list[Action]) -> None:
        """Form the next group of all waiting workers, unless it must wait for more."""
        next_workers = self._choose_workers(
            ("starting", "waiting", "in_group") if self._waits_for_all else ("waiting",)
        )
        if any(self._workers[w].status != "waiting" for w in next_workers):
            return
        for worker in survivors:
            if self._workers[worker].retiring:
                actions.append(self._retire(worker))
        if not next_workers:
            return
        self.wait_for_all = False
        self.generation += 1
        num_active = max(1, min(len(next_workers), sum(self.nodes.values()) + self._vacant, self.max_workers))
        self.group = WorkerGroup(self.generation, next_workers, num_active)
        for worker in next_workers:
            self._workers[worker].status = "in_group"
        actions.append(FormGroup(self.group))

    def _choose_workers(self, statuses: tuple[Status, ...]) -> tuple[int, ...]:
        """Return survivors of the current group in their order, then other workers, up to the maximum."""
        eligible, survivors = self._eligible(statuses), self.group_workers()
        order = [w for w in survivors if w in eligible] + [w for w in eligible if w not in survivors]
        return tuple(order[: self.max_workers + self.spares])

    def _eligible(self, statuses: tuple[Status, ...]) -> list[int]:
        workers = {w: worker for w, worker in self._workers.items() if worker.node not in self.excluded}
        return [w for w in self.workers if w in workers and workers[w].status in statuses and not workers[w].retiring]
