"""What a script imports: ``paceline.fit``."""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import config_from_mapping
from paceline.distributed.environment import Environment, detect_environment
from paceline.errors import ConfigError, LaunchError, StopRequested, TaskError
from paceline.job import Job
from paceline.launchers.job import launch, require_recovery
from paceline.task import RECIPES, Task, task_fields
from paceline.worker import run


@dataclass(frozen=True)
class Result:
    """How a run ended; the attributes are entries of its ``result.json``.

    Attributes:
        run: the run's directory.
        metrics: split -> name -> value.
        steps: optimizer steps, over all restarts.
        epochs: whole passes over the data.
        samples: samples seen.
        model_sha256: of the last step's model; equal for equal bits.
        world_size: processes at the end.
        shards: S.
        restarts: how often the run was started again.
        recoveries: how often its processes went on together after one was lost (``recover="inplace"``).
        seconds: how long the last process trained.
        record: the whole ``result.json``.
    """

    run: Path
    metrics: Mapping[str, Mapping[str, float]]
    steps: int
    epochs: int
    samples: int
    model_sha256: str
    world_size: int
    shards: int
    restarts: int
    recoveries: int
    seconds: float
    record: Mapping[str, Any]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Result:
        """Take a ``result.json``'s content."""
        names = [name for name in cls.__dataclass_fields__ if name not in ("run", "record")]
        values = {name: record[name] for name in names}
        # JSON has no NaN, so the record says null.
        values["metrics"] = {
            split: {name: math.nan if value is None else value for name, value in of_split.items()}
            for split, of_split in record["metrics"].items()
        }
        return cls(run=Path(record["run"]), record=record, **values)

    def __str__(self) -> str:
        shown = ", ".join(
            f"{split} {name} {value:.4g}"
            for split, values in self.metrics.items()
            for name, value in values.items()
        )
        return f"{self.run}: {self.steps} steps, {self.samples} samples{', ' + shown if shown else ''}"


def fit(
    task: Task,
    *,
    quiet: bool = False,
    rank: int | None = None,
    world_size: int | None = None,
    init_url: str | None = None,
    **options: Any,
) -> Result:
    """Train ``task``, and return the result.

    Under ``torchrun``, ``mpirun``, ``srun`` or another launcher each process calls this alike and
    becomes one rank. In a plain process, ``nproc=2`` starts two processes, which import the task's
    file again: keep ``fit`` under ``if __name__ == "__main__":``.

    Args:
        task: what to train.
        quiet: show nothing on the terminal.
        rank: this process's rank, where the caller knows it; with ``world_size`` and ``init_url``.
        world_size: the number of processes.
        init_url: where they meet, ``tcp://HOST:PORT``.
        options: those of ``paceline train``, such as ``epochs=3, nproc=2, run="runs/a"``.

    Raises:
        UserError: an option, the task or the data cannot work.
        StopRequested: a signal asked for a stop; the state is saved, and the same call continues.
        LaunchError: a started process failed.
        PacelineError: the training failed.
    """
    if "set" in options:
        raise ConfigError(
            "fit(): set is for the command line. Give hyperparameters to the task: Task(lr=0.1)."
        )
    config = config_from_mapping({**options, "task": task_spec(task)}, "fit()")
    job = Job(config=config, given=frozenset(options), quiet=quiet)
    environment = detect_environment(
        rank=rank, world_size=world_size, init_url=init_url, rdzv_endpoint=config.rdzv_endpoint
    )
    if is_rank(environment):
        require_recovery(config, environment)
    if is_rank(environment) or (
        config.nproc in (1, "1")
        and config.nodes in (1, "1")
        and config.on in ("auto", "inprocess")
        and config.recover in ("auto", "none")
    ):
        return Result.of(run(job, environment, task))
    code, directory = launch(dataclasses.replace(job, fields=task_fields(task)))
    if code in (75, 130):
        raise StopRequested(f"stopped, as asked; everything is saved in {directory.path}", exit_code=code)
    record = directory.read_result()
    if code != 0 or record is None:
        raise LaunchError(
            f"the run in {directory.path} failed; the message above says why.", exit_code=code or 1
        )
    return Result.of(record)


def is_rank(environment: Environment) -> bool:
    """Whether some launcher has made this process one of several ranks."""
    return environment.source != "single"


def task_spec(task: Task) -> str:
    """The name by which other processes find the task's class.

    Raises:
        TaskError: the class cannot be found again by name.
    """
    kind = type(task)
    if kind.__qualname__ != kind.__name__:
        raise TaskError(
            f"the task class {kind.__qualname__} is defined inside something; "
            "move it to the top level of its file."
        )
    here = f"{kind.__module__}:{kind.__name__}"
    for name, recipe in RECIPES.items():
        if recipe == here:
            return name
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    if kind.__module__ == "__main__" or kind.__module__.startswith("paceline_task_"):
        if file is None:
            # A notebook or `python -c`: good for this process, and nobody else can find it.
            return f"__main__:{kind.__name__}"
        return f"{_shown(Path(inspect.getfile(kind)))}:{kind.__name__}"
    return here


def _shown(path: Path) -> str:
    path = path.resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
