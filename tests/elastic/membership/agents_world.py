"""A small world of agents, links and workers in which every step is one event; for a search."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Set
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.elastic.consensus.connectivity import LinkMap
from paceline.elastic.consensus.membership import (
    Action,
    Committed,
    Fence,
    Follow,
    Lead,
    Out,
    Pause,
    Send,
    StopLeading,
)
from paceline.elastic.consensus.messages import NodeSet, Term, meets_every_quorum
from paceline.elastic.consensus.paxos import AcquireWitness, Leadership

Event = tuple[str, str, str]  # what happens, where, and with whom


@dataclass(frozen=True)
class View:
    """What a leader had formed; it acts while all its nodes act in it."""

    number: int
    term: Term
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Clear:
    """A node acts in no view; said after it had heard of this one, and in this term."""

    term: Term
    heard: int


@dataclass(frozen=True)
class Break:
    """The view of this number is broken."""

    number: int


@dataclass(frozen=True)
class Driver:
    """What an agent does besides its Leadership: it has its workers act and leave.

    Attributes:
        acts: the view in which its workers act.
        heard: the number of the last view that it was ordered to form.
        must_leave: its workers were told to leave, and will.
        leads: it has been told to lead, and not to step down.
        formed: the last view that it formed as a leader.
        relinked: whose link has ended since; what was on its way there never arrives.
        asks: the lease that it was asked to take.
    """

    acts: View | None = None
    heard: int = 0
    must_leave: bool = False
    leads: bool = False
    formed: View | None = None
    relinked: frozenset[str] = frozenset()
    asks: AcquireWitness | None = None
    paused: str = ""


@dataclass
class World:
    """All agents; values are replaced, so that a copy is cheap.

    Attributes:
        links: pairs between which a link stands.
        ending: (node, peer): the node has not noticed yet that its link with this peer has ended.
        lines: (sender, receiver): what is on its way.
        leases: who has won which roster.
        history: the roster of each generation that somebody knows to be committed.
        cuts: how many partitions may still happen; and so on.
    """

    agents: dict[str, Leadership]
    drivers: dict[str, Driver]
    links: frozenset[frozenset[str]]
    ending: frozenset[tuple[str, str]] = frozenset()
    lines: dict[tuple[str, str], tuple[Any, ...]] = field(default_factory=dict)
    leases: dict[int, frozenset[str]] = field(default_factory=dict)
    history: dict[int, tuple[str, ...]] = field(default_factory=dict)
    views: int = 0
    cuts: int = 0
    crashes: int = 0
    heals: int = 0
    haste: int = 0
    forms: int = 0
    joins: int = 0
    dismissals: int = 0
    leaderless_forms: bool = False

    @classmethod
    def at_work(cls, names: str, *, ties: bool, acting: str | None = None, **faults: int) -> World:
        """Agents named a, b, ... in a committed roster that the first leads, with a view at work."""
        nodes = tuple(names)
        term, roster = Term(1, nodes[0]), NodeSet(len(nodes) - 1, nodes)
        agents = {
            name: Leadership(
                name,
                ties=ties,
                role="leading" if name == nodes[0] else "following",
                promised=term,
                committed=roster,
                leader=nodes[0],
                reachable=frozenset(nodes) - {name},
                _highest=1,
            )
            for name in nodes
        }
        for name in nodes:
            agents[nodes[0]].clear(name)
        world = cls(
            agents,
            {name: Driver(leads=name == nodes[0]) for name in nodes},
            frozenset(frozenset(pair) for pair in itertools.combinations(nodes, 2)),
            history={roster.config_epoch: nodes},
            **faults,
        )
        world.form(nodes[0], tuple(acting or names))
        for name in acting or names:
            if name != nodes[0]:
                world.deliver(nodes[0], name)
        return world

    @classmethod
    def founded(cls, names: str, *, ties: bool, **faults: int) -> World:
        """The first agent leads itself; the others are linked, and ask to join."""
        nodes = tuple(names)
        first = Leadership(nodes[0], ties=ties)
        actions = first.begin()
        world = cls(
            {nodes[0]: first, **{name: Leadership(name, ties=ties) for name in nodes[1:]}},
            {name: Driver() for name in nodes},
            frozenset(),
            history={0: nodes[:1]},
            **faults,
        )
        world.perform(nodes[0], actions)
        for one, other in itertools.combinations(nodes, 2):
            world.link(one, other)
        return world

    # What can happen.

    def events(self) -> Iterator[Event]:
        """All that can happen next; what happens only by a fault or by impatience comes last."""
        yield from self.due()
        for name, agent in self.agents.items():
            if self.haste and agent.needs_timer:
                yield "hurry", name, ""
            if self.forms and self.drivers[name].leads:
                for nodes in self.formable(name):
                    yield "form", name, "".join(nodes)
            if self.dismissals and self.drivers[name].leads and agent.committed:
                for node in agent.committed.nodes:
                    yield "dismiss", name, node
            if self.crashes:
                yield "crash", name, ""
        if self.cuts:
            names = sorted(self.agents)
            for size in range(1, len(names) // 2 + 1):
                for side in itertools.combinations(names, size):
                    yield "cut", "".join(side), ""
            if len(names) > 2:
                for one, other in itertools.combinations(names, 2):
                    if frozenset((one, other)) in self.links:
                        yield "break", one, other
        if self.heals:
            for one, other in self.healable():
                yield "heal", one, other

    def due(self) -> Iterator[Event]:
        """What will happen sooner or later."""
        for (sender, receiver), line in self.lines.items():
            if line and receiver in self.agents:
                yield "deliver", sender, receiver
        for name, peer in sorted(self.ending):
            yield "notice", name, peer
        for name, driver in self.drivers.items():
            if driver.acts and (driver.must_leave or self.is_broken(driver.acts)):
                yield "leave", name, ""
            if driver.asks:
                yield "lease", name, ""
            if driver.leads and self.joins:
                for node, agent in self.agents.items():
                    if agent.role == "outside" and node in self.agents[name].reachable:
                        yield "admit", name, node

    def formable(self, name: str) -> Iterator[tuple[str, ...]]:
        """The views that this leader may form: of any of the nodes that act in none."""
        agent = self.agents[name]
        assert agent.committed
        clear = [n for n in agent.committed.nodes if n in agent._clear]
        for size in range(len(clear), 0, -1):
            yield from (nodes for nodes in itertools.combinations(clear, size) if agent.may_form(nodes))

    def healable(self) -> Iterator[tuple[str, str]]:
        for one, other in itertools.combinations(sorted(self.agents), 2):
            if (
                frozenset((one, other)) not in self.links
                and (one, other) not in self.ending
                and (other, one) not in self.ending
            ):
                yield one, other

    def happens(self, event: Event) -> None:
        what, one, other = event
        agent = self.agents.get(one)
        if what == "deliver":
            self.deliver(one, other)
        elif what == "notice":
            self.ending -= {(one, other)}
            self.lines.pop((other, one), None)
            assert agent is not None
            driver = self.drivers[one]
            if driver.acts and other in driver.acts.nodes:
                self.drivers[one] = replace(driver, must_leave=True)
            if driver.leads and driver.formed and other in driver.formed.nodes:
                self.drivers[one] = replace(self.drivers[one], relinked=driver.relinked | {other})
                for node in driver.formed.nodes:
                    self.send(one, node, Break(driver.formed.number))
            self.perform(one, agent.lost(other))
        elif what == "leave":
            self.drivers[one] = replace(self.drivers[one], acts=None, must_leave=False)
            self.tell_clear(one)
        elif what == "lease":
            asked = self.drivers[one].asks
            assert agent is not None
            assert asked is not None
            self.drivers[one] = replace(self.drivers[one], asks=None)
            won = self.leases.setdefault(asked.roster.config_epoch, asked.holders)
            self.perform(one, agent.witness_answered(asked.roster, won))
        elif what == "hurry":
            self.haste -= 1
            self.lose_patience(one)
        elif what == "form":
            self.forms -= 1
            self.form(one, tuple(other))
        elif what == "admit":
            self.joins -= 1
            assert agent is not None
            self.perform(one, agent.admit(other))
        elif what == "dismiss":
            self.dismissals -= 1
            assert agent is not None
            self.perform(one, agent.dismiss(other))
        elif what == "crash":
            self.crashes -= 1
            self.crash(one)
        elif what == "cut":
            self.cuts -= 1
            self.end_links([pair for pair in self.links if len(pair & set(one)) == 1])
        elif what == "break":
            self.cuts -= 1
            self.end_links([frozenset((one, other))])
        else:
            self.heals -= 1
            self.link(one, other)

    def lose_patience(self, name: str) -> None:
        self.perform(name, self.agents[name].on_timeout())

    def end_links(self, pairs: list[frozenset[str]]) -> None:
        """What is on its way may still arrive, until the receiver notices."""
        self.links -= set(pairs)
        for pair in pairs:
            one, other = pair
            self.ending |= {(one, other), (other, one)}

    def crash(self, name: str) -> None:
        self.end_links([pair for pair in self.links if name in pair])
        self.ending = frozenset(pair for pair in self.ending if pair[0] != name)
        del self.agents[name], self.drivers[name]

    def link(self, one: str, other: str) -> None:
        self.links |= {frozenset((one, other))}
        self.lines.pop((one, other), None)
        self.lines.pop((other, one), None)
        self.perform(one, self.agents[one].linked(other))
        self.perform(other, self.agents[other].linked(one))

    # What agents do.

    def send(self, sender: str, receiver: str, message: object) -> None:
        if frozenset((sender, receiver)) in self.links:
            self.lines[sender, receiver] = (*self.lines.get((sender, receiver), ()), message)

    def deliver(self, sender: str, receiver: str) -> None:
        message, *rest = self.lines[sender, receiver]
        if rest:
            self.lines[sender, receiver] = tuple(rest)
        else:
            del self.lines[sender, receiver]
        agent, driver = self.agents[receiver], self.drivers[receiver]
        match message:
            case View(number, term, _):
                # Orders of a deposed leader are not obeyed.
                if term == agent.promised and agent.role == "following":
                    self.drivers[receiver] = replace(driver, acts=message, heard=number, must_leave=False)
            case Break(number):
                if driver.acts and driver.acts.number == number:
                    self.drivers[receiver] = replace(driver, must_leave=True)
            case Clear(term, heard):
                self.is_clear(receiver, sender, term, heard)
            case _:
                self.perform(receiver, agent.heard(sender, message))

    def form(self, leader: str, nodes: tuple[str, ...]) -> None:
        agent = self.agents[leader]
        agent.formed(nodes)
        self.views += 1
        view = View(self.views, agent.promised, nodes)
        self.drivers[leader] = replace(self.drivers[leader], formed=view, relinked=frozenset())
        for node in nodes:
            if node == leader:
                self.drivers[node] = replace(self.drivers[node], acts=view, heard=view.number, must_leave=False)
            else:
                self.send(leader, node, view)

    def tell_clear(self, name: str) -> None:
        agent, driver = self.agents[name], self.drivers[name]
        if driver.acts is None:
            term = agent.promised
            if term.node == name:
                self.is_clear(name, name, term, driver.heard)
            else:
                self.send(name, term.node, Clear(term, driver.heard))

    def is_clear(self, leader: str, node: str, term: Term, heard: int) -> None:
        agent, driver = self.agents[leader], self.drivers[leader]
        awaited = driver.formed if node not in driver.relinked else None
        ordered = awaited.number if awaited and awaited.term == term and node in awaited.nodes else 0
        if term == agent.promised and agent.role in ("claiming", "leading") and heard >= ordered:
            self.perform(leader, agent.clear(node))

    def perform(self, name: str, actions: list[Action]) -> None:
        reports = False
        for action in actions:
            driver = self.drivers[name]
            match action:
                case Send(to, message):
                    self.send(name, to, message)
                case Lead():
                    self.drivers[name] = replace(driver, leads=True)
                case StopLeading():
                    assert driver.leads
                    self.drivers[name] = replace(driver, leads=False)
                case Fence() | Follow():
                    self.drivers[name] = replace(driver, must_leave=driver.acts is not None)
                    reports = True
                case AcquireWitness():
                    self.drivers[name] = replace(driver, asks=action)
                case Out():
                    self.drivers[name] = replace(driver, must_leave=driver.acts is not None)
                case Pause(reason):
                    assert reason
                    self.drivers[name] = replace(driver, paused=reason)
                case Committed(_, roster):
                    assert driver.leads
                    assert name in roster.nodes
        if reports:
            # Only now: it may be the next event of the same agent.
            self.tell_clear(name)

    # What must hold.

    def check(self) -> None:
        """Whatever has happened: one history, one leader a term, one view that acts."""
        for name, agent in self.agents.items():
            if agent.committed:
                known = self.history.setdefault(agent.committed.config_epoch, agent.committed.nodes)
                assert known == agent.committed.nodes, f"two rosters {agent.committed.config_epoch}"
            assert self.drivers[name].leads == (agent.role == "leading")
            if agent.role == "leading":
                assert agent.promised.node == name == agent.leader
        acting = self.acting()
        assert len(acting) <= 1, f"{acting} act at once"

    def acting(self) -> list[View]:
        """The views that act: all their nodes do."""
        views = {driver.acts for driver in self.drivers.values() if driver.acts}
        return [view for view in views if all(self.acts_in(node, view) for node in view.nodes)]

    def is_broken(self, view: View) -> bool:
        """Whether a node has left the view, which its workers feel as lost peers."""
        return any(
            node not in self.drivers or (self.drivers[node].heard >= view.number and self.drivers[node].acts != view)
            for node in view.nodes
        )

    def acts_in(self, node: str, view: View) -> bool:
        return node in self.drivers and self.drivers[node].acts == view

    def settle(self, cut: Set[frozenset[str]] = frozenset()) -> None:
        """No more faults: links come back but for ``cut``, what is due happens, and who waits loses patience."""
        self.cuts = self.crashes = self.haste = self.forms = self.dismissals = self.heals = 0
        self.joins = 0
        quiet = 0
        for _ in range(600):
            self.check()
            healable = (pair for pair in self.healable() if frozenset(pair) not in cut)
            event = next(iter(self.due()), None) or next((("heal", *pair) for pair in healable), None)
            if event is not None:
                self.happens(event)
                continue
            impatient = sorted(name for name, agent in self.agents.items() if agent.needs_timer)
            if not impatient or quiet > 2 * len(self.agents):
                return
            before = self.key()
            self.lose_patience(impatient[quiet % len(impatient)])
            quiet = quiet + 1 if before == self.key() else 0
        raise AssertionError("the agents do not come to rest")

    def check_at_rest(self) -> None:
        """One leads whom all others follow, if there is a quorum; else nobody."""
        rosters = [agent.committed for agent in self.agents.values() if agent.committed]
        if not rosters:
            return
        roster = max(rosters, key=lambda r: r.config_epoch)
        alive = frozenset(self.agents) & set(roster.nodes)
        excess = 2 * len(alive) - len(roster.nodes)
        ties = next(iter(self.agents.values())).ties
        won = self.leases.get(roster.config_epoch, alive)
        leaders = [name for name, agent in self.agents.items() if agent.role == "leading"]
        if excess > 0 or (excess == 0 and ties and won == alive):
            assert len(leaders) == 1, f"{leaders} lead of {roster}"
            for name in alive:
                agent = self.agents[name]
                assert agent.committed == roster
                assert agent.leader == leaders[0]
                assert agent.promised == self.agents[leaders[0]].promised
            assert set(roster.nodes) == alive, "the lost are in the roster still"
            assert self.acting() or any(self.formable(leaders[0])), "no view can be formed"
        else:
            assert not leaders
            for name in alive:
                # Or nobody has told it yet that it was admitted.
                assert self.agents[name].role in ("paused", "outside")
        for name in set(self.agents) - alive:
            # Where nobody leads, there may be nobody to tell it that it is out.
            assert self.agents[name].role in ("out", "outside") or not leaders

    def form_largest(self, cut: Set[frozenset[str]]) -> tuple[str, ...]:
        """Have the one leader form a view of the largest wholly connected set, as its driver does; return that set.

        What is left out stays in the roster unless it could decide alone.
        """
        [name] = (name for name, agent in self.agents.items() if agent.role == "leading")
        for _ in self.agents:
            agent = self.agents[name]
            assert agent.committed
            members = [node for node in agent.committed.nodes if node == name or node in agent.reachable]
            reports = {node: self.agents[node].reachable for node in members if node != name}
            excluded = LinkMap(name, reports).excluded(members, ())
            included = tuple(node for node in members if node not in excluded)
            assert not any(frozenset(pair) in cut for pair in itertools.combinations(included, 2))
            if meets_every_quorum(agent.committed, set(included), agent.ties, None):
                break
            for node in sorted(excluded):
                self.perform(name, agent.dismiss(node))
            self.settle(cut)
        if not self.acting() or set(self.acting()[0].nodes) != set(included):
            for node in self.agents:  # the coordinator breaks a view that an excluded node is in
                self.drivers[node] = replace(self.drivers[node], must_leave=self.drivers[node].acts is not None)
            self.settle(cut)
            self.form(name, included)
            self.settle(cut)
        self.check()
        return included

    def clone(self) -> World:
        other = copy.copy(self)
        other.agents = {name: copy.copy(agent) for name, agent in self.agents.items()}
        other.drivers = dict(self.drivers)
        other.lines = dict(self.lines)
        other.leases = dict(self.leases)
        other.history = dict(self.history)
        return other

    def key(self) -> Any:
        """What tells two worlds apart."""
        agents = tuple(
            tuple(frozenset(v.items()) if isinstance(v, dict) else v for v in vars(agent).values())
            for agent in self.agents.values()
        )
        return hash(
            (
                tuple(self.agents),
                agents,
                tuple(self.drivers.values()),
                self.links,
                self.ending,
                frozenset(self.lines.items()),
                frozenset(self.leases.items()),
                (self.cuts, self.crashes, self.heals, self.haste, self.forms, self.joins, self.dismissals),
            )
        )
