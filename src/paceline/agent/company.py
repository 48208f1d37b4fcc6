"""The other machines' agents: the links to them, where they listen, and who belongs here. No torch."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from paceline.agent.chronicle import say
from paceline.agent.meeting import Meeting, differences, record_agents
from paceline.agent.mesh import Address, Mesh
from paceline.agent.messages import Book, Message, write
from paceline.distributed.sockets import LOOPBACK
from paceline.errors import RunDirectoryError
from paceline.launchers.local.base import LocalSpec
from paceline.membership.lease import LeaseDirectory
from paceline.membership.roster import Roster
from paceline.run_directory import RunDirectory

_SHOWS_S = 10.0  # how late a shared file system may show what another machine has made there


class Company:
    """What an agent knows of the others of its job; on one machine, there are none.

    Args:
        spec: the job's, as this machine was given it.
        directory: the run's; the same one on all machines.
        meeting: how to meet the others; None where there will be none.

    Attributes:
        name: this agent's.
        address: of this machine, on the way to the others.
        founds: whether this agent is the first.
    """

    def __init__(self, spec: LocalSpec, directory: RunDirectory, meeting: Meeting | None) -> None:
        self._spec, self._directory, self._meeting = spec, directory, meeting
        self.name = socket.gethostname() if meeting is None else meeting.name
        self.address = LOOPBACK if meeting is None else meeting.address
        self.founds = meeting is None or meeting.founds
        self._mesh: Mesh | None = None
        self._lease: LeaseDirectory | None = None
        self._book: list[tuple[str, Address]] = []  # where the agents listen, in the order in which they came
        self._give_up_at = math.inf  # looking for the others
        self._unseen_until = math.inf  # the first agent's directory, by this machine
        self._unseen_by = ""
        self._no_lease = ""  # why the last one could not be taken

    def begin(self, mesh: Mesh | None, lease: LeaseDirectory | None) -> None:
        """Look for the others, unless this agent is the first.

        Args:
            mesh: the links to other agents; None where there will be none.
            lease: breaks ties among them; who does not found the job learns of it from the others.
        """
        self._mesh, self._lease = mesh, lease
        if not self.founds:
            assert mesh is not None
            assert self._meeting is not None
            self._give_up_at = time.monotonic() + self._spec.init_timeout_s
            mesh.call(self._meeting.endpoints)

    def stop_looking(self) -> None:
        """The others are found."""
        self._give_up_at = math.inf

    # Time.

    @property
    def deadline(self) -> float:
        """When :meth:`expire` is due, by the monotonic clock."""
        mesh = math.inf if self._mesh is None else self._mesh.deadline
        return min(mesh, self._give_up_at, self._unseen_until)

    def expire(self, now: float) -> str:
        """Do what is due; return why to give up, or "" to go on."""
        if self._mesh is not None and now >= self._mesh.deadline:
            self._mesh.expire(now)
        if now >= self._unseen_until:
            self._unseen_until = math.inf
            return (
                f"{self._directory.path} is not the directory that {self._unseen_by} uses: a run that "
                "survives the loss of machines needs one that all of them share. Give its path with "
                "--run DIR, or use --recover none."
            )
        if now >= self._give_up_at:
            self._give_up_at = math.inf
            assert self._meeting is not None
            assert self._mesh is not None
            where = ", ".join(f"{host}:{port}" for host, port in self._meeting.endpoints)
            return (
                f"no agent of this run answers at {where} ({self._mesh.last_error or 'no answer'}). "
                "Start the first machine, check the address and the firewall; --init-timeout says how long "
                "to wait."
            )
        return ""

    # Links.

    def send(self, peer: str | None, message: Message) -> None:
        """Send; nothing happens where there is no link."""
        if self._mesh is not None and peer is not None:
            self._mesh.send(peer, write(message))

    def drop(self, peer: str) -> None:
        """End the link with a peer; where this agent had called it, it calls again."""
        assert self._mesh is not None
        self._mesh.drop(peer)

    def sees_directory_of(self, peer: str, hello: Mapping[str, Any]) -> bool:
        """Whether the run's directory here is the one that a newly linked peer uses.

        A file system may show it late: then the link is to be dropped, and this is asked again with the
        next one. It has its limit, which :meth:`expire` notices.
        """
        if self._lease is not None or "lease" not in hello or self._meeting is None:
            return True
        lease = LeaseDirectory(self._directory.path / "agents", str(hello["lease"]))
        if not lease.is_shared():
            self._unseen_by = peer
            self._unseen_until = min(self._unseen_until, time.monotonic() + _SHOWS_S)
            return False
        self._unseen_until = math.inf
        self._lease = lease
        self._meeting.hello["lease"] = lease.key
        return True

    def take_lease(self, roster: Roster, winners: frozenset[str]) -> frozenset[str] | None:
        """Break a tie: who has won it; None where that cannot be found out."""
        if self._lease is None:
            return None
        try:
            held_by = self._lease.take(roster, winners)
        except RunDirectoryError as error:
            if str(error) != self._no_lease:  # it is asked for every second, for as long as a disk is full
                self._no_lease = str(error)
                say(self._no_lease)
            return None
        self._no_lease = ""
        return held_by

    # The leader's part: who may come, and where all of them listen.

    def objection(self, peer: str, others: int) -> str:
        """Why a peer cannot take part; "" where it can.

        Args:
            peer: its name.
            others: how many others compete with it for a place; 0 where it has one.
        """
        theirs = {} if self._mesh is None else self._mesh.hello_of(peer)
        foreign = differences(self._meeting.hello, theirs) if self._meeting else []
        if foreign:
            return f"this machine's software or task is not the run's: {'; '.join(foreign)}. Make them equal."
        most = self._spec.most_nodes or self._spec.nodes
        if others >= most:
            return f"the run has its {most} machines already (--nodes)."
        return ""

    def enlist_self(self) -> None:
        """Note where this agent listens."""
        if self._mesh is not None and self.name not in dict(self._book):
            self._book.append((self.name, (self._mesh.listener.host, self._mesh.listener.port)))

    def enlist(self, peer: str, nodes: Iterable[str]) -> None:
        """Note where a peer listens, and tell all ``nodes``."""
        address = None if self._mesh is None else self._mesh.address_of(peer)
        if address is not None and peer not in dict(self._book):
            self._book.append((peer, address))
            self._share_book(nodes)

    def strike(self, peer: str, nodes: Iterable[str]) -> None:
        """A peer is gone: tell all ``nodes``."""
        if peer in dict(self._book):
            self._book = [(name, address) for name, address in self._book if name != peer]
            self._share_book(nodes)

    def _share_book(self, nodes: Iterable[str]) -> None:
        with suppress(OSError):
            record_agents(self._directory, self._book, self._spec.command[-1])
        for peer in nodes:
            self.send(peer, Book(tuple(self._book)))

    # The follower's.

    def learn(self, book: Book) -> None:
        """Link to all that came before this one: later ones link to it."""
        self._book = list(book.agents)
        earlier = []
        for name, address in self._book:
            if name == self.name:
                break
            earlier.append(address)
        if self._mesh is not None:
            self._mesh.call(earlier)
