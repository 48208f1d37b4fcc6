"""How a job is brought to its end before the work is done. No torch."""

from __future__ import annotations

import math
import signal
import time

from paceline.agent.workforce import Workforce
from paceline.distributed.process import ECHO_S, StopRequests, passed_on
from paceline.errors import ConfigError
from paceline.launchers.local.base import LocalSpec
from paceline.membership.coordinator import Coordinator


class Ending:
    """Begins when somebody asks for it, or when the job has failed.

    Args:
        spec: the job's.
        workforce: who is to stop.
        coordinator: is to start nobody any more.

    Attributes:
        asked: the first signal; None where no signal asked.
        begun: whether the workers were told to stop.
        deadline: when :meth:`expire` is due, by the monotonic clock.
    """

    def __init__(self, spec: LocalSpec, workforce: Workforce, coordinator: Coordinator) -> None:
        self._spec, self._workforce, self._coordinator = spec, workforce, coordinator
        # Ctrl-C may reach the agents of all machines.
        self._requests = StopRequests(ECHO_S if (spec.most_nodes or spec.nodes) > 1 else 0.0)
        self.asked: int | None = None
        self.begun = False
        self.deadline = math.inf

    @property
    def is_sure(self) -> bool:
        """Whether nobody is started any more: the workers were told to stop, or have begun to finish."""
        return self.begun or not self._coordinator.hiring

    def refuse_changes(self) -> None:
        """Refuse to let anybody join or leave a run that ends, or whose recovery does not allow it.

        Raises:
            ConfigError: says which.
        """
        if self.is_sure:
            raise ConfigError("the run is ending, so nobody joins or leaves it any more.")
        if self._spec.recover != "inplace":
            raise ConfigError("with --recover restart nobody joins or leaves a run that is at work.")

    def signalled(self, number: int) -> None:
        """A signal asks the job to stop; Ctrl-C beside another, at once."""
        match self._requests.hear(number):
            case "first":
                self.asked = number
                self._stop(passed_on(number))
            case "end":
                self.kill_all()

    def cancel(self) -> None:
        """Have the job stop, within the grace period."""
        self.asked = self.asked or signal.SIGTERM
        self.within_grace()

    def within_grace(self) -> None:
        """Have all workers stop, and kill who has not after the grace period."""
        self.deadline = time.monotonic() + self._spec.grace_s
        self._stop(signal.SIGTERM)

    def expire(self, now: float) -> None:
        """Kill who has not ended within the time given."""
        if now >= self.deadline:
            self.deadline = math.inf
            self.kill_all()

    def kill_all(self) -> None:
        """Kill all workers; nobody is started any more."""
        self.begun = True
        self._coordinator.hiring = False
        self._workforce.kill_all("was told to end")

    def _stop(self, number: int) -> None:
        """Have all workers finish their step, save, and end; nobody is started any more."""
        self.begun = True
        self._coordinator.hiring = False
        self._workforce.stop(number)
