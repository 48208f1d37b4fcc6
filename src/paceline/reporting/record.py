"""What a run's directory says of it, read by somebody who trusts none of it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.config import config_from_mapping, flag, non_defaults
from paceline.errors import RunDirectoryError, UserError
from paceline.monitoring.timeline import Timeline, timeline
from paceline.run_directory import RunDirectory, read_json_lines

_ELSEWHERE = (
    "run",
    "resume",
    "rdzv_endpoint",
    "rdzv_id",
    "token_file",
    "interface",
    "node_rank",
    "task",
    "set",
)
"""Options that say where a run was, and nothing of what it computed."""


@dataclass(frozen=True)
class Point:
    """A number at a step."""

    step: int
    value: float


@dataclass(frozen=True)
class Record:
    """A run's directory, read.

    Attributes:
        name: the directory's.
        path: the directory's.
        manifest: ``run.toml``.
        train, evaluations: the records of ``metrics.jsonl``.
        result: ``result.json``; None while the run has not finished.
        timeline: of ``events.jsonl``.
        state: "finished", "running", or the last that is known of it.
    """

    name: str
    path: Path
    manifest: Mapping[str, Any]
    train: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Mapping[str, Any], ...]
    result: Mapping[str, Any] | None
    timeline: Timeline
    state: str

    @cached_property
    def loss(self) -> list[Point]:
        """The training loss."""
        return _points(self.train, "loss")

    @cached_property
    def learning_rate(self) -> list[Point]:
        """The first parameter group's."""
        return _points(self.train, "lr")

    @cached_property
    def throughput(self) -> list[Point]:
        """Samples a second."""
        return _points(self.train, "samples_per_s")

    @cached_property
    def memory(self) -> list[Point]:
        """MiB of the rank that takes the most."""
        found = []
        for record in self.train:
            ranks = record.get("ranks")
            taken = [_finite(rank.get("memory_mib")) for rank in ranks] if isinstance(ranks, list) else []
            step = record.get("step")
            if isinstance(step, int) and (known := [mib for mib in taken if mib is not None]):
                found.append(Point(step, max(known)))
        return found

    def metric(self, split: str, name: str) -> list[Point]:
        """A metric of a split, over the run."""
        inside = [
            {"step": record.get("step"), "value": record["metrics"].get(name)}
            for record in self.evaluations
            if record.get("split") == split and isinstance(record.get("metrics"), Mapping)
        ]
        return _points(inside, "value")

    @property
    def fields(self) -> Mapping[str, Any]:
        """The task's."""
        return dict(self.manifest["task"]["fields"])

    @property
    def settings(self) -> dict[str, Any]:
        """What decides what the run computes, and how it was run: the task, its fields and all options."""
        options = {n: v for n, v in self.manifest["config"].items() if n not in _ELSEWHERE}
        return {"task": self.manifest["task"]["spec"], **self.fields, **options}

    @property
    def phases_s(self) -> dict[str, float]:
        """Seconds by phase, of the last start."""
        found = (self.result or {}).get("phases_s")
        if not isinstance(found, Mapping):
            return {}
        return {str(name): s for name, value in found.items() if (s := _finite(value)) is not None}

    @property
    def recorded_metrics(self) -> dict[str, dict[str, float | None]]:
        """What ``result.json`` says: split -> name -> value."""
        found = (self.result or {}).get("metrics")
        if not isinstance(found, Mapping):
            return {}
        return {
            str(split): {str(name): _finite(value) for name, value in metrics.items()}
            for split, metrics in found.items()
            if isinstance(metrics, Mapping)
        }

    @property
    def command(self) -> str | None:
        """The command that trains the same model again; None where the options cannot be read any more."""
        try:
            config = config_from_mapping(self.manifest["config"], "run.toml")
        except UserError:
            return None
        words = ["paceline", "train", str(self.manifest["task"]["spec"])]
        for name, value in self.fields.items():
            words += ["--set", f"{name}={value}"]
        for name, value in non_defaults(config).items():
            if name in _ELSEWHERE:
                continue
            if isinstance(value, bool):
                words.append(flag(name))
                continue
            for each in value if isinstance(value, tuple) else (value,):
                words += [flag(name), str(each)]
        return shlex.join(words)


def read_record(directory: RunDirectory) -> Record:
    """Read a run's directory; what is not there is empty.

    Raises:
        RunDirectoryError: it is no run's, or its files are damaged.
    """
    manifest = directory.read_complete_manifest()
    events = directory.read_events()
    records = read_json_lines(directory.metrics)
    result = directory.read_result()
    try:
        until = directory.metrics.stat().st_mtime if directory.metrics.exists() else None
        read = timeline(events, until=until)
    except (KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(
            f"{directory.events} is damaged: {error!r}. Restore it from a copy, or remove it."
        ) from error
    return Record(
        name=directory.path.resolve().name,
        path=directory.path,
        manifest=manifest,
        train=tuple(r for r in records if r.get("kind") == "train"),
        evaluations=tuple(r for r in records if r.get("kind") == "eval"),
        result=result,
        timeline=read,
        state=_state(directory, result, read),
    )


def _state(directory: RunDirectory, result: Mapping[str, Any] | None, read: Timeline) -> str:
    if result is not None:
        return "finished"
    if directory.is_running():
        return "running"
    last = read.entries[-1].event if read.entries else ""
    return last if last in ("stopped", "failed") else "not finished"


def _points(records: Any, name: str) -> list[Point]:
    return [
        Point(record["step"], value)
        for record in records
        if isinstance(record.get("step"), int) and (value := _finite(record.get(name))) is not None
    ]


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
