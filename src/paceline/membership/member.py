"""A worker's side of the membership: it asks for views, and hears what becomes of them. No torch.

Two threads serve the channel, so that neither a long step nor a wait in C++ keeps the agent in the dark.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from paceline.distributed.activity import Activity
from paceline.errors import PacelineError
from paceline.membership.channel import (
    BEATS,
    Beat,
    Broken,
    Channel,
    Joined,
    Leave,
    Message,
    Place,
    Reform,
    Report,
    Waits,
)
from paceline.membership.standing import standing_of

_ORPHANED = 1  # exit code of a worker whose agent is gone; nobody is left to read it
_GLANCE_S = 0.1


def _end_process() -> None:
    os._exit(_ORPHANED)


class Retired(PacelineError):
    """The agent does not need this worker any more."""

    exit_code = 0


class Pulse:
    """Where this worker stands; the trainer writes it, the beats tell it to the agent."""

    def __init__(self) -> None:
        self.step = -1
        self.version = -1
        self.phase = "starting"


class Member:
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
        self, channel: Channel, heartbeat_s: float = 2.0, orphaned: Callable[[], None] = _end_process
    ) -> None:
        self.pulse = Pulse()
        self.activity = Activity()
        self._beat_s = heartbeat_s / BEATS
        self._channel = channel
        self._news = threading.Condition()
        self._place: Place | None = None
        self._to_reform = -1
        self._broken = -1
        self._when_broken: tuple[int, Callable[[], None]] = (-1, lambda: None)
        self._retired = False
        self._orphaned = orphaned
        self._agent_gone = threading.Event()
        for serve in (self._listen, self._beat):
            threading.Thread(target=serve, name=f"paceline-membership{serve.__name__}", daemon=True).start()

    def next_view(self, left: int, why: str, give_up: Callable[[], bool] = lambda: False) -> Place | None:
        """Ask for the view after generation ``left``, -1 for the first, and wait for it.

        Args:
            left: the generation that this worker was in before.
            why: what made it leave.
            give_up: asked several times a second; once it is true, None is returned.

        Raises:
            Retired: the agent has no place for this worker.
        """
        self.pulse.phase = "waiting for a view"
        self.activity.wait()
        self.beat()
        self._channel.send(Waits(left, why))
        with self._news:
            while self._place is None or self._place.generation <= left:
                if self._retired:
                    raise Retired("the agent does not need this worker any more")
                if give_up():
                    return None
                self._news.wait(_GLANCE_S)  # not for ever: signals are handled between two waits
            self.pulse.phase = "joining"
            self.activity.join()
            return self._place

    def beat(self) -> None:
        """Tell the agent where this worker stands, without waiting for the next beat."""
        pulse = self.pulse
        self._channel.send(Beat(pulse.step, pulse.version, pulse.phase, self.activity.overdue))

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
            if isinstance(message, Report):
                self._report()
                continue
            with self._news:
                self._take(message)
                self._news.notify_all()
                generation, when_broken = self._when_broken
            if isinstance(message, Broken) and message.generation >= generation:
                when_broken()
        self._agent_gone.set()
        self._orphaned()

    def _report(self) -> None:
        place = self._place
        if place is not None:
            self._channel.send(standing_of(self.activity, place.generation, place.rank))

    def _take(self, message: Message) -> None:
        match message:
            case Place():
                self._place = message
            case Reform(generation):
                self._to_reform = max(self._to_reform, generation)
            case Broken(generation):
                self._broken = max(self._broken, generation)
            case Leave():
                self._retired = True

    def _beat(self) -> None:
        while not self._agent_gone.is_set():
            self.beat()
            self._agent_gone.wait(self._beat_s)
