"""What an experiment tracker is told of a run, and what it can be asked to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.run_directory import RunDirectory

RUN_ID = "paceline.run_id"
"""The tag that holds a run's own id."""


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """What a tracker is told of a run.

    Attributes:
        id: the run's own, from ``run.toml``.
        name: its directory's name.
        task: the task's name, as the user gave it.
        directory: where it is.
        options: what was resolved; ``task.FIELD`` for the task's fields.
        tags: what it can be found by.
    """

    id: str
    name: str
    task: str
    directory: RunDirectory
    options: Mapping[str, Any]
    tags: Mapping[str, str]


class Tracker(Protocol):
    """One service; all methods are called from one thread, and may raise anything."""

    def open(self, run: Tracked, earlier: str | None) -> str:
        """Begin a run, or go on with the one that an earlier call named; return its name there."""

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Add values of a step; ``at`` is Unix time."""

    def conclude(self, tags: Mapping[str, str], values: Mapping[str, float]) -> None:
        """The run has finished: its final tags and values."""

    def close(self) -> None:
        """Send what is left; the run may go on later."""
