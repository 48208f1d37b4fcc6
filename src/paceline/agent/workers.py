"""A worker as its agent knows it: its process, its channel, and what it owes by when."""

from __future__ import annotations

import math
import os
import select
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from paceline.membership.channel import channel_pair
from paceline.membership.views import Status

_START_S = 60.0  # who imports a task or builds a dataset may hold the interpreter's lock for long


class Worker:
    """One worker, from the request to fork it until it has been seen to end.

    Attributes:
        pid: None until it was forked.
        step: the last that it told, -1 for none.
        phase: what it said that it is doing.
        heard_at: when it last sent anything, by the monotonic clock.
        killed: why the agent killed it; "" where it did not.
        ending: its process has ended, and how is not known yet.
        beats: its channel is open.
        status: as the coordinator knows it.
        generation: of the view that it was put into last, -1 for none.
        retired: the agent told it to end.
    """

    def __init__(self, number: int, slot: int, log: Path | None) -> None:
        self.number, self.slot = number, slot
        self.pid: int | None = None
        self.pidfd: int | None = None
        self.step = -1
        self.phase = "starting"
        self.heard_at = time.monotonic()
        self.killed = ""
        self.ending = False
        self.beats = True
        self.retired = False
        self._owes, self._limit_s, self._by = "start", math.inf, math.inf
        self._leave_by = math.inf
        self.status: Status = "starting"
        self.generation = -1
        self._theirs = ExitStack()
        self.channel, theirs = channel_pair()
        self.channel.setblocking(False)
        self._theirs.callback(theirs.close)
        self.descriptors = [theirs.fileno()]
        if log is not None:
            with suppress(OSError):  # on a full disk: then it prints to the terminal
                self.descriptors.append(self._theirs.enter_context(log.open("ab")).fileno())

    def fileno(self) -> int:
        """Its channel's, for a selector."""
        return self.channel.fileno()

    @property
    def deadline(self) -> float:
        """When the agent shall lose patience, by the monotonic clock."""
        return min(self._by, self._leave_by)

    @property
    def failing(self) -> str:
        """What it has not done by its deadline."""
        if self._leave_by < self._by:
            return "did not leave a broken view"
        return f"did not {self._owes} within {self._limit_s:g} s"

    def runs(self, pid: int, pidfd: int) -> None:
        """It was forked; ``pidfd`` is its own now."""
        self.pid, self.pidfd = pid, pidfd
        self._theirs.close()
        self.expect("say anything", _START_S)

    def expect(self, what: str, limit_s: float) -> None:
        """Begin to wait for something."""
        self._owes, self._limit_s = what, limit_s
        self._by, self._leave_by = time.monotonic() + limit_s, math.inf

    def heard(self, heartbeat_s: float) -> None:
        """It sent something."""
        self.heard_at = time.monotonic()
        self._be_patient(heartbeat_s)

    def _be_patient(self, heartbeat_s: float) -> None:
        if self.beats and not self.ending and not self.killed:
            self._owes, self._limit_s = "answer", heartbeat_s if self.status == "member" else _START_S
            self._by = time.monotonic() + self._limit_s

    def enters(self, generation: int, heartbeat_s: float) -> None:
        """It is in a view: from now on others wait for it."""
        self.status, self.generation = "member", generation
        self._leave_by = math.inf
        self._be_patient(heartbeat_s)

    def left(self) -> None:
        """It is in no view any more: it may wait, or end without a further beat."""
        self.status = "waiting"
        self._leave_by = math.inf
        self._be_patient(_START_S)

    def owes_leave(self, limit_s: float) -> None:
        """Its view is broken, and it is still in it."""
        self._leave_by = time.monotonic() + limit_s

    def signal(self, number: int) -> None:
        """Signal the process; one that is gone, or not there yet, is left alone."""
        if self.pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def wait_gone(self, limit_s: float) -> None:
        """Wait until the process has ended."""
        if self.pidfd is not None:
            select.select([self.pidfd], [], [], limit_s)

    def close(self) -> None:
        """Close all that is open."""
        self._theirs.close()
        self.channel.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
