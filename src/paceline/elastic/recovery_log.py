"""The record of a run's recoveries: the end of each group, and the time that the next one took. No torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from paceline.elastic.coordinator import WorkerGroup
from paceline.runs.directory import RunDirectory


def print_status(sentence: str) -> None:
    """Print a message for the user; stderr may be a file on a full disk too."""
    with suppress(OSError):
        print(f"paceline: {sentence}", file=sys.stderr, flush=True)


class RecoveryLog:
    """Records the groups that one leader forms.

    Args:
        first: the job's first generation, which replaces no other; -1 if another agent has led before.
    """

    def __init__(self, directory: RunDirectory, first: int) -> None:
        self._directory = directory
        self._first = first
        self._lost_at: float | None = None  # when the group being replaced was broken or left
        self._hit = False  # whether a worker or node was lost since the current group was formed
        self._asked_to_reform = -1  # the generation whose members got the order to leave it
        self._why = ""  # the reason from the first member that left the current group
        self._joined: set[int] = set()  # members of the current group that have its state

    def record(self, kind: str, **fields: object) -> None:
        self._directory.queue_event(kind, **fields)

    def lost(self, since: float | None = None) -> None:
        """Record that the group is broken or left, now or at ``since`` by the monotonic clock."""
        since = time.monotonic() if since is None else since
        self._lost_at = since if self._lost_at is None else min(since, self._lost_at)

    def hit(self) -> None:
        """Record the loss of a worker or node."""
        self._hit = True

    def left(self, why: str) -> None:
        """Record that a worker has left its group, and why."""
        self._why = self._why or why

    def asked_to_reform(self, generation: int) -> None:
        """Record that the members of this group got the order to leave it."""
        self._asked_to_reform = generation

    def was_asked_to_reform(self, generation: int) -> bool:
        """Return whether the members of this group got the order to leave it."""
        return self._asked_to_reform == generation

    def formed(self, view: WorkerGroup, local_indices: Sequence[int], nodes: Sequence[str], step: int) -> None:
        """Record a new group.

        Args:
            nodes: its members' nodes.
            step: their step; -1 if unknown yet.
        """
        if view.generation > self._first:
            self.record(
                "view",
                generation=view.generation,
                members=list(local_indices),
                world_size=len(view.members),
                computing=view.active,
                nodes=len(set(nodes)),
                why=self._why,
                recovery=self._hit or self._asked_to_reform != view.generation - 1,
                step=step,
                seconds=self._since_loss(),
            )
        self._joined.clear()
        self._why = ""
        self._hit = False

    def joined(self, view: WorkerGroup, worker: int, step: int) -> None:
        """Record that a member of the current group has its state."""
        self._joined.add(worker)
        if self.is_whole(view) and view.generation > self._first:
            self.record("joined", generation=view.generation, step=step, seconds=self._since_loss())
            self._lost_at = None

    def is_whole(self, view: WorkerGroup | None) -> bool:
        """Return whether all members of the current group have its state."""
        return view is not None and self._joined >= set(view.members)

    def _since_loss(self) -> float | None:
        return None if self._lost_at is None else round(time.monotonic() - self._lost_at, 4)
