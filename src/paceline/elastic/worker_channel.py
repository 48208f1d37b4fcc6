"""Messages between an agent and its workers."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

import msgspec

from paceline.core.errors import PacelineError
from paceline.core.signals import (
    all_stacks,
    describe_unresponsive,
    frames_of,
    locate_user_frame,
    parse_frames,
    stacks_of,
)
from paceline.runs.failures import FailureRecord
from paceline.runs.rank_progress import ProgressTracker

# --- The messages: one JSON object per packet, over a socket pair. No torch
#
# A packet arrives completely or not at all, so any thread of a worker may send. Generations rise over the whole life of
# a run: an agent begins after the last one in the run's ledger.


_LONGEST = 262144  # bytes; a message takes a few hundred, except for stacks


class ChannelMessage(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """A message on the channel; the reader checks that all fields are there, of their types, and no other."""


class Ready(ChannelMessage, frozen=True, tag="waits"):
    """Worker to agent: it is in no group, and requests one.

    Attributes:
        left: the generation that it left, -1 for none.
    """

    left: int
    why: str


class WorkerHeartbeat(ChannelMessage, frozen=True, tag="beat"):
    """Worker to agent, ``BEATS`` times per heartbeat limit: its progress.

    Attributes:
        step: optimizer steps done; -1 if unknown yet.
        version: its state_version; -1 if unknown yet.
        overdue: whether that takes longer than expected.
        limit_s: for how long it may compute without another one.
    """

    step: int
    version: int
    phase: str
    overdue: bool = False
    limit_s: float = 0.0


class StallSnapshot(ChannelMessage, frozen=True, tag="snapshot"):
    """Worker to agent, on request: its current activity.

    Attributes:
        step: optimizer steps done.
        stage, phase, exchange, collective_seq, left: see :class:`~paceline.runs.rank_progress.ProgressTracker`.
        stage_s: seconds in the current stage.
        overdue: whether that is longer than expected.
        still_s: seconds without progress.
        where, inside, collective: see :class:`~paceline.core.signals.UserFrame`.
        helper: the helper process for which it waits, or "".
        stacks: of all its threads, as text.
    """

    generation: int
    rank: int
    step: int
    stage: str
    phase: str
    exchange: str
    collective_seq: int
    left: int
    stage_s: float
    overdue: bool
    still_s: float
    where: str = ""
    inside: str = ""
    collective: str = ""
    helper: str = ""
    stacks: str = ""


class Joined(ChannelMessage, frozen=True, tag="joined"):
    """Worker to agent: it has the state of this group, as all its members do."""

    generation: int


class Failed(ChannelMessage, frozen=True, tag="failed"):
    """Worker to agent, before it exits: the error that ends it, which the disk did not take."""

    failure: FailureRecord


class Ending(ChannelMessage, frozen=True, tag="ending"):
    """Worker to agent, last: its exit code, which the fork server reports too unless it was killed."""

    code: int


class Assignment(ChannelMessage, frozen=True, tag="assignment"):
    """Agent to worker: the group to form, and the worker's rank in it.

    Attributes:
        local_rank: its index among the members on its node.
        local_world_size: number of these members.
        active: number of members, from rank 0 on, that compute micro-batches; the others are spares.
        address: of the group's store.
        port: of the group's store.
        interface: the network interface of the members; "" for loopback.
    """

    generation: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    active: int
    address: str
    port: int
    interface: str = ""


class ReformRequest(ChannelMessage, frozen=True, tag="reform"):
    """Agent to worker: leave this group after a step, together with all members."""

    generation: int


class GroupBroken(ChannelMessage, frozen=True, tag="break"):
    """Agent to worker: this group is broken, so abandon any wait for its members."""

    generation: int


class ReportRequest(ChannelMessage, frozen=True, tag="report"):
    """Agent to worker: send a :class:`StallSnapshot`."""


class ExitRequest(ChannelMessage, frozen=True, tag="retire"):
    """Agent to worker: it is surplus, and ends with exit code 0."""


Message = (
    Ready
    | WorkerHeartbeat
    | StallSnapshot
    | Joined
    | Failed
    | Ending
    | Assignment
    | ReformRequest
    | GroupBroken
    | ReportRequest
    | ExitRequest
)

BEATS = 4


class ChannelError(PacelineError):
    """A packet is not a message; the two sides are different versions."""


def channel_pair() -> tuple[WorkerChannel, WorkerChannel]:
    """Return the two ends of a new channel; neither survives an ``exec``."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return WorkerChannel(one), WorkerChannel(other)


class WorkerChannel:
    """One end of a channel. :meth:`send` is thread-safe, :meth:`receive` is not."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def of(cls, descriptor: int) -> WorkerChannel:
        """Take over an inherited descriptor."""
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        return self._end.fileno()

    def setblocking(self, blocking: bool) -> None:
        self._end.setblocking(blocking)

    def send(self, message: Message) -> bool:
        """Send a message; return False if the other side is gone, or its buffer full."""
        content = json.dumps(msgspec.to_builtins(message)).encode()
        try:
            self._end.send(content, socket.MSG_NOSIGNAL)
        except (ConnectionError, BlockingIOError):
            return False
        return True

    def receive(self) -> Message | None:
        """Return the next message; None once the other side is gone.

        Raises:
            BlockingIOError: there is none now, and the channel does not block.
            ChannelError: the packet is not a message.
        """
        try:
            content = self._end.recv(_LONGEST)
        except ConnectionError:
            return None
        return decode(content) if content else None

    def finish(self) -> None:
        """Send no more; the other end reads an end of file, and this one still receives."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._end.close()


def decode(content: bytes) -> Message:
    """Decode a packet's message.

    Raises:
        ChannelError: it is not a message.
    """
    try:
        message: Message = msgspec.convert(json.loads(content), Message)
    except ValueError as error:
        raise ChannelError(f"a membership message cannot be read ({error}): {content[:200]!r}") from error
    return message


# --- The snapshot of a rank when a hang is suspected, from any thread but its main one. No torch ---


_LONGEST_STACKS = 24_000  # characters; a packet holds six times as many bytes


def take_stall_snapshot(activity: ProgressTracker, generation: int, rank: int) -> StallSnapshot:
    """Take a snapshot of this process's activity."""
    frame = locate_user_frame(frames_of(activity.thread))
    stacks = all_stacks(first=activity.thread)
    helper = ""
    if activity.phase in ("data", "evaluation"):
        helper, helper_stacks = _active_helper(activity)
        stacks += helper_stacks
    now = monotonic()
    return StallSnapshot(
        generation=generation,
        rank=rank,
        step=activity.step,
        stage=activity.stage,
        phase=activity.phase,
        exchange=activity.exchange,
        collective_seq=activity.collective_seq,
        left=activity.left,
        stage_s=round(now - activity.since, 3),
        overdue=activity.overdue,
        still_s=round(now - activity.moved_at, 3),
        where=frame.where,
        inside=frame.inside,
        collective=frame.collective,
        helper="" if frame.is_users else helper,
        stacks=stacks[:_LONGEST_STACKS],
    )


def _active_helper(activity: ProgressTracker) -> tuple[str, str]:
    """Describe the first helper that is in user code or does not answer; also return all helpers' stacks."""
    active_helper, texts = "", []
    for pid in activity.helpers():
        stacks = stacks_of(pid)
        frame = locate_user_frame(parse_frames(stacks))
        if frame.is_users:
            activity_text = f"which is in {frame.where}"
        else:
            activity_text = "" if stacks else f"which {describe_unresponsive(pid) or 'has ended'}"
        active_helper = active_helper or (f"data worker {pid}, {activity_text}" if activity_text else "")
        texts.append(f"\nData worker {pid}:\n{stacks}")
    return active_helper, "".join(texts)


# --- The worker's client of its agent. No torch ---
#
# Two threads serve the channel, so that heartbeats continue during a long step or a wait in C++.


_LONGEST_SILENCE_S = 600.0  # of a worker that computes, where its stage has no time limit
_ORPHANED = 1  # exit code of a worker whose agent is gone
_GLANCE_S = 0.1


def _end_process() -> None:
    os._exit(_ORPHANED)


class Retired(PacelineError):
    """The agent does not need this worker any more."""

    exit_code = 0


class HeartbeatState:
    """This worker's progress; the trainer sets it, and heartbeats report it."""

    def __init__(self) -> None:
        self.step = -1
        self.version = -1
        self.phase = "starting"


class AgentClient:
    """This worker's connection to its agent.

    Args:
        heartbeat_s: the agent's timeout without a heartbeat.
        orphaned: called once the agent is gone. By default the process ends at once, because it could not learn its
            peers.

    Attributes:
        pulse: this worker's progress.
        progress_tracker: its current stage and time limit.
    """

    def __init__(
        self, channel: WorkerChannel, heartbeat_s: float = 2.0, orphaned: Callable[[], None] = _end_process
    ) -> None:
        self.pulse = HeartbeatState()
        self.progress_tracker = ProgressTracker()
        self._beat_s = heartbeat_s / BEATS
        self._channel = channel
        self._changed = threading.Condition()
        self._assignment: Assignment | None = None
        self._to_reform = -1
        self._broken = -1
        self._when_broken: tuple[int, Callable[[], None]] = (-1, lambda: None)
        self._retired = False
        self._orphaned = orphaned
        self._agent_gone = threading.Event()
        for serve in (self._listen, self._beat):
            threading.Thread(target=serve, name=f"paceline-membership{serve.__name__}", daemon=True).start()

    def next_group(self, left: int, why: str, give_up: Callable[[], bool] = lambda: False) -> Assignment | None:
        """Request the group after generation ``left``, -1 for the first, and wait for it.

        Args:
            left: the generation of this worker's last group.
            give_up: polled several times a second; return None once it is true.

        Raises:
            Retired: the agent does not need this worker.
        """
        self.pulse.phase = "waiting for a group"
        self.progress_tracker.wait()
        self.beat()
        self._channel.send(Ready(left, why))
        with self._changed:
            while self._assignment is None or self._assignment.generation <= left:
                if self._retired:
                    raise Retired("the agent does not need this worker any more")
                if give_up():
                    return None
                self._changed.wait(_GLANCE_S)  # bounded, because signals are handled between two waits
            self.pulse.phase = "joining"
            self.progress_tracker.join()
            return self._assignment

    def beat(self) -> None:
        """Send a heartbeat now."""
        pulse, tracker = self.pulse, self.progress_tracker
        limit_s = min(tracker.limit_s, _LONGEST_SILENCE_S)
        self._channel.send(WorkerHeartbeat(pulse.step, pulse.version, pulse.phase, tracker.overdue, limit_s))

    def fail(self, failure: FailureRecord) -> None:
        """Report the error that ends this process."""
        self._channel.send(Failed(failure))

    def leave(self, code: int) -> None:
        """Announce the exit with this code, because the interpreter's end may take seconds without heartbeats."""
        self._channel.send(Ending(code))
        self._channel.finish()

    def joined(self, generation: int) -> None:
        """Report that this worker has the state of its group."""
        self.beat()
        self.pulse.phase = "training"
        self._channel.send(Joined(generation))

    def should_reform(self, generation: int) -> bool:
        """Return whether the members of this group should leave it together; cheap."""
        return self._to_reform >= generation

    def broken(self, generation: int) -> bool:
        """Return whether this group has lost a member; cheap."""
        return self._broken >= generation

    def when_broken(self, generation: int, do: Callable[[], None]) -> None:
        """Call ``do``, from another thread, once this group has lost a member; at once if it already has."""
        with self._changed:
            self._when_broken = (generation, do)
        if self.broken(generation):
            do()

    def _listen(self) -> None:
        while (message := self._channel.receive()) is not None:
            if isinstance(message, ReportRequest):
                self._report()
                continue
            with self._changed:
                self._handle(message)
                self._changed.notify_all()
                generation, when_broken = self._when_broken
            if isinstance(message, GroupBroken) and message.generation >= generation:
                when_broken()
        self._agent_gone.set()
        self._orphaned()

    def _report(self) -> None:
        assignment = self._assignment
        if assignment is not None:
            self._channel.send(take_stall_snapshot(self.progress_tracker, assignment.generation, assignment.rank))

    def _handle(self, message: Message) -> None:
        match message:
            case Assignment():
                self._assignment = message
            case ReformRequest(generation):
                self._to_reform = max(self._to_reform, generation)
            case GroupBroken(generation):
                self._broken = max(self._broken, generation)
            case ExitRequest():
                self._retired = True

    def _beat(self) -> None:
        while not self._agent_gone.is_set():
            self.beat()
            self._agent_gone.wait(self._beat_s)
