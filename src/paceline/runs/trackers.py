"""Experiment trackers: their interface, and those that there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from paceline.core.config import select
from paceline.core.plugins import load
from paceline.runs.code_record import read_code
from paceline.runs.directory import RunDirectory

# --- The interface of a tracker ---


RUN_ID = "paceline.run_id"
"""The tag with the run's id."""

_NOT_TRACKED = select(lambda its: its.scope == "place")


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The description of a run for a tracker.

    Attributes:
        id: the run's id, from ``run.toml``.
        name: its directory's name.
        task: the task's name, as the user gave it.
        options: the resolved options; ``task.FIELD`` for the task's fields.
    """

    id: str
    name: str
    task: str
    directory: RunDirectory
    options: Mapping[str, Any]
    tags: Mapping[str, str]

    @classmethod
    def read(cls, directory: RunDirectory) -> RunInfo:
        """Read the description of a run from its ``run.toml``.

        Raises:
            RunDirectoryError: the directory contains no complete one.
        """
        manifest = directory.read_complete_manifest()
        fields = {f"task.{name}": value for name, value in manifest["task"]["fields"].items()}
        commit = {"paceline.commit": code["commit"]} if "commit" in (code := read_code(directory)) else {}
        return cls(
            id=manifest["id"],
            name=directory.path.resolve().name,
            task=manifest["task"]["spec"],
            directory=directory,
            options={**{n: v for n, v in manifest["config"].items() if n not in _NOT_TRACKED}, **fields},
            tags={RUN_ID: manifest["id"], "paceline.run": str(directory.path.absolute()), **commit},
        )


@runtime_checkable
class Tracker(Protocol):
    """One tracking service; all methods are called from one thread, and may raise anything.

    If it has an attribute ``url`` with the address of the run's page, the dashboard links to it. If it has a method
    ``log_media(step, at, media)``, it gets images, texts and histograms (:class:`paceline.runs.metric_writers.Media`).
    """

    def open(self, run: RunInfo, earlier: str | None) -> str:
        """Begin a run, or continue the ``earlier`` one; return the tracker's id of it."""

    def log(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Log the values of a step; ``at`` is Unix time."""

    def conclude(self, tags: Mapping[str, str], values: Mapping[str, float]) -> None:
        """Log the final tags and values of a finished run."""

    def close(self) -> None:
        """Send queued data; the run may continue later."""


# --- Trackers by name ---


def load_tracker(name: str) -> type[Tracker]:
    """Return the tracker's class for a value of ``--log-to``; its library is imported when the tracker is opened.

    Raises:
        ConfigError: there is none of this name, or it is a plug-in that cannot be used.
    """
    requirement = "a class with the methods of paceline.runs.trackers.Tracker"
    tracker: type[Tracker] = load("paceline.trackers", name, requirement, _is_tracker)
    return tracker


def _is_tracker(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, Tracker)
