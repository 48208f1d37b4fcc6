"""What a group of processes is asked to train, one run after another. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.distributed.process import Failure, read_failure
from paceline.run_directory import RunDirectory


@dataclass(frozen=True, kw_only=True)
class Training:
    """One run of the task.

    Attributes:
        name: of its directory.
        world_size: processes.
        options: of ``paceline train``.
        double: train in float64, and keep the tensors.
        reference: the name of the training whose tensors this one is compared with.
        forward_step: the step of which every module's forward is noted.
        noted: whether its steps are noted.
        simulation: ``module:function`` that computes the weights instead, in one process.
    """

    name: str
    world_size: int
    options: Mapping[str, Any]
    double: bool = False
    reference: str | None = None
    forward_step: int | None = None
    simulation: str | None = None
    noted: bool = True


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one group of processes does.

    Attributes:
        task: as ``paceline train`` takes it.
        set: the task's fields.
        root: where each run has its directory.
        least_shards: S, where neither options nor task ask for more.
        trainings: one after another.
        lint: look at the task's arithmetic first.
    """

    task: str
    set: tuple[str, ...]
    root: str
    least_shards: int
    trainings: tuple[Training, ...] = field(default=())
    lint: bool = False

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """What :meth:`write` wrote."""
        document = json.loads(path.read_text(encoding="utf-8"))
        trainings = tuple(Training(**training) for training in document.pop("trainings"))
        return cls(**{**document, "set": tuple(document["set"]), "trainings": trainings})


def directory_of(root: Path, training: Training) -> RunDirectory:
    """A training's run directory."""
    return RunDirectory(root / training.name / "run")


def trace_path(root: Path, training: Training, rank: int) -> Path:
    """A rank's steps."""
    return root / training.name / f"trace-{rank}.jsonl"


def forward_path(root: Path, training: Training, rank: int) -> Path:
    """A rank's forwards of the step that is looked into."""
    return root / training.name / f"forward-{rank}.jsonl"


def tensors_path(root: Path, name: str) -> Path:
    """The tensors of the training of that name."""
    return root / name / "tensors"


def outcome_path(root: Path, training: Training) -> Path:
    """The training's ``result.json``, or what was simulated."""
    return root / training.name / "outcome.json"


def done_path(root: Path, training: Training, rank: int) -> Path:
    """What a rank leaves when it is through with a training."""
    return root / training.name / f"done-{rank}"


def lints_path(root: Path) -> Path:
    """What the look at the task's arithmetic found."""
    return root / "lints.json"


def is_done(root: Path, training: Training) -> bool:
    """Whether all ranks are through with it, for good or ill."""
    return all(done_path(root, training, rank).exists() for rank in range(training.world_size))


def failure(root: Path, training: Training) -> Failure | None:
    """The failure that brought a training down; None where there was none."""
    directory = directory_of(root, training)
    found = [read_failure(directory.error_of(rank)) for rank in range(training.world_size)]
    return min((f for f in found if f is not None), key=lambda f: (f.victim, f.time, f.rank), default=None)
