"""Following a job whose system may be away for a while."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from paceline.errors import LaunchError
from paceline.launchers.base import JobStatus

_PATIENCE_S = 600.0
"""How long a system may not answer while one waits for a job."""

_T = TypeVar("_T")


class Watch:
    """Asks after a job now and then, and bears with a system that does not answer for a while.

    Args:
        status: asks where the job stands.
        intervals_s: the first interval, from which they grow to the last.
        logs: where the job's logs are, for the one whose system has forgotten it.
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
        """Whether the job has, as far as is known; asks only when it is time to.

        Raises:
            LaunchError: the system has forgotten the job, or has not answered for long.
        """
        return time.monotonic() >= self._next and self._end() is not None

    def wait(self) -> JobStatus:
        """The job's last status, once it has ended.

        Raises:
            LaunchError: the system has forgotten the job, or has not answered for long.
        """
        while (end := self._end()) is None:
            time.sleep(max(0.0, self._next - time.monotonic()))
        return end

    def answer(self, question: Callable[[], _T]) -> _T | None:
        """What the system says to a question; None where it does not answer, and may yet.

        Raises:
            LaunchError: it has not answered for long, or the library that asks it is not installed.
        """
        try:
            answer = question()
        except LaunchError as error:
            if isinstance(error.__cause__, ImportError):  # no library comes of waiting
                raise
            now = time.monotonic()
            if self._silent_since is None:
                self._silent_since = now
                print(f"paceline: {error} Asking again, for {_PATIENCE_S / 60:.0f} min.", file=sys.stderr)
            if now - self._silent_since > _PATIENCE_S:
                raise
            return None
        self._silent_since = None
        return answer

    def _end(self) -> JobStatus | None:
        """Ask; the status that the job has ended with, if it has."""
        self._next = time.monotonic() + self._interval_s
        self._interval_s = min(self._last_s, self._interval_s * 1.3)
        status = self.answer(self._status)
        if status is not None and status.state == "unknown":
            raise LaunchError(f"{status.detail}. Its logs: {self._logs}" if self._logs else status.detail)
        return status if status is not None and status.ended else None
