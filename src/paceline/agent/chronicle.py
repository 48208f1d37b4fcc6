"""What is told of a job: what ended each view, who was lost, and how long it took to go on. No torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from paceline.membership.views import View
from paceline.run_directory import RunDirectory


def record(directory: RunDirectory, kind: str, **fields: object) -> None:
    """Note an event; a full disk is no reason to give up the workers."""
    with suppress(OSError):
        directory.append_event(kind, **fields)


def say(sentence: str) -> None:
    """Tell the user something; stderr may be a file on a full disk too."""
    with suppress(OSError):
        print(f"paceline: {sentence}", file=sys.stderr, flush=True)


class Chronicle:
    """Of the views that one leader forms.

    Args:
        directory: the run's.
        first: the job's first generation, which replaces no other; -1 where another agent has led before.
    """

    def __init__(self, directory: RunDirectory, first: int) -> None:
        self._directory, self._first = directory, first
        self._lost_at: float | None = None  # when the view was hit, or left, that is being replaced
        self._hit = False  # a worker or node was lost since the current view was formed
        self._asked_to_reform = -1  # the generation whose members were asked to leave it
        self._why = ""  # what the first member that left the current view said
        self._joined: set[int] = set()  # those of the current view's members that hold its state

    def record(self, kind: str, **fields: object) -> None:
        """Note an event."""
        record(self._directory, kind, **fields)

    def lost(self, since: float | None = None) -> None:
        """The view is hit, or left; by the monotonic clock, since when, if not now."""
        since = time.monotonic() if since is None else since
        self._lost_at = since if self._lost_at is None else min(since, self._lost_at)

    def hit(self) -> None:
        """A worker or node was lost."""
        self._hit = True

    def left(self, why: str) -> None:
        """A worker asks for a view, and says what made it leave its own."""
        self._why = self._why or why

    def asked_to_reform(self, generation: int) -> None:
        """The members of this view were asked to leave it."""
        self._asked_to_reform = generation

    def was_asked_to_reform(self, generation: int) -> bool:
        """Whether the members of this view were asked to leave it."""
        return self._asked_to_reform == generation

    def formed(self, view: View, slots: Sequence[int], nodes: Sequence[str], step: int) -> None:
        """A view is formed.

        Args:
            view: the view.
            slots: its members'.
            nodes: its members'.
            step: where they stand; -1 before they know.
        """
        if view.generation > self._first:
            self.record(
                "view",
                generation=view.generation,
                members=list(slots),
                world_size=len(view.members),
                computing=view.computing,
                nodes=len(set(nodes)),
                why=self._why,
                recovery=self._hit or self._asked_to_reform != view.generation - 1,
                step=step,
                seconds=self._since_loss(),
            )
        self._joined.clear()
        self._why, self._hit = "", False

    def joined(self, view: View, worker: int, step: int) -> None:
        """A member of the current view holds its state."""
        self._joined.add(worker)
        if self.is_whole(view) and view.generation > self._first:
            self.record("joined", generation=view.generation, step=step, seconds=self._since_loss())
            self._lost_at = None

    def is_whole(self, view: View | None) -> bool:
        """Whether all members of the current view hold its state."""
        return view is not None and self._joined >= set(view.members)

    def _since_loss(self) -> float | None:
        return None if self._lost_at is None else round(time.monotonic() - self._lost_at, 4)
