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
from paceline.core.stack_dump import (
    all_stacks,
    describe_unresponsive,
    frames_of,
    locate_user_frame,
    parse_frames,
    stacks_of,
)
from paceline.parallel.progress import ProgressTracker

# --- What an agent and its workers tell each other: one JSON object a packet, over a socket pair. No torch
#
# A packet arrives whole or not at all, so any thread of a worker may send. Generations rise over the
# whole life of a run: an agent begins after the last that the run's ledger knows.


_LONGEST = 262144  # bytes; a message is a few hundred, but for one with stacks


class ChannelMessage(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    """What is read as one has all its fields, each of its type, and no other."""


class Ready(ChannelMessage, frozen=True, tag="waits"):
    """Worker to agent: it is in no view, and asks for one.

    Attributes:
        left: the generation that it left, -1 for none.
        why: what made it leave, for the events.
    """

    left: int
    why: str


class WorkerHeartbeat(ChannelMessage, frozen=True, tag="beat"):
    """Worker to agent, ``BEATS`` times within a heartbeat's limit: it lives, and stands here.

    Attributes:
        step: optimizer steps done; -1 before it knows.
        version: its state_version; -1 before it knows.
        phase: what it is doing.
        overdue: that takes longer than expected.
    """

    step: int
    version: int
    phase: str
    overdue: bool = False


class StallSnapshot(ChannelMessage, frozen=True, tag="standing"):
    """Worker to agent, when asked: what it does at this moment.

    Attributes:
        generation: of the view that it is in.
        rank: its rank there.
        step: optimizer steps done.
        stage, phase, exchange, entered, left: as :class:`~paceline.parallel.progress.Activity` says.
        stage_s: how long it has been at its stage.
        overdue: that is longer than expected.
        still_s: for how long it has not gone on to anything else.
        where, inside, collective: as :class:`~paceline.core.stack_dump.Whereabouts` says.
        helper: what it waits for, where that is a process of its own; "" where it is not.
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
    """Worker to agent: it holds the state of this view, as all in it do."""

    generation: int


class Assignment(ChannelMessage, frozen=True, tag="view"):
    """Agent to worker: the view to form, and its place there.

    Attributes:
        local_rank: its position among the members on its machine.
        local_world_size: how many those are.
        computing: how many members, from rank 0 on, compute micro-batches; the others are spares.
        address: of the view's store.
        port: of the view's store.
        interface: the network interface that the members meet over; "" for loopback.
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
    """Agent to worker: leave this view, together with all others and after a step."""

    generation: int


class GroupBroken(ChannelMessage, frozen=True, tag="break"):
    """Agent to worker: this view is broken, so give up what waits for its members."""

    generation: int


class ReportRequest(ChannelMessage, frozen=True, tag="report"):
    """Agent to worker: tell what you do at this moment."""


class ExitRequest(ChannelMessage, frozen=True, tag="retire"):
    """Agent to worker: it is not needed any more, and ends with exit code 0."""


Message = (
    Ready
    | WorkerHeartbeat
    | StallSnapshot
    | Joined
    | Assignment
    | ReformRequest
    | GroupBroken
    | ReportRequest
    | ExitRequest
)

BEATS = 4


class ChannelError(PacelineError):
    """What came through a channel is no message: the two sides are different versions."""


def channel_pair() -> tuple[WorkerChannel, WorkerChannel]:
    """The two ends of a new channel; neither survives an ``exec``."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return WorkerChannel(one), WorkerChannel(other)


class WorkerChannel:
    """One end. :meth:`send` may be called from any thread, :meth:`receive` from one."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def of(cls, descriptor: int) -> WorkerChannel:
        """Take over an inherited descriptor."""
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._end.fileno()

    def setblocking(self, blocking: bool) -> None:
        """As for a socket."""
        self._end.setblocking(blocking)

    def send(self, message: Message) -> bool:
        """Send; say whether it went out. It does not where the other side is gone, or its buffer full."""
        content = json.dumps(msgspec.to_builtins(message)).encode()
        try:
            self._end.send(content, socket.MSG_NOSIGNAL)
        except (ConnectionError, BlockingIOError):
            return False
        return True

    def receive(self) -> Message | None:
        """The next message; None once the other side is gone.

        Raises:
            BlockingIOError: there is none now, and the channel does not block.
            ChannelError: the packet is no message.
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
        """Close this end; the other one reads its end of file."""
        self._end.close()


def decode(content: bytes) -> Message:
    """A packet's message.

    Raises:
        ChannelError: it is none.
    """
    try:
        message: Message = msgspec.convert(json.loads(content), Message)
    except ValueError as error:
        raise ChannelError(f"a membership message cannot be read ({error}): {content[:200]!r}") from error
    return message


# --- What a rank tells of itself when a hang is suspected: from any thread but its main one. No torch ---


_LONGEST_STACKS = 24_000  # characters; a packet holds six times as many bytes


def take_stall_snapshot(activity: ProgressTracker, generation: int, rank: int) -> StallSnapshot:
    """Where this process stands."""
    place = locate_user_frame(frames_of(activity.thread))
    stacks = all_stacks(first=activity.thread)
    helper = ""
    if activity.phase in ("data", "evaluation"):
        helper, theirs = _active_helper(activity)
        stacks += theirs
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
        where=place.where,
        inside=place.inside,
        collective=place.collective,
        helper="" if place.is_users else helper,
        stacks=stacks[:_LONGEST_STACKS],
    )


def _active_helper(activity: ProgressTracker) -> tuple[str, str]:
    """Where the first helper is that is in the user's code, or cannot tell; and all helpers' stacks."""
    found, texts = "", []
    for pid in activity.helpers():
        stacks = stacks_of(pid)
        place = locate_user_frame(parse_frames(stacks))
        if place.is_users:
            at = f"which is in {place.where}"
        else:
            at = "" if stacks else f"which {describe_unresponsive(pid) or 'has ended'}"
        found = found or (f"data worker {pid}, {at}" if at else "")
        texts.append(f"\nData worker {pid}:\n{stacks}")
    return found, "".join(texts)


# --- A worker's side of the membership: it asks for views, and hears what becomes of them. No torch ---
#
# Two threads serve the channel, so that neither a long step nor a wait in C++ keeps the agent in the dark.


_ORPHANED = 1  # exit code of a worker whose agent is gone; nobody is left to read it
_GLANCE_S = 0.1


def _end_process() -> None:
    os._exit(_ORPHANED)


class Retired(PacelineError):
    """The agent does not need this worker any more."""

    exit_code = 0


class HeartbeatState:
    """Where this worker stands; the trainer writes it, the beats tell it to the agent."""

    def __init__(self) -> None:
        self.step = -1
        self.version = -1
        self.phase = "starting"


class AgentClient:
    """This worker, as the agent knows it.

    Args:
        channel: this worker's end.
        heartbeat_s: how long the agent bears silence.
        orphaned: called once the agent is gone. By default the process ends at once, as nobody could
            tell it who its peers are.

    Attributes:
        pulse: where this worker stands.
        activity: what it is doing, and for how long it may.
    """

    def __init__(
        self, channel: WorkerChannel, heartbeat_s: float = 2.0, orphaned: Callable[[], None] = _end_process
    ) -> None:
        self.pulse = HeartbeatState()
        self.progress_tracker = ProgressTracker()
        self._beat_s = heartbeat_s / BEATS
        self._channel = channel
        self._news = threading.Condition()
        self._place: Assignment | None = None
        self._to_reform = -1
        self._broken = -1
        self._when_broken: tuple[int, Callable[[], None]] = (-1, lambda: None)
        self._retired = False
        self._orphaned = orphaned
        self._agent_gone = threading.Event()
        for serve in (self._listen, self._beat):
            threading.Thread(target=serve, name=f"paceline-membership{serve.__name__}", daemon=True).start()

    def next_group(self, left: int, why: str, give_up: Callable[[], bool] = lambda: False) -> Assignment | None:
        """Ask for the view after generation ``left``, -1 for the first, and wait for it.

        Args:
            left: the generation that this worker was in before.
            why: what made it leave.
            give_up: asked several times a second; once it is true, None is returned.

        Raises:
            Retired: the agent has no place for this worker.
        """
        self.pulse.phase = "waiting for a view"
        self.progress_tracker.wait()
        self.beat()
        self._channel.send(Ready(left, why))
        with self._news:
            while self._place is None or self._place.generation <= left:
                if self._retired:
                    raise Retired("the agent does not need this worker any more")
                if give_up():
                    return None
                self._news.wait(_GLANCE_S)  # not for ever: signals are handled between two waits
            self.pulse.phase = "joining"
            self.progress_tracker.join()
            return self._place

    def beat(self) -> None:
        """Tell the agent where this worker stands, without waiting for the next beat."""
        pulse = self.pulse
        self._channel.send(WorkerHeartbeat(pulse.step, pulse.version, pulse.phase, self.progress_tracker.overdue))

    def leave(self) -> None:
        """Tell the agent that this process is about to end: its interpreter may take seconds, in silence."""
        self._channel.finish()

    def joined(self, generation: int) -> None:
        """Tell the agent that this worker holds the state of its view."""
        self.beat()
        self.pulse.phase = "training"
        self._channel.send(Joined(generation))

    def should_reform(self, generation: int) -> bool:
        """Whether the members of this view shall leave it together; costs nothing."""
        return self._to_reform >= generation

    def broken(self, generation: int) -> bool:
        """Whether this view lost a member; costs nothing."""
        return self._broken >= generation

    def when_broken(self, generation: int, do: Callable[[], None]) -> None:
        """Call ``do``, from another thread, once this view has lost a member; at once if it has already."""
        with self._news:
            self._when_broken = (generation, do)
        if self.broken(generation):
            do()

    def _listen(self) -> None:
        while (message := self._channel.receive()) is not None:
            if isinstance(message, ReportRequest):
                self._report()
                continue
            with self._news:
                self._take(message)
                self._news.notify_all()
                generation, when_broken = self._when_broken
            if isinstance(message, GroupBroken) and message.generation >= generation:
                when_broken()
        self._agent_gone.set()
        self._orphaned()

    def _report(self) -> None:
        place = self._place
        if place is not None:
            self._channel.send(take_stall_snapshot(self.progress_tracker, place.generation, place.rank))

    def _take(self, message: Message) -> None:
        match message:
            case Assignment():
                self._place = message
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
