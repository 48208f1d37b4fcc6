"""The membership protocol: scripted cases, and a search through all interleavings of a small world."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

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


class Planner(GroupPlanner):
    """It forms each group as soon as it can, unless told otherwise."""

    forms_at_once = True

    def begin(self) -> list[Action]:
        return self._decide()

    def _decide(self, *, forms: bool = False) -> list[Action]:
        return super()._decide(forms=forms or self.forms_at_once)


def worker_group(generation: int, members: tuple[int, ...], computing: int | None = None) -> WorkerGroup:
    """A group in which all compute, unless said otherwise."""
    return WorkerGroup(generation, members, len(members) if computing is None else computing)


def formed(nproc: int, most: int | None = None, generation: int = -1, spares: int = 0) -> Planner:
    """A planner of one node whose first group has formed of workers 0, 1, ..."""
    planner = Planner(nodes={"a": nproc}, max_workers=most or nproc, generation=generation, spares=spares)
    target = nproc + spares
    assert planner.begin() == [Start(w, "a", w) for w in range(target)]
    for worker in range(target):
        planner.waits(worker)
    assert planner.group is not None
    return planner


def test_the_first_group_waits_for_all() -> None:
    planner = Planner(nodes={"a": 3}, max_workers=3, generation=6)
    planner.begin()
    assert planner.waits(2) == []
    assert planner.waits(0) == []
    assert planner.waits(1) == [FormGroup(worker_group(7, (0, 1, 2)))]


def test_survivors_go_on_before_the_replacement_is_there() -> None:
    planner = formed(3)
    assert planner.exited(0) == [Start(3, "a", 0), BreakGroup(0, (1, 2))]
    assert planner.waits(2) == []
    assert planner.waits(1) == [FormGroup(worker_group(1, (1, 2)))]
    assert planner.waits(3) == [RequestReform(worker_group(1, (1, 2)))]
    assert planner.waits(1) == [BreakGroup(1, (2,))]
    # The newcomer has the lowest local index, but holds nothing: it is last.
    assert planner.waits(2) == [FormGroup(worker_group(2, (1, 2, 3)))]


def test_a_group_is_asked_once_to_re_form() -> None:
    planner = formed(3)
    planner.exited(1)
    planner.exited(2)
    assert planner.waits(0) == [FormGroup(worker_group(1, (0,)))]
    assert planner.waits(3) == [RequestReform(worker_group(1, (0,)))]
    assert planner.waits(4) == []
    assert planner.waits(0) == [FormGroup(worker_group(2, (0, 3, 4)))]


def test_no_group_while_a_member_may_still_act_in_the_last() -> None:
    planner = formed(3)
    planner.exited(0)
    planner.waits(3)
    assert planner.waits(1) == []  # 2 is silent
    assert planner.exited(2) == [Start(4, "a", 2), FormGroup(worker_group(1, (1, 3)))]


def test_where_all_are_lost_the_next_group_waits_for_all() -> None:
    planner = formed(2)
    planner.exited(0)
    assert planner.exited(1) == [Start(3, "a", 1)]
    assert planner.waits(3) == []
    assert planner.waits(2) == [FormGroup(worker_group(1, (2, 3)))]


def test_a_member_that_is_done_breaks_nothing() -> None:
    planner = formed(3)
    assert planner.done(1) == []
    assert planner.done(0) == []
    # The last worker loses the others before it has finished: it continues alone, and no worker is started.
    assert planner.waits(2) == [FormGroup(worker_group(1, (2,)))]
    assert planner.exited(2) == []


def test_nobody_is_started_once_hiring_has_ended() -> None:
    planner = Planner(nodes={"a": 3}, max_workers=3, generation=-1)
    planner.begin()
    planner.waits(0)
    planner.may_spawn = False
    assert planner.exited(1) == []
    assert planner.waits(2) == [FormGroup(worker_group(0, (0, 2)))]


def test_growing_and_shrinking() -> None:
    planner = formed(2, most=4)
    assert planner.resize("a", 4) == [Start(2, "a", 2), Start(3, "a", 3)]
    assert planner.waits(3) == [RequestReform(worker_group(0, (0, 1)))]
    planner.waits(2)
    planner.waits(0)
    assert planner.waits(1) == [FormGroup(worker_group(1, (0, 1, 2, 3)))]
    assert planner.resize("a", 3) == [RequestReform(worker_group(1, (0, 1, 2, 3)))]
    for worker in (0, 1, 2):
        planner.waits(worker)
    assert planner.waits(3) == [StopWorker(3), FormGroup(worker_group(2, (0, 1, 2)))]
    # The retired one has not ended yet, so its local index, and its log, is not given away.
    assert planner.resize("a", 4) == [Start(4, "a", 4)]


def test_who_holds_the_state_is_kept_before_who_does_not() -> None:
    planner = formed(3)
    assert planner.exited(0) == [Start(3, "a", 0), BreakGroup(0, (1, 2))]
    planner.waits(1)
    assert planner.waits(2) == [FormGroup(worker_group(1, (1, 2)))]
    # The replacement with index 0 holds nothing yet: it goes at once, and then the highest rank.
    assert planner.resize("a", 1) == [StopWorker(3), RequestReform(worker_group(1, (1, 2)))]
    planner.waits(2)
    assert planner.waits(1) == [StopWorker(2), FormGroup(worker_group(2, (1,)))]


def test_who_was_to_leave_stays_where_the_others_died() -> None:
    planner = formed(2)
    assert planner.resize("a", 1) == [RequestReform(worker_group(0, (0, 1)))]
    assert planner.exited(0) == [BreakGroup(0, (1,))]
    assert planner.waits(1) == [FormGroup(worker_group(1, (1,)))]


def test_who_was_to_leave_stays_where_it_is_wanted_again() -> None:
    planner = formed(2)
    planner.resize("a", 1)
    assert planner.resize("a", 2) == []
    planner.waits(0)
    assert planner.waits(1) == [FormGroup(worker_group(1, (0, 1)))]


def test_a_group_that_gathers_waits_for_all() -> None:
    planner = formed(3)
    assert planner.gather() == []  # all are there
    planner.exited(0)
    planner.waits(1)
    assert planner.waits(2) == [FormGroup(worker_group(1, (1, 2)))]
    assert planner.gather() == [RequestReform(worker_group(1, (1, 2)))]
    planner.waits(2)
    assert planner.waits(1) == []
    assert planner.waits(3) == [FormGroup(worker_group(2, (1, 2, 3)))]
    assert not planner.wait_for_all


def test_a_target_may_change_before_the_first_group() -> None:
    planner = Planner(nodes={"a": 3}, max_workers=4, generation=-1)
    planner.begin()
    planner.waits(0)
    planner.waits(1)
    assert planner.resize("a", 2) == [StopWorker(2), FormGroup(worker_group(0, (0, 1)))]
    assert planner.resize("a", 4) == [Start(3, "a", 3), Start(4, "a", 4)]


def test_more_than_can_compute_wait() -> None:
    planner = formed(3, most=2)
    assert planner.group == worker_group(0, (0, 1))
    assert planner.exited(1) == [Start(3, "a", 1), BreakGroup(0, (0,))]
    assert planner.waits(0) == [FormGroup(worker_group(1, (0, 2)))]


def test_a_spare_is_a_member_that_computes_once_it_is_needed() -> None:
    planner = formed(2, spares=1)
    assert planner.group == worker_group(0, (0, 1, 2), computing=2)
    assert planner.exited(0) == [Start(3, "a", 0), BreakGroup(0, (1, 2))]
    planner.waits(1)
    assert planner.waits(2) == [FormGroup(worker_group(1, (1, 2), computing=2))]
    assert planner.waits(3) == [RequestReform(worker_group(1, (1, 2), computing=2))]


def two_nodes(spares: int = 0, least: int = 1) -> Planner:
    """Two nodes of two workers each, and their first group."""
    planner = Planner(nodes={"a": 2}, max_workers=12, generation=-1, spares=spares, min_nodes=least)
    assert planner.begin() == [Start(0, "a", 0), Start(1, "a", 1)]
    assert planner.node_joins("b", 2) == [Start(2, "b", 2), Start(3, "b", 3)]
    for worker in planner.workers:
        planner.waits(worker)
    return planner


def test_with_a_node_all_its_workers_are_gone() -> None:
    planner = two_nodes()
    assert planner.group == worker_group(0, (0, 1, 2, 3))
    planner.forms_at_once = False  # until the agents have agreed that it is gone
    assert planner.node_lost("a") == [BreakGroup(0, (2, 3))]
    assert planner.waits(2) == []
    assert planner.waits(3) == []
    assert planner.form_group() == [FormGroup(worker_group(1, (2, 3)))]
    # One that comes takes what is vacant, and joins after a step.
    assert planner.node_joins("c", 1) == [Start(4, "c", 0)]
    assert planner.waits(4) == [RequestReform(worker_group(1, (2, 3)))]


def test_too_few_nodes_wait_for_others() -> None:
    planner = two_nodes(least=2)
    assert planner.node_lost("b") == [BreakGroup(0, (0, 1))]
    planner.waits(0)
    assert planner.waits(1) == []
    planner.node_joins("d", 2)
    planner.waits(4)
    assert planner.waits(5) == []


def three_nodes(least: int = 1) -> Planner:
    """Three nodes of one worker each, and their first group."""
    planner = Planner(nodes={"a": 1, "b": 1, "c": 1}, max_workers=12, generation=-1, min_nodes=least)
    planner.begin()
    for worker in (0, 1, 2):
        planner.waits(worker)
    assert planner.group == worker_group(0, (0, 1, 2))
    return planner


def test_an_excluded_node_waits_with_its_state_and_comes_back_last() -> None:
    planner = three_nodes()
    assert planner.exclude(frozenset("b")) == [BreakGroup(0, (0, 1, 2))]
    planner.waits(0)
    assert planner.waits(2) == []  # 1 may act still, excluded or not
    assert planner.waits(1) == [FormGroup(worker_group(1, (0, 2)))]
    assert planner.exclude(frozenset("b")) == []
    assert planner.exclude(frozenset()) == [RequestReform(worker_group(1, (0, 2)))]
    planner.waits(0)
    assert planner.waits(2) == [FormGroup(worker_group(2, (0, 2, 1)))]


def test_another_node_is_excluded_in_the_place_of_the_first() -> None:
    planner = three_nodes()
    planner.exclude(frozenset("b"))
    for worker in (0, 1, 2):
        planner.waits(worker)
    assert planner.exclude(frozenset("c")) == [BreakGroup(1, (0, 2))]
    planner.waits(2)
    assert planner.waits(0) == [FormGroup(worker_group(2, (0, 1)))]


def test_an_excluded_node_does_not_count() -> None:
    planner = three_nodes(least=3)
    planner.exclude(frozenset("b"))
    for worker in (0, 1, 2):
        assert not any(isinstance(action, FormGroup) for action in planner.waits(worker))
    assert planner.lacks_nodes
    assert planner.exclude(frozenset()) == [FormGroup(worker_group(1, (0, 1, 2)))]


def test_the_first_group_does_not_wait_for_an_excluded_node() -> None:
    planner = Planner(nodes={"a": 1, "b": 1, "c": 1}, max_workers=12, generation=-1, initial_nodes=2)
    planner.exclude(frozenset("c"))
    assert planner.waits(0) == []
    assert planner.waits(1) == [FormGroup(worker_group(0, (0, 1)))]


def test_spares_compute_for_an_excluded_node() -> None:
    planner = Planner(nodes={"a": 1, "b": 1}, max_workers=12, generation=-1, spares=1)
    planner.begin()
    for worker in (0, 1, 2):
        planner.waits(worker)
    planner.exclude(frozenset("a"))
    for worker in (0, 1, 2):
        actions = planner.waits(worker)
    assert actions == [FormGroup(WorkerGroup(1, (1, 2), 2))]


def test_spares_are_on_the_last_nodes() -> None:
    planner = Planner(nodes={"a": 2, "b": 2}, max_workers=12, generation=-1, spares=1)
    assert planner.begin() == [
        Start(0, "a", 0),
        Start(1, "a", 1),
        Start(2, "b", 2),
        Start(3, "b", 3),
        Start(4, "b", 4),
    ]


@pytest.mark.parametrize("leader", ["the same", "another"])
def test_spares_compute_for_a_node_that_was_lost(leader: str) -> None:
    """They stop when another node joins, also if another agent leads by then."""
    planner = Planner(nodes={"a": 1, "b": 1}, max_workers=12, generation=-1, spares=1)
    planner.begin()
    for worker in (0, 1, 2):
        actions = planner.waits(worker)
    assert actions == [FormGroup(WorkerGroup(0, (0, 1, 2), 2))]
    if leader == "the same":
        planner.node_lost("a")
    else:
        planner = Planner(nodes={}, max_workers=12, generation=0, spares=1)
        planner.take_over(100, 2, has_begun=True)
        planner.node_joins("b", 1, {1: WorkerState(1, "in_group"), 2: WorkerState(2, "in_group")})
    planner.waits(1)
    assert planner.waits(2) == [FormGroup(WorkerGroup(1, (1, 2), 2))]
    # The spare is on the last node again.
    started = [action.worker for action in planner.node_joins("c", 1) if isinstance(action, Start)]
    for worker in (*started, 1):
        planner.waits(worker)
    assert planner.waits(2)[-1] == FormGroup(WorkerGroup(2, (1, *started), 2))


def test_a_takeover_before_the_first_group_waits_for_all_initial_nodes() -> None:
    planner = Planner(nodes={}, max_workers=3, generation=-1, initial_nodes=3)
    planner.take_over(100, 2, has_begun=False)
    planner.node_joins("b", 1, {1: WorkerState(0, "waiting")})
    assert planner.lacks_nodes
    planner.node_joins("c", 1, {2: WorkerState(0, "waiting")})
    assert planner.lacks_nodes
    actions = planner.node_joins("d", 1, {3: WorkerState(0, "waiting")})
    assert actions == [FormGroup(WorkerGroup(0, (1, 2, 3), 3))]


def test_who_takes_over_ends_the_group_and_keeps_its_members_in_front() -> None:
    planner = Planner(nodes={}, max_workers=12, generation=4)
    planner.forms_at_once = False  # until enough nodes have told of their workers
    planner.take_over(100, 6, has_begun=True)
    workers = {11: WorkerState(2, "in_group"), 12: WorkerState(3, "waiting")}
    assert planner.node_joins("b", 2, workers) == [BreakGroup(4, (11,))]
    assert planner.waits(11) == []
    assert planner.node_joins("c", 2, {21: WorkerState(1, "in_group")}) == [
        Start(100, "c", 0),
        BreakGroup(4, (21,)),
    ]
    planner.waits(21)
    assert planner.form_group() == [FormGroup(worker_group(5, (11, 21, 12)))]


GATHER = 0  # in place of a number of workers: no group can have none


@dataclass
class Process:
    """A worker as it really is, and what is on its way between it and the agent.

    Attributes:
        acts_in: the generation in which it computes and communicates; None: it waits for a group.
        asked: it has asked for a group since it was in one.
        wants_out: it was told that its group is broken, or to be left.
    """

    acts_in: int | None = None
    asked: bool = False
    wants_out: bool = False
    to_agent: deque[str] = field(default_factory=deque)
    to_worker: deque[tuple[str, int]] = field(default_factory=deque)


class World:
    """The planner, its workers and the messages between them; every step is one event."""

    def __init__(
        self, target: int, most: int, deaths: int, resizes: tuple[int, ...] = (), exclusions: tuple[str, ...] = ()
    ) -> None:
        """With exclusions, each of them nodes that are excluded at once, there is a node for each worker."""
        nodes = dict.fromkeys("abc"[:target], 1) if exclusions else {"a": target}
        self.planner = Planner(nodes=nodes, max_workers=most, generation=-1)
        self.exclusions = exclusions
        self.alive: dict[int, Process] = {}
        self.dead: list[int] = []  # not noticed yet
        self.deaths = deaths
        self.resizes = resizes
        self.perform(self.planner.begin())

    def events(self) -> Iterator[tuple[str, int]]:
        for worker, process in self.alive.items():
            if process.acts_in is None and not process.asked:
                yield "ask", worker
            if process.acts_in is not None and (process.wants_out or self.lost_a_peer(process)):
                yield "leave", worker
            if process.to_agent:
                yield "hear", worker
            if process.to_worker:
                yield "tell", worker
            if self.deaths:
                yield "die", worker
        for worker in self.dead:
            yield "notice", worker
        if self.resizes:
            yield "resize", 0
        if self.exclusions:
            yield "exclude", 0

    def lost_a_peer(self, process: Process) -> bool:
        """Whether a connection broke: a peer has died, or has left this generation."""
        group = self.planner.group
        if group is None or process.acts_in != group.generation:
            return True
        return any(
            w not in self.alive
            or (
                self.alive[w].acts_in != group.generation and ("group", group.generation) not in self.alive[w].to_worker
            )
            for w in group.workers
        )

    def happens(self, what: str, worker: int) -> None:
        planner = self.planner
        if what == "ask":
            self.alive[worker].asked = True
            self.alive[worker].to_agent.append("waits")
        elif what == "leave":
            self.alive[worker].acts_in = None
            self.alive[worker].wants_out = False
        elif what == "hear":
            self.alive[worker].to_agent.popleft()
            self.perform(planner.waits(worker))
        elif what == "tell":
            self.told(worker, *self.alive[worker].to_worker.popleft())
        elif what == "die":
            del self.alive[worker]
            self.dead.append(worker)
            self.deaths -= 1
        elif what == "notice":
            self.dead.remove(worker)
            self.perform(planner.exited(worker))
        elif what == "exclude":
            excluded, *others = self.exclusions
            self.exclusions = tuple(others)
            self.perform(planner.exclude(frozenset(excluded)))
        else:
            target, *rest = self.resizes
            self.resizes = tuple(rest)
            self.perform(planner.gather() if target == GATHER else planner.resize("a", target))

    def told(self, worker: int, what: str, generation: int) -> None:
        process = self.alive[worker]
        if what == "group":
            process.acts_in, process.asked = generation, False
        elif what == "retire":
            del self.alive[worker]
            self.dead.append(worker)
        elif process.acts_in == generation:
            process.wants_out = True

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(worker, _, index):
                    indices = [self.planner.local_index(w) for w in self.planner.workers]
                    assert len(indices) == len(set(indices)), f"local index {index} is given twice"
                    self.alive[worker] = Process()
                case FormGroup(group):
                    self.form(group)
                case RequestReform(group):
                    self.send(group.workers, "reform", group.generation)
                case BreakGroup(generation, members):
                    self.send(members, "break", generation)
                case StopWorker(worker):
                    self.send((worker,), "retire", 0)

    def send(self, workers: tuple[int, ...], what: str, generation: int) -> None:
        for worker in workers:
            if worker in self.alive:
                self.alive[worker].to_worker.append((what, generation))

    def form(self, group: WorkerGroup) -> None:
        assert 0 < len(group.workers) <= self.planner.max_workers
        acting = [w for w, process in self.alive.items() if process.acts_in is not None]
        assert not acting, f"{group} is formed while {acting} still act in an older one"
        pending = [w for w, p in self.alive.items() if any(what == "group" for what, _ in p.to_worker)]
        assert not pending, f"{group} is formed while {pending} are still told of an older one"
        self.send(group.workers, "group", group.generation)

    def settle(self) -> None:
        """Let all that is due happen, without further faults, until nothing is."""
        for _ in range(300):
            event = next((e for e in self.events() if e[0] not in ("die", "resize", "exclude")), None)
            if event is None:
                return
            self.happens(*event)
        raise AssertionError("the protocol does not come to rest")

    def key(self) -> str:
        faults = (self.deaths, self.resizes, self.exclusions)
        return repr((self.planner, sorted(self.alive.items()), self.dead, faults))


def check_at_rest(world: World) -> None:
    """Once the faults end, all that should be are in one group and act in it."""
    planner = world.planner
    group = planner.group
    assert group is not None
    included = sum(nproc for node, nproc in planner.nodes.items() if node not in planner.excluded)
    assert len(group.workers) == min(included, planner.max_workers)
    assert not planner.excluded & {planner.node(w) for w in group.workers}
    assert set(group.workers) <= set(world.alive)
    assert len(world.alive) == planner.target
    assert all(world.alive[w].acts_in == group.generation for w in group.workers)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("target", "most", "deaths", "resizes", "exclusions"),
    [
        (2, 2, 2, (), ()),
        (3, 2, 1, (), ()),
        pytest.param(2, 3, 1, (3,), (), marks=pytest.mark.matrix),
        (3, 3, 0, (2,), ()),
        (2, 2, 1, (1,), ()),
        pytest.param(2, 2, 1, (1, 2), (), marks=pytest.mark.matrix),
        (2, 2, 2, (GATHER,), ()),
        (2, 2, 1, (), ("b", "")),
        pytest.param(3, 3, 0, (), ("c", "b", ""), marks=pytest.mark.matrix),
    ],
)
def test_every_interleaving(
    target: int, most: int, deaths: int, resizes: tuple[int, ...], exclusions: tuple[str, ...]
) -> None:
    """From every state that any order of events leads to, the survivors come to rest in one group."""
    start = World(target, most, deaths, resizes, exclusions)
    seen = {start.key()}
    frontier = [start]
    while frontier:
        world = frontier.pop()
        at_rest = copy.deepcopy(world)
        at_rest.settle()
        check_at_rest(at_rest)
        for event in list(world.events()):
            following = copy.deepcopy(world)
            before = following.planner.group
            following.happens(*event)
            planner = following.planner
            survivors = [w for w in world.planner.group_workers() if world.planner.node(w) not in planner.excluded]
            after = following.planner.group
            if after is not None and before is not None and after != before:
                assert after.generation == before.generation + 1
                staying = [w for w in survivors if w in after.workers]
                # Rank 0 holds the state if any worker does, and the survivors keep their order.
                assert list(after.workers[: len(staying)]) == staying
                assert staying or not survivors, "no worker that holds the state is in the new group"
            key = following.key()
            if key not in seen:
                seen.add(key)
                frontier.append(following)
    assert len(seen) >= 300
