"""One agent among those of its job: who leads, and what this one does about it. No torch.

The agents' own agreement is :class:`~paceline.membership.leadership.Leadership`. Where it says that this
agent leads, a :class:`~paceline.agent.leader.Leader` decides for the workers of all nodes; where another one
leads, what this machine's workers say is passed on to that one, and its orders are obeyed. A job on one
machine is a roster of one, which agrees with itself at once.
"""

from __future__ import annotations

import math
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from paceline.agent import orders
from paceline.agent.control_socket import Status
from paceline.agent.leader import Leader
from paceline.agent.meeting import Meeting, differences, record_agents, shared
from paceline.agent.mesh import Address, Mesh
from paceline.agent.node import Ended, Node, Said
from paceline.agent.orders import OrderError, RemoteNode
from paceline.data.ledger import generations
from paceline.distributed.sockets import LOOPBACK
from paceline.errors import ConfigError, RunDirectoryError
from paceline.launchers.base import JobSpec
from paceline.launchers.failures import STOPPED
from paceline.membership.channel import Broken
from paceline.membership.coordinator import Coordinator
from paceline.membership.leadership import Leadership
from paceline.membership.lease import LeaseDirectory
from paceline.membership.roster import Roster, Term
from paceline.membership.succession import (
    Action,
    Committed,
    Fence,
    Follow,
    Lead,
    Out,
    Pause,
    Send,
    StepDown,
    TakeLease,
)
from paceline.membership.votes import KINDS, VoteError, decode, encode
from paceline.run_directory import RunDirectory

_PATIENCE_S = 1.0
_NUMBERS_A_TERM = 1 << 20  # worker numbers that one leader can give


class Cluster:
    """What an agent knows of the others, and does for them.

    Args:
        spec: the job's, as this machine was given it.
        directory: the run's; the same one on all machines.
        node: this machine's workers.
        meeting: how to meet the others; None where there will be none.
    """

    def __init__(self, spec: JobSpec, directory: RunDirectory, node: Node, meeting: Meeting | None) -> None:
        self._spec, self._directory, self._node, self._meeting = spec, directory, node, meeting
        self._name = socket.gethostname() if meeting is None else meeting.name
        self._address = LOOPBACK if meeting is None else meeting.address
        self._mesh: Mesh | None = None
        self._lease: LeaseDirectory | None = None
        self._leader: Leader | None = None
        self._undelivered: list[Ended] = []
        self._roster = Roster(0, (self._name,))
        self._fenced: Term | None = None  # this term's node waits to hear that no worker of ours acts
        self._book: list[tuple[str, Address]] = []  # where the agents listen, in the order in which they came
        self._patience_at = math.inf
        self._give_up_at = math.inf  # looking for the others
        self._paused = ""
        self._code: int | None = None
        self._asked: int | None = None  # the signal that asked this machine to leave
        self._seen_off = False  # it is leaving, as asked
        self._acting = False
        self._pending: deque[Action] = deque()
        self._following: Term | None = None  # whose orders are obeyed
        self._leadership = Leadership.outside(self._name, ties=True)

    def begin(self, mesh: Mesh | None, lease: LeaseDirectory | None) -> None:
        """Start to lead, or to look for who does.

        Args:
            mesh: the links to other agents; None where there will be none.
            lease: breaks ties among them; who does not found the job learns of it from the others.
        """
        self._mesh, self._lease = mesh, lease
        if self._meeting is None or self._meeting.founds:
            self._leadership, actions = Leadership.found(self._name, ties=True)
            self._act(actions)
        else:
            assert mesh is not None
            self._give_up_at = time.monotonic() + self._spec.init_timeout_s
            mesh.call(self._meeting.endpoints)

    # The end.

    @property
    def over(self) -> bool:
        """Whether the job has ended, as far as this machine has a part in it."""
        return self._code is not None or (self._leader is not None and self._leader.over)

    def conclude(self) -> int:
        """Print one message if the job failed; tell the other agents; return the exit code."""
        if self._code is None:
            assert self._leader is not None
            self._code = self._leader.conclude()
            for peer in self._leader.nodes - {self._name}:
                self._send(peer, {"kind": "over", "code": self._code})
        return self._code

    def signalled(self, number: int) -> None:
        """A signal asks for a stop; a second one, at once.

        Where machines may come and go, this one leaves after a step, and the others go on.
        """
        if self._leader is not None:
            self._leader.signalled(number)
        elif self._leadership.leader is not None:
            if self._asked is not None:
                self._node.kill_all("was told to end")
            self._asked = self._asked or number
            self._send(self._leadership.leader, {"kind": "signalled", "signal": number})
        else:
            self._leave("stopped, as asked, while it waited for other machines.", 128 + number)

    def cancel(self) -> None:
        """Have the job stop, within the grace period."""
        if self._leader is not None:
            self._leader.cancel()
        else:
            self._node.kill_all("was told to end")

    # What other commands ask for.

    @property
    def leads(self) -> bool:
        """Whether this agent decides."""
        return self._leader is not None

    def status(self) -> Status:
        """Where the job stands.

        Raises:
            ConfigError: this agent does not lead.
        """
        return self._leading().status()

    def scale(self, nproc: int) -> None:
        """Want another number of workers on each machine.

        Raises:
            ConfigError: there cannot be so many, or this agent does not lead.
        """
        self._leading().scale(nproc)

    def scale_nodes(self, nodes: int) -> None:
        """Want fewer machines: those that came last leave after a step.

        Raises:
            ConfigError: there cannot be so many, or this agent does not lead.
        """
        leader = self._leading()
        there = [name for name in self._roster.nodes if name in leader.nodes]
        if nodes > len(there):
            raise ConfigError(
                f"the run is on {len(there)} machine(s). Another one joins it, up to --nodes MIN:MAX, when "
                f"this is given there: paceline join {self._directory.path}"
            )
        if nodes < self._spec.least_nodes:
            raise ConfigError(
                f"--nodes must be at least {self._spec.least_nodes}, as the run was started so."
            )
        # The leading one stays: somebody has to see the others off.
        leaving = [name for name in reversed(there) if name != self._name][: len(there) - nodes]
        leader.retire(leaving)

    def gather(self) -> None:
        """Train on only once all that there should be take part.

        Raises:
            ConfigError: this agent does not lead.
        """
        self._leading().gather()

    def _leading(self) -> Leader:
        if self._leader is None:
            raise ConfigError("another machine's agent leads the run by now; ask again there.")
        return self._leader

    def _see_off(self) -> None:
        """Take nodes that were retired, and have no worker left, out of the roster, and tell them to end."""
        if self._leader is None:
            return
        for name in [n for n in self._roster.nodes if n != self._name and self._leader.is_idle(n)]:
            self._dismiss(name)

    def _dismiss(self, name: str) -> None:
        self._send(name, {"kind": "seen off"})  # before it learns that it is in the roster no more
        self._act(self._leadership.dismiss(name))

    # Time.

    @property
    def deadline(self) -> float:
        """When :meth:`expire` is due, by the monotonic clock."""
        mesh = math.inf if self._mesh is None else self._mesh.deadline
        leader = math.inf if self._leader is None else self._leader.deadline
        return min(mesh, leader, self._patience_at, self._give_up_at)

    def expire(self, now: float) -> None:
        """Do what is due."""
        if self._mesh is not None and now >= self._mesh.deadline:
            self._mesh.expire(now)
        if self._leader is not None:
            self._leader.expire(now)
        if now >= self._patience_at:
            self._patience_at = math.inf
            if self._leadership.role == "paused" and self._directory.result.is_file():
                self._leave("the other machines have finished the run.", 0)
                return
            self._act(self._leadership.patience_over())
        if now >= self._give_up_at:
            self._give_up_at = math.inf
            assert self._meeting is not None
            assert self._mesh is not None
            where = ", ".join(f"{host}:{port}" for host, port in self._meeting.endpoints)
            self._leave(
                f"no agent of this run answers at {where} ({self._mesh.last_error or 'no answer'}). "
                "Start the first machine, check the address and the firewall; --init-timeout says how long "
                "to wait.",
                2,
            )

    # What this machine's node reports.

    def said(self, worker: int, message: Said) -> None:
        """A worker sent something."""
        if self._leader is not None:
            self._leader.said(worker, message)
            self._admit()
        elif self._follows:
            self._send(self._leadership.leader, orders.said(worker, message))
        self._tell_if_clear()

    def ended(self, end: Ended) -> None:
        """A worker's process has ended."""
        if self._leader is not None:
            self._leader.ended(end)
        elif self._follows:
            self._send(self._leadership.leader, orders.ended(end))
        else:
            self._undelivered.append(end)
        self._tell_if_clear()

    @property
    def _follows(self) -> bool:
        """Whether there is a leader elsewhere that knows of our workers."""
        return self._leader is None and self._leadership.leader not in (None, self._name)

    # What the other agents say.

    def linked(self, peer: str, hello: Mapping[str, Any]) -> None:
        """A link with this peer stands."""
        if self._lease is None and "lease" in hello and self._meeting is not None:
            lease = LeaseDirectory(self._directory.path / "agents", str(hello["lease"]))
            if not shared(lease):
                self._leave(
                    f"{self._directory.path} is not the directory that {peer} uses: a run that survives the "
                    "loss of machines needs one that all of them share. Give its path with --run DIR, or use "
                    "--recover none.",
                    2,
                )
                return
            self._lease = lease
            self._meeting.hello["lease"] = lease.key
        self._act(self._leadership.linked(peer))

    def lost(self, peer: str, why: str) -> None:
        """The link has ended, or the peer was silent for too long."""
        if self._leader is not None:
            self._leader.node_lost(peer, why)
            self._book = [(name, address) for name, address in self._book if name != peer]
            self._share_book()
        self._act(self._leadership.lost(peer))

    def refused(self, why: str) -> None:
        """Somebody was sent away who does not belong here."""
        print(f"paceline: a connection was refused: {why}", file=sys.stderr)

    def heard(self, peer: str, message: Mapping[str, Any]) -> None:
        """A message has come."""
        try:
            self._hear(peer, message)
        except (OrderError, VoteError, KeyError, TypeError, ValueError) as error:
            # It is another version, or out of its mind: better without it.
            assert self._mesh is not None
            self._mesh.drop(peer)
            self.lost(peer, f"sent what cannot be read: {error}")

    def _hear(self, peer: str, message: Mapping[str, Any]) -> None:
        kind = message.get("kind")
        if kind in KINDS:
            self._act(self._leadership.heard(peer, decode(message)))
        elif kind == "order":
            if self._following is not None and peer == self._following.node:
                orders.obey(message, self._following, self._node)
        elif kind in ("said", "ended"):
            if self._leader is not None and peer in self._leader.nodes:
                orders.report(message, self._leader)
                self._admit()
                self._see_off()
        elif kind == "workers":
            self._on_workers(peer, message)
        elif kind == "clear":
            if self._term(message) == self._leadership.promised:
                self._act(self._leadership.clear(peer))
                self._settle()
        elif kind == "signalled":
            self._on_signalled(peer, int(message["signal"]))
        elif kind == "book":
            if peer == self._leadership.leader:
                self._book = [(str(n), (str(h), int(p))) for n, h, p in message["agents"]]
                self._call_peers()
        elif kind == "over":
            if peer == self._leadership.leader:
                self._code = int(message["code"])
        elif kind == "seen off":
            self._seen_off = self._seen_off or peer == self._leadership.leader
        elif kind == "sent home":
            if peer == self._leadership.leader:
                self._leave(str(message["why"]), 2)
        else:
            raise OrderError(f"a message that this version does not know: {str(message)[:200]}")

    def _on_signalled(self, peer: str, number: int) -> None:
        """A machine was asked to stop: it leaves, where enough others stay; else the job stops."""
        if self._leader is None:
            return
        elastic = (self._spec.most_nodes or 1) > self._spec.nodes
        if elastic and len(self._leader.nodes) > self._spec.least_nodes:
            with suppress(ConfigError):  # the job is ending anyway
                self._leader.retire([peer])
        else:
            self._leader.signalled(number)

    def _term(self, message: Mapping[str, Any]) -> Term:
        try:
            number, name = message["term"]
            return Term(int(number), str(name))
        except (KeyError, TypeError, ValueError) as error:
            raise OrderError(f"a message cannot be read: {str(message)[:200]}") from error

    def _on_workers(self, peer: str, message: Mapping[str, Any]) -> None:
        """A node that follows tells of its workers: one of the roster, or one that wants to join."""
        if self._leader is None:
            return
        assert self._mesh is not None
        nproc, generation, seats = orders.read_workers(message)
        foreign = differences(self._meeting.hello, self._mesh.hello_of(peer)) if self._meeting else []
        if foreign:
            why = f"this machine's software or task is not the run's: {'; '.join(foreign)}. Make them equal."
            self._send(peer, {"kind": "sent home", "why": why})
            return
        most = self._spec.most_nodes or self._spec.nodes
        if peer not in self._roster.nodes and len(self._leader.nodes | {peer}) > most:
            why = f"the run has its {most} machines already (--nodes)."
            self._send(peer, {"kind": "sent home", "why": why})
            return
        self._leader.saw(generation)
        address = self._mesh.address_of(peer)
        if address is not None and peer not in dict(self._book):
            self._book.append((peer, address))
            self._share_book()
        if peer not in self._leader.nodes:
            # Told again, it may be older than what was ordered since.
            remote = RemoteNode(self._sender(peer), self._leadership.promised)
            self._leader.node_joins(peer, remote, nproc, seats)
        self._settle()

    # What the agents agree on.

    def may_form(self, nodes: frozenset[str]) -> bool:
        """Whether a view of workers on these nodes may be formed now."""
        assert self._leader is not None
        for name in self._leader.nodes & frozenset(self._roster.nodes) - self._leader.nodes_acting:
            self._act(self._leadership.clear(name))
        if not nodes or self._leadership.may_form(nodes):
            return bool(nodes)
        if not self._leader.nodes_acting:
            # Where they are half of the roster, no view can be formed without them before they are out of it.
            for name in self._leader.nodes_retired & frozenset(self._roster.nodes) - {self._name}:
                self._dismiss(name)
        return self._leadership.may_form(nodes)

    def formed(self, nodes: frozenset[str]) -> None:
        """It is."""
        self._leadership.formed(nodes)

    def send_home(self, node: str, why: str) -> None:
        """Do without a node; this is told there."""
        assert self._leader is not None
        self._send(node, {"kind": "sent home", "why": why})
        self._leader.node_lost(node, f"was sent home: {why}")

    def _settle(self) -> None:
        if self._leader is not None:
            self._leader.settle()

    def _admit(self) -> None:
        """Take nodes into the roster once they have workers to take part."""
        if self._leader is not None:
            for name in sorted(self._leader.nodes_present - frozenset(self._roster.nodes)):
                self._act(self._leadership.admit(name))

    def _act(self, actions: Sequence[Action]) -> None:
        """Carry actions out in their order, also those that follow from them."""
        self._pending.extend(actions)
        if self._acting:
            return
        self._acting = True
        try:
            while self._pending:
                self._carry_out(self._pending.popleft())
        finally:
            self._acting = False
        if not self._leadership.impatient:
            self._patience_at = math.inf
        elif self._patience_at == math.inf:
            self._patience_at = time.monotonic() + _PATIENCE_S

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send(to, message):
                self._send(to, encode(message))
            case Lead(term, roster):
                self._lead(term, roster)
            case Committed(_, roster):
                self._committed(roster)
            case StepDown():
                self._leader = None
            case Fence(term):
                self._fence(term)
            case Follow(term, leader, roster):
                self._following = term
                self._follow(leader, roster)
            case Pause(reason):
                self._pause(reason)
            case TakeLease(roster, winners):
                self._act(self._leadership.lease_answered(roster, self._take_lease(roster, winners)))
            case Out() if self._seen_off:
                requeue, interrupted = STOPPED
                asked = interrupted if self._asked == signal.SIGINT else requeue
                self._leave("this machine has left the run; the others go on.", asked if self._asked else 0)
            case Out():
                self._leave(
                    "this machine was left out of the run, as the others could not reach it. They go on; "
                    f"have it join again with: paceline join {self._directory.path}",
                    1,
                )

    def _lead(self, term: Term, roster: Roster) -> None:
        follows = term.number > 1
        seats = self._node.seats
        told = [generation for generation, _ in seats.values()]
        recorded = max(generations(self._directory.ledger), default=-1)
        coordinator = Coordinator(
            nodes={},
            most=self._spec.nproc * self._spec.nodes,
            generation=max([recorded, *told]),
            spares=self._spec.spares,
            first=self._spec.nodes,
            least=self._spec.least_nodes,
        )
        if follows:
            places = self._spec.nproc * len(roster.nodes)
            coordinator.take_over(term.number * _NUMBERS_A_TERM, places)
            self._record("takeover", node=self._name, term=term.number)
        self._roster = roster
        self._leader = Leader(
            self._spec, self._directory, coordinator, self, self._node, self._address, follows=follows
        )
        if self._mesh is not None and self._name not in dict(self._book):
            self._book.append((self._name, (self._mesh.listener.host, self._mesh.listener.port)))
        self._resumed()
        self._leader.node_joins(
            self._name, self._node, self._spec.nproc, {w: seat for w, (_, seat) in seats.items()}
        )
        for end in self._taken_undelivered():
            self._leader.ended(end)
        self._settle()

    def _committed(self, roster: Roster) -> None:
        gone = set(self._roster.nodes) - set(roster.nodes)
        came = set(roster.nodes) - set(self._roster.nodes)
        self._roster = roster
        if gone or came:
            self._record("machines", nodes=list(roster.nodes))
        self._resumed()
        for name in gone & (self._leader.nodes if self._leader is not None else frozenset()):
            assert self._leader is not None
            self._leader.node_lost(name, "has left, as asked")
        self._settle()

    def _fence(self, term: Term) -> None:
        """Have our workers leave what view they are in; its node waits to hear of it."""
        self._fenced, self._following = term, None
        for worker, (generation, seat) in self._node.seats.items():
            if seat.status == "member":
                self._node.tell(worker, Broken(generation))
        self._tell_if_clear()

    def _tell_if_clear(self) -> None:
        if self._fenced is None or any(seat.status == "member" for _, seat in self._node.seats.values()):
            return
        term, self._fenced = self._fenced, None
        if term.node == self._name:
            self._act(self._leadership.clear(self._name))
            self._settle()
        else:
            self._send(term.node, {"kind": "clear", "term": [term.number, term.node]})

    def _follow(self, leader: str, roster: Roster) -> None:
        self._roster = roster
        self._give_up_at = math.inf
        self._resumed()
        self._send(leader, orders.workers(self._spec.nproc, self._node.seats))
        for end in self._taken_undelivered():
            self._send(leader, orders.ended(end))

    def _pause(self, reason: str) -> None:
        self._leader = None
        if reason != self._paused:
            self._paused = reason
            self._record("paused", node=self._name, why=reason)
            print(f"paceline: the run pauses: {reason}.", file=sys.stderr)

    def _resumed(self) -> None:
        if self._paused:
            self._paused = ""
            print("paceline: the run goes on.", file=sys.stderr)

    def _take_lease(self, roster: Roster, winners: frozenset[str]) -> frozenset[str] | None:
        if self._lease is None:
            return None
        try:
            return self._lease.take(roster, winners)
        except RunDirectoryError as error:
            print(f"paceline: {error}", file=sys.stderr)
            return None

    def _taken_undelivered(self) -> list[Ended]:
        ends, self._undelivered = self._undelivered, []
        return ends

    def _leave(self, why: str, code: int) -> None:
        print(f"paceline: {why}", file=sys.stderr)
        self._node.kill_all("was told to end")
        self._code = code

    # Links.

    def _send(self, peer: str | None, message: Mapping[str, Any]) -> None:
        if self._mesh is not None and peer is not None:
            self._mesh.send(peer, message)

    def _sender(self, peer: str) -> Callable[[Mapping[str, Any]], None]:
        return lambda message: self._send(peer, message)

    def _share_book(self) -> None:
        """Tell the others where all agents listen."""
        assert self._leader is not None
        with suppress(OSError):
            record_agents(self._directory, self._book, self._spec.command[-1])
        agents = [[name, *address] for name, address in self._book]
        for peer in self._leader.nodes - {self._name}:
            self._send(peer, {"kind": "book", "agents": agents})

    def _call_peers(self) -> None:
        """Link to all that came before this one: later ones link to it."""
        earlier = []
        for name, address in self._book:
            if name == self._name:
                break
            earlier.append(address)
        if self._mesh is not None:
            self._mesh.call(earlier)

    def _record(self, kind: str, **fields: object) -> None:
        with suppress(OSError):
            self._directory.append_event(kind, **fields)
