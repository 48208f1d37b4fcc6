"""One agent among those of its job: what happens to it, and who has to know. No torch.

Where this agent leads, a :class:`~paceline.agent.leader.Leader` decides for the workers of all nodes; where
another one leads, what this machine's workers say is passed on to that one, and its orders are obeyed. Who
leads is :class:`~paceline.agent.agreement.Agreement`'s affair, who belongs here
:class:`~paceline.agent.company.Company`'s.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from paceline.agent.agreement import Agreement
from paceline.agent.chronicle import say
from paceline.agent.company import Company
from paceline.agent.leader import Leader
from paceline.agent.meeting import Meeting
from paceline.agent.mesh import Mesh
from paceline.agent.messages import (
    Book,
    Clear,
    MessageError,
    Ordered,
    Over,
    Reported,
    SeenOff,
    SentHome,
    Signalled,
    Workers,
    read,
)
from paceline.agent.node import Node
from paceline.agent.reports import Ended, Said
from paceline.distributed.process import ECHO_S, StopRequests
from paceline.errors import ConfigError
from paceline.launchers.local.base import LocalSpec
from paceline.launchers.local.failures import STOPPED
from paceline.membership.lease import LeaseDirectory
from paceline.membership.roster import Roster
from paceline.run_directory import RunDirectory


class Cluster:
    """What an agent knows of the others, and does for them.

    Args:
        spec: the job's, as this machine was given it.
        directory: the run's; the same one on all machines.
        node: this machine's workers.
        meeting: how to meet the others; None where there will be none.
    """

    def __init__(self, spec: LocalSpec, directory: RunDirectory, node: Node, meeting: Meeting | None) -> None:
        self._spec, self._directory, self._node = spec, directory, node
        self._company = Company(spec, directory, meeting)
        self._agreement = Agreement(spec, directory, node, self._company, self._leave)
        self._code: int | None = None
        self._requests = StopRequests(ECHO_S)  # Ctrl-C may reach the agents of all machines
        self._asked: int | None = None  # the signal that asked this machine to leave

    def begin(self, mesh: Mesh | None, lease: LeaseDirectory | None) -> None:
        """Start to lead, or to look for who does.

        Args:
            mesh: the links to other agents; None where there will be none.
            lease: breaks ties among them; who does not found the job learns of it from the others.
        """
        self._company.begin(mesh, lease)
        self._agreement.begin()

    @property
    def name(self) -> str:
        """This agent's."""
        return self._company.name

    @property
    def leader(self) -> Leader | None:
        """Decides for all workers; None where this agent does not."""
        return self._agreement.leader

    @property
    def roster(self) -> Roster:
        """The machines that the agents have agreed on."""
        return self._agreement.roster

    # The end.

    @property
    def over(self) -> bool:
        """Whether the job has ended, as far as this machine has a part in it."""
        return self._code is not None or (self.leader is not None and self.leader.over)

    def conclude(self) -> int:
        """Print one message if the job failed; tell the other agents; return the exit code."""
        if self._code is None:
            assert self.leader is not None
            self._code = self.leader.conclude()
            for peer in self._agreement.followers:
                self._company.send(peer, Over(self._code))
        return self._code

    def signalled(self, number: int) -> None:
        """A signal asks for a stop; Ctrl-C beside another, at once.

        Where machines may come and go, this one leaves after a step, and the others go on.
        """
        if self.leader is not None:
            self.leader.ending.signalled(number)
        elif self._agreement.leading_node is not None:
            match self._requests.hear(number):
                case "first":
                    self._asked = number
                    self._company.send(self._agreement.leading_node, Signalled(number))
                case "end":
                    self._node.kill_all("was told to end")
        else:
            self._leave("stopped, as asked, while it waited for other machines.", 128 + number)

    def cancel(self) -> None:
        """Have the job stop, within the grace period."""
        if self.leader is not None:
            self.leader.ending.cancel()
        else:
            self._node.kill_all("was told to end")

    def _leave(self, why: str, code: int) -> None:
        say(why)
        self._node.kill_all("was told to end")
        requeue, interrupted = STOPPED
        if code == 0 and self._asked is not None and not self._directory.result.is_file():
            code = interrupted if self._asked == signal.SIGINT else requeue
        self._code = code

    # Time.

    @property
    def deadline(self) -> float:
        """When :meth:`expire` is due, by the monotonic clock."""
        leader = math.inf if self.leader is None else self.leader.deadline
        return min(leader, self._company.deadline, self._agreement.deadline)

    def expire(self, now: float) -> None:
        """Do what is due."""
        why = self._company.expire(now)
        if why:
            self._leave(why, 2)
            return
        if self.leader is not None:
            self.leader.expire(now)
        self._agreement.expire(now)

    # What this machine's node reports.

    def said(self, worker: int, message: Said) -> None:
        """A worker sent something."""
        if self.leader is not None:
            self.leader.said(worker, message)
            self._agreement.review()
        elif self._follows:
            self._company.send(self._agreement.leading_node, Reported(worker, message))
        self._agreement.follower.tell_if_clear()

    def ended(self, end: Ended) -> None:
        """A worker's process has ended."""
        if self.leader is not None:
            self.leader.ended(end)
            self._agreement.review()
        elif self._follows:
            self._company.send(self._agreement.leading_node, end)
        else:
            self._agreement.follower.keep(end)
        self._agreement.follower.tell_if_clear()

    @property
    def _follows(self) -> bool:
        """Whether there is a leader elsewhere that knows of our workers."""
        return self.leader is None and self._agreement.leading_node not in (None, self.name)

    # What the other agents do.

    def linked(self, peer: str, hello: Mapping[str, Any]) -> None:
        """A link with this peer stands."""
        if self._company.sees_directory_of(peer, hello):
            self._agreement.linked(peer)
        else:
            self._company.drop(peer)

    def lost(self, peer: str, why: str) -> None:
        """The link has ended, or the peer was silent for too long."""
        if self.leader is not None:
            self.leader.node_lost(peer, why)
            self._company.strike(peer, self._agreement.followers)
        self._agreement.lost(peer)

    def refused(self, why: str) -> None:
        """Somebody was sent away who does not belong here."""
        say(f"a connection was refused: {why}")

    def heard(self, peer: str, message: Mapping[str, Any]) -> None:
        """A message has come."""
        try:
            content = read(message)
        except MessageError as error:
            # Better without it.
            self._company.drop(peer)
            self.lost(peer, f"sent what cannot be read: {error}")
            return
        from_leader = peer == self._agreement.leading_node
        match content:
            case Ordered():
                self._agreement.follower.obey(peer, content)
            case Reported() | Ended():
                self._on_report(peer, content)
            case Workers():
                self._agreement.reported(peer, content)
            case Clear(term):
                self._agreement.clear(peer, term)
            case Signalled(number):
                self._on_signalled(peer, number)
            case Book():
                if from_leader:
                    self._company.learn(content)
            case Over(code):
                if from_leader:
                    self._code = code
            case SeenOff():
                self._agreement.is_seen_off |= from_leader
            case SentHome(why):
                if from_leader:
                    self._leave(why, 2)
            case vote:
                self._agreement.voted(peer, vote)

    def _on_report(self, peer: str, report: Reported | Ended) -> None:
        """What became of a worker on a node that follows."""
        if self.leader is None or peer not in self.leader.nodes:
            return
        if isinstance(report, Ended):
            self.leader.ended(report)
        else:
            self.leader.said(report.worker, report.message)
        self._agreement.review()

    def _on_signalled(self, peer: str, number: int) -> None:
        """A machine was asked to stop: it leaves, where enough others stay; else the job stops."""
        if self.leader is None:
            return
        elastic = (self._spec.most_nodes or 1) > self._spec.nodes
        if elastic and len(self.leader.nodes) > self._spec.least_nodes:
            with suppress(ConfigError):  # the job is ending anyway
                self.leader.retire([peer])
        else:
            self.leader.ending.signalled(number)
