"""What an agent and its workers tell each other: one JSON object a packet, over a socket pair. No torch.

A packet arrives whole or not at all, so any thread of a worker may send. Generations rise over the
whole life of a run: an agent begins after the last that the run's ledger knows.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from paceline.errors import PacelineError

_LONGEST = 262144  # bytes; a message is a few hundred, but for one with stacks


@dataclass(frozen=True)
class Waits:
    """Worker to agent: it is in no view, and asks for one.

    Attributes:
        left: the generation that it left, -1 for none.
        why: what made it leave, for the events.
    """

    kind: ClassVar[str] = "waits"
    left: int
    why: str


@dataclass(frozen=True)
class Beat:
    """Worker to agent, ``BEATS`` times within a heartbeat's limit: it lives, and stands here.

    Attributes:
        step: optimizer steps done; -1 before it knows.
        version: its state_version; -1 before it knows.
        phase: what it is doing.
        overdue: that takes longer than expected.
    """

    kind: ClassVar[str] = "beat"
    step: int
    version: int
    phase: str
    overdue: bool = False


@dataclass(frozen=True)
class Standing:
    """Worker to agent, when asked: what it does at this moment.

    Attributes:
        generation: of the view that it is in.
        rank: its rank there.
        step: optimizer steps done.
        stage, phase, exchange, entered, left: as :class:`~paceline.distributed.activity.Activity` says.
        stage_s: how long it has been at its stage.
        overdue: that is longer than expected.
        still_s: for how long it has not gone on to anything else.
        where, inside, collective: as :class:`~paceline.stacks.Whereabouts` says.
        helper: what it waits for, where that is a process of its own; "" where it is not.
        stacks: of all its threads, as text.
    """

    kind: ClassVar[str] = "standing"
    generation: int
    rank: int
    step: int
    stage: str
    phase: str
    exchange: str
    entered: int
    left: int
    stage_s: float
    overdue: bool
    still_s: float
    where: str = ""
    inside: str = ""
    collective: str = ""
    helper: str = ""
    stacks: str = ""


@dataclass(frozen=True)
class Joined:
    """Worker to agent: it holds the state of this view, as all in it do."""

    kind: ClassVar[str] = "joined"
    generation: int


@dataclass(frozen=True)
class Place:
    """Agent to worker: the view to form, and its place there.

    Attributes:
        local_rank: its position among the members on its machine.
        local_world_size: how many those are.
        computing: how many members, from rank 0 on, compute shards; the others are spares.
        address: of the view's store.
        port: of the view's store.
        interface: the network interface that the members meet over; "" for loopback.
    """

    kind: ClassVar[str] = "view"
    generation: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    computing: int
    address: str
    port: int
    interface: str = ""


@dataclass(frozen=True)
class Reform:
    """Agent to worker: leave this view, together with all others and after a step."""

    kind: ClassVar[str] = "reform"
    generation: int


@dataclass(frozen=True)
class Broken:
    """Agent to worker: this view is broken, so give up what waits for its members."""

    kind: ClassVar[str] = "break"
    generation: int


@dataclass(frozen=True)
class Report:
    """Agent to worker: tell what you do at this moment."""

    kind: ClassVar[str] = "report"


@dataclass(frozen=True)
class Leave:
    """Agent to worker: it is not needed any more, and ends with exit code 0."""

    kind: ClassVar[str] = "retire"


Message = Waits | Beat | Standing | Joined | Place | Reform | Broken | Report | Leave

BEATS = 4

# By a field's annotation; a number without a fraction may come back as an integer.
_TYPES: dict[Any, tuple[type, ...]] = {"int": (int,), "str": (str,), "bool": (bool,), "float": (float, int)}

_KINDS: dict[str, type[Any]] = {
    kind.kind: kind for kind in (Waits, Beat, Standing, Joined, Place, Reform, Broken, Report, Leave)
}


class ChannelError(PacelineError):
    """What came through a channel is no message: the two sides are different versions."""


def channel_pair() -> tuple[Channel, Channel]:
    """The two ends of a new channel; neither survives an ``exec``."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(one), Channel(other)


class Channel:
    """One end. :meth:`send` may be called from any thread, :meth:`receive` from one."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def of(cls, descriptor: int) -> Channel:
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
        content = json.dumps(to_document(message)).encode()
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


def to_document(message: Message) -> dict[str, Any]:
    """A message as a JSON object."""
    return {"kind": message.kind, **asdict(message)}


def from_document(document: Any) -> Message:
    """The message of a JSON object.

    Raises:
        ChannelError: it is none.
    """
    try:
        values = dict(document)
        message: Message = _KINDS[values.pop("kind")](**values)
        if any(type(getattr(message, f.name)) not in _TYPES[f.type] for f in fields(message)):
            raise TypeError
    except (ValueError, KeyError, TypeError) as error:
        raise ChannelError(f"a membership message cannot be read: {str(document)[:200]}") from error
    return message


def decode(content: bytes) -> Message:
    """A packet's message.

    Raises:
        ChannelError: it is none.
    """
    try:
        document = json.loads(content)
    except ValueError as error:
        raise ChannelError(f"a membership message cannot be read: {content[:200]!r}") from error
    return from_document(document)
