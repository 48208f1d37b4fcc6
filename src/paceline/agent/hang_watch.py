"""When an agent asks its workers where they stand, and when it has waited for long enough. No torch.

Each worker knows how long its steps take, and says with its beats when one takes too long. Then all
members of the view are asked. If who holds them up is stuck, it is a hang; if it moves, or may take its
time, it is only slow, and they are asked again later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.membership.channel import Standing
from paceline.membership.hang import Finished, Silence, Verdict, verdict
from paceline.membership.hang_record import record_hang, record_slow
from paceline.membership.views import View
from paceline.run_directory import RunDirectory

_ANSWER_S = 5.0  # who cannot even answer is usually silent altogether, and killed for that before
_PAUSE_S = 2.0
_SLOW_EVERY_S = 60.0


@dataclass(frozen=True)
class Ask:
    """Ask these workers for a :class:`~paceline.membership.channel.Standing`."""

    workers: tuple[int, ...]


@dataclass(frozen=True)
class Hang:
    """The view hangs.

    Attributes:
        sentence: who keeps whom waiting, and where the stacks are.
        culprits: why each of these workers is to be killed; none where killing does not help, because they
            all wait for each other.
    """

    sentence: str
    culprits: dict[int, str]


class HangWatch:
    """Watches over the members of one view after another.

    Args:
        directory: the run's.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._view: View | None = None
        self._nodes: dict[int, str] = {}  # by rank
        self._finished: set[int] = set()
        self._answers: dict[int, Standing] | None = None  # by worker, while they are asked
        self._due = math.inf
        self._patient_until = -math.inf
        self._next_slow = -math.inf

    @property
    def deadline(self) -> float:
        """When :meth:`turn` is due, by the monotonic clock."""
        return self._due

    def forms(self, view: View, nodes: Sequence[str]) -> None:
        """From now on this is the view; ``nodes`` are its members'."""
        self.forget()
        self._view, self._nodes = view, dict(enumerate(nodes))

    def forget(self) -> None:
        """The view is broken: its members are about to leave it."""
        self._view, self._answers, self._due = None, None, math.inf
        self._finished.clear()

    def finishes(self, worker: int) -> None:
        """A worker has ended in good order; the others should be about to."""
        self._finished.add(worker)

    def beats(self, worker: int, *, overdue: bool) -> None:
        """A worker has told whether what it does takes too long."""
        if overdue and self._answers is None and self._view is not None and worker in self._view.members:
            self._due = min(self._due, max(time.monotonic(), self._patient_until))

    def answers(self, worker: int, standing: Standing) -> None:
        """A worker has told where it stands."""
        if self._answers is None or self._view is None or standing.generation != self._view.generation:
            return
        self._answers[worker] = standing
        if self._answers.keys() >= set(self._view.members) - self._finished:
            self._due = time.monotonic()

    def turn(self) -> Ask | Hang | None:
        """What is to be done, once the deadline is reached."""
        now = time.monotonic()
        if self._view is None or now < self._due:
            return None
        if self._answers is None:
            self._answers, self._due = {}, now + _ANSWER_S
            return Ask(self._view.members)
        members, answers = self._view.members, self._answers
        self._answers, self._due, self._patient_until = None, math.inf, now + _PAUSE_S
        reports = [
            answers.get(worker) or (Finished(rank) if worker in self._finished else Silence(rank))
            for rank, worker in enumerate(members)
        ]
        found = verdict(reports, self._nodes)
        if not found.certain:
            self._is_slow(found, now)
            return None
        self._view = None
        folder = record_hang(self._directory, found, reports)
        return Hang(
            f"{found.sentence}. All stacks: {folder}",
            {members[rank]: reason for rank, reason in found.reasons.items()},
        )

    def _is_slow(self, found: Verdict, now: float) -> None:
        if found.culprits and now >= self._next_slow:
            self._next_slow = now + _SLOW_EVERY_S
            record_slow(self._directory, found)
