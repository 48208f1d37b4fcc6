"""Following a job whose cluster may be unavailable for a while."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from paceline.core.errors import LaunchError
from paceline.launch.launcher import JobStatus, RecordedJob

_MAX_SILENCE_S = 600.0
"""How long a cluster may be unavailable while a command waits for a job."""

_T = TypeVar("_T")


class StatusPoller:
    """A poller of a job's status that tolerates a cluster that is unavailable for a while.

    Args:
        intervals_s: the first and the longest polling interval.
        logs: location of the job's logs, for a message if the cluster no longer knows the job.
    """

    def __init__(
        self,
        status: Callable[[], JobStatus],
        intervals_s: tuple[float, float] = (0.5, 10.0),
        *,
        logs: str = "",
    ) -> None:
        self._status = status
        self._interval_s, self._last_s = intervals_s
        self._logs = logs
        self._next = 0.0
        self._silent_since: float | None = None

    def ended(self) -> bool:
        """Return whether the job is known to have ended; query only when the interval has passed.

        Raises:
            LaunchError: the cluster no longer knows the job, or has been unavailable for too long.
        """
        return time.monotonic() >= self._next and self._end() is not None

    def wait(self) -> JobStatus:
        """Return the job's final status once it has ended.

        Raises:
            LaunchError: the cluster no longer knows the job, or has been unavailable for too long.
        """
        while (end := self._end()) is None:
            time.sleep(max(0.0, self._next - time.monotonic()))
        return end

    def answer(self, question: Callable[[], _T]) -> _T | None:
        """Return the result of a query; None if the cluster is unavailable, but only for a while so far.

        Raises:
            LaunchError: the cluster has been unavailable for too long, or the client library is not installed.
        """
        try:
            answer = question()
        except LaunchError as error:
            if isinstance(error.__cause__, ImportError):  # waiting does not install a library
                raise
            now = time.monotonic()
            if self._silent_since is None:
                self._silent_since = now
                print(f"paceline: {error} Retrying for {_MAX_SILENCE_S / 60:.0f} min.", file=sys.stderr)
            if now - self._silent_since > _MAX_SILENCE_S:
                raise
            return None
        self._silent_since = None
        return answer

    def _end(self) -> JobStatus | None:
        """Query the job; return its final status, if it has ended."""
        self._next = time.monotonic() + self._interval_s
        self._interval_s = min(self._last_s, self._interval_s * 1.3)
        status = self.answer(self._status)
        if status is not None and status.state == "unknown":
            raise LaunchError(f"{status.detail}. Its logs: {self._logs}" if self._logs else status.detail)
        return status if status is not None and status.ended else None


class PolledJob(RecordedJob):
    """A job that a system keeps, which is asked about it again and again.

    Attributes:
        title: in the message about a failure; "" if the job's own output says it.
    """

    intervals_s = (0.5, 10.0)
    title = ""

    @property
    def log_location(self) -> str:
        """For a message if the system no longer knows the job."""
        return ""

    def poller(self) -> StatusPoller:
        return StatusPoller(self.status, self.intervals_s, logs=self.log_location)

    def wait(self) -> int:
        status = self.poller().wait()
        if self.title and status.state != "succeeded":
            print(f"paceline: {self.title} {status.state}: {status.detail}.", file=sys.stderr)
        return 1 if status.exit_code is None else status.exit_code
