"""The small world of agents with an etcd that answers late, not at all, or after its reply was lost; for a search."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field, replace
from typing import Any

from tests.elastic.membership.agents_world import Break, Driver, Event, View, World

from paceline.elastic.consensus.membership import Action, CannotReform, Committed
from paceline_etcd.client import EtcdRecord, EtcdSnapshot, Operation, Reply, Resign, Unavailable, Write
from paceline_etcd.membership import Ask, EtcdLeadership


@dataclass
class EtcdWorld(World):
    """All agents, and etcd.

    Attributes:
        kept: what etcd holds.
        revision: etcd's own.
        asked: the operation that etcd has not executed yet, of each node.
        answers: the reply that is on its way; with the operation, or None for what the session has noticed.
        records: the record of each term and epoch that etcd has ever held.
        outages: how many operations may still fail; some are executed all the same, at once or later.
        late: operations that failed, and will be executed.
        expiries: how many etcd leases of living nodes may still expire.
    """

    kept: EtcdSnapshot = field(default_factory=EtcdSnapshot)
    revision: int = 0
    asked: dict[str, Operation] = field(default_factory=dict)
    answers: dict[str, tuple[tuple[Operation | None, Reply], ...]] = field(default_factory=dict)
    outages: int = 0
    expiries: int = 0
    late: tuple[tuple[str, Operation], ...] = ()
    settles: bool = False

    @classmethod
    def on_etcd(cls, names: str, acting: str, **faults: int) -> EtcdWorld:
        """Agents named a, b, ... that a leads, with a view of some of them at work."""
        agents: dict[str, Any] = {name: EtcdLeadership(name, patience=2) for name in names}
        world = cls(agents, {name: Driver() for name in names}, frozenset(), joins=len(names) - 1)
        world.perform(names[0], agents[names[0]].begin())
        for one in names:
            for other in names[: names.index(one)]:
                world.link(one, other)
        world.rest()
        for _ in range(2):
            world.form(names[0], tuple(acting))
            world.rest()
        assert [view.nodes for view in world.acting()] == [tuple(acting)]
        assert world.kept.record is not None
        assert set(world.kept.record.nodes) == set(names)
        return replace(world, joins=0, **faults)

    def rest(self) -> None:
        """All that is due happens."""
        while event := next(iter(self.due()), None):
            self.happens(event)
            self.check()

    # What can happen.

    def due(self) -> Iterator[Event]:
        for name in sorted(self.asked):
            yield "execute", name, ""
        for name in sorted(self.answers):
            yield "answer", name, ""
        yield from super().due()
        present = {name for name, agent in self.agents.items() if agent.role != "out"}
        for name in sorted(self.kept.alive - present):
            yield "expire", name, ""
        for name in sorted(present - self.kept.alive):
            if self.agents[name].committed:
                yield "grant", name, ""

    def events(self) -> Iterator[Event]:
        yield from super().events()
        if self.outages:
            for name in sorted(self.asked):
                yield "refuse", name, ""
                yield "forget", name, ""
                yield "delay", name, ""
        for number, (name, _) in enumerate(self.late):
            yield "arrive", name, str(number)
        if self.expiries:
            for name in sorted(name for name in self.kept.alive if name in self.agents):
                if self.agents[name].role != "out":
                    yield "expire", name, ""

    def formable(self, name: str) -> Iterator[tuple[str, ...]]:
        """The views that this leader may want to form."""
        agent = self.agents[name]
        assert agent.committed
        clear = [n for n in agent.committed.nodes if n in agent._clear and (n == name or n in agent.reachable)]
        for first in range(len(clear)):
            yield tuple(clear[first:])

    def happens(self, event: Event) -> None:
        what, one, other = event
        if what == "execute":
            operation = self.asked.pop(one)
            self.execute(one, operation)
            self.reply(one, operation, self.kept)
        elif what == "arrive":
            self.execute(*self.late[int(other)])
            self.late = (*self.late[: int(other)], *self.late[int(other) + 1 :])
        elif what in ("refuse", "forget", "delay"):
            self.outages -= 1
            operation = self.asked.pop(one)
            if what == "forget":
                self.execute(one, operation)
            elif what == "delay":
                self.late += ((one, operation),)
            self.reply(one, operation, Unavailable("no etcd"))
        elif what == "answer":
            (operation, reply), *rest = self.answers.pop(one)
            if rest:
                self.answers[one] = tuple(rest)
            if one in self.agents:
                self.perform(one, self.agents[one].answered(operation, reply))
        elif what == "expire":
            if one in self.agents and self.agents[one].role != "out":
                self.expiries -= 1
            self.keep(alive=self.kept.alive - {one})
            if self.kept.holder == one:
                self.keep(holder="", holder_revision=0)
        elif what == "grant":
            self.keep(alive=self.kept.alive | {one})
            self.reply(one, None, self.kept)
        else:
            if what == "notice" and (other not in self.agents or (other, one) not in self.ending):
                self.agents[one]._gone |= {other}  # the other side has closed the connection
            super().happens(event)

    def settle(self, cut: Set[frozenset[str]] = frozenset()) -> None:
        self.outages = self.expiries = 0
        self.late = ()
        self.settles = True
        super().settle(cut)
        self.settles = False

    def lose_patience(self, name: str) -> None:
        super().lose_patience(name)
        if self.settles:
            self.rest()  # whether anything has changed shows after etcd's answer

    def crash(self, name: str) -> None:
        super().crash(name)
        self.asked.pop(name, None)
        self.answers.pop(name, None)

    # What etcd does.

    def execute(self, name: str, operation: Operation) -> None:
        self.keep(alive=self.kept.alive | {name})  # the session gets a new etcd lease first
        match operation:
            case Write(seen, record):
                revisions = (seen.record_revision, seen.holder_revision)
                if revisions == (self.kept.record_revision, self.kept.holder_revision):
                    self.revision += 1
                    self.keep(record=record, record_revision=self.revision, holder=name, holder_revision=self.revision)
            case Resign():
                if self.kept.holder == name:
                    self.keep(holder="", holder_revision=0)

    def keep(self, **changes: Any) -> None:
        self.kept = replace(self.kept, **changes)

    def reply(self, name: str, operation: Operation | None, reply: Reply) -> None:
        self.answers[name] = (*self.answers.get(name, ()), (operation, reply))

    # What agents do.

    def form(self, leader: str, nodes: tuple[str, ...]) -> None:
        """Write the view's nodes first, as the driver does, until they stand there."""
        agent: Any = self.agents[leader]
        self.perform(leader, agent.intend(nodes))
        if agent.may_form(nodes):
            super().form(leader, nodes)

    def perform(self, name: str, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Ask(operation):
                    assert name not in self.asked
                    self.asked[name] = operation
                case CannotReform():
                    assert self.drivers[name].leads
                case Committed(_, node_set):
                    super().perform(name, [action])
                    view = self.drivers[name].formed
                    if view and not set(view.nodes) <= set(node_set.nodes):
                        for node in view.nodes:  # the coordinator breaks a view that a removed node is in
                            self.deliver_break(name, node, view)
                case _:
                    super().perform(name, [action])

    def deliver_break(self, leader: str, node: str, view: View) -> None:
        if node != leader:
            self.send(leader, node, Break(view.number))
        elif self.drivers[node].acts == view:
            self.drivers[node] = replace(self.drivers[node], must_leave=True)

    def check_at_rest(self) -> None:
        """One leads whom all others follow, if a node of the last view is left."""
        record = self.kept.record
        assert isinstance(record, EtcdRecord)
        alive = frozenset(self.agents) & set(record.nodes)
        leaders = [name for name, agent in self.agents.items() if agent.role == "leading"]
        assert len(leaders) <= 1
        if not alive & frozenset(record.group):
            return
        assert leaders == [record.leader], f"{leaders} lead, and {record} is kept"
        assert set(record.nodes) == alive, "the lost are in the roster still"
        for name in alive:
            agent = self.agents[name]
            assert agent.committed is not None
            assert (agent.committed.nodes, agent.leader) == (record.nodes, leaders[0])
            assert agent.promised == self.agents[leaders[0]].promised
        for name in self.agents.keys() - alive:
            assert self.agents[name].role in ("out", "outside")
        if not self.acting():
            for _ in range(2):
                self.form(leaders[0], record.nodes)
                self.rest()
            assert [view.nodes for view in self.acting()] == [record.nodes], "no view can be formed"

    def clone(self) -> EtcdWorld:
        other = super().clone()
        assert isinstance(other, EtcdWorld)
        other.asked, other.answers = dict(self.asked), dict(self.answers)
        return other

    def key(self) -> Any:
        etcd = (self.kept, tuple(sorted(self.asked.items(), key=str)), tuple(sorted(self.answers.items(), key=str)))
        return hash((super().key(), etcd, self.late, self.outages, self.expiries))
