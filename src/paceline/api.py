"""The Python interface for scripts: ``paceline.fit``."""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from paceline.core.built_in import PARTS
from paceline.core.config import config_from_mapping
from paceline.core.environment import Environment, detect_environment
from paceline.core.errors import ConfigError, LaunchError, StopRequested, TaskError
from paceline.core.job import WorkerConfig, default_run_path
from paceline.core.plugins import import_object
from paceline.core.standard_streams import open_closed_streams
from paceline.core.task import Task
from paceline.core.task_loading import (
    BUILT_IN_TASKS,
    build_task,
    refuse_call_at_import,
    task_fields,
)
from paceline.launch.local_run import launch, own_environment, require_recovery
from paceline.training.worker import run

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.core.run_options import RunOptions


@dataclass(frozen=True)
class Result:
    """How a run ended; the attributes are entries of its ``result.json``.

    Attributes:
        run: the run's directory.
        metrics: split -> name -> value.
        steps: optimizer steps, over all restarts.
        epochs: whole passes over the data.
        model_sha256: of the last step's model; equal for equal bits.
        world_size: processes at the end.
        microbatches: S.
        recoveries: number of times that its processes continued together after losing one (``recover="inplace"``).
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
    microbatches: int
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

    def model(
        self, which: Literal["best", "last"] | int | None = None, *, device: str | torch.device = "cpu"
    ) -> nn.Module:
        """Return the trained model; the arguments are those of :func:`paceline.load`."""
        return load(self.run, which, device=device)

    def __str__(self) -> str:
        shown = ", ".join(
            f"{split} {name} {value:.4g}" for split, values in self.metrics.items() for name, value in values.items()
        )
        return f"{self.run}: {self.steps} steps, {self.samples} samples{', ' + shown if shown else ''}"


def load(
    run: str | Path,
    which: Literal["best", "last"] | int | None = None,
    *,
    model: nn.Module | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """Return the model of a run, with the weights of one of its checkpoints, in evaluation mode.

    Any strategy's checkpoints are those of one process. With ``--ema`` it is the moving average; adapters of ``--lora``
    are merged.

    Args:
        run: the run's directory, or its address in an object store, such as ``s3://bucket/run1``.
        which: the best model, the last one, or that of a checkpoint after so many steps. By default the best, or the
            last without validation.
        model: is filled, where a script of its own built it; else the run's task builds it.
        device: where the model goes.

    Raises:
        UserError: the directory holds no run, or its task cannot be built.
        CheckpointError: there is no such checkpoint, it is damaged, or does not fit the model as it is now.
    """
    from paceline.runs.backup import open_run
    from paceline.training.loaded_model import load_model

    wanted = None if which is None else str(which)
    with open_run(run, wanted) as directory:
        return load_model(directory, wanted, model=model, device=device)


class _Stopped(StopRequested, SystemExit):
    """A stop that ends a script as it ends ``paceline train``: with the code that schedulers wait for."""

    def __init__(self, stop: StopRequested) -> None:
        super().__init__(str(stop), stop.exit_code)
        self.code = stop.exit_code


_Stopped.__name__ = StopRequested.__name__  # the documented one, in logs and tracebacks
_Stopped.__qualname__ = _Stopped.__name__


@contextmanager
def ends_script() -> Iterator[None]:
    """Let a stop end a script that does not catch it."""
    try:
        yield
    except StopRequested as stop:
        raise _Stopped(stop) from None


@ends_script()
def fit(
    task: Task,
    *,
    quiet: bool = False,
    rank: int | None = None,
    world_size: int | None = None,
    init_url: str | None = None,
    **options: Unpack[RunOptions],
) -> Result:
    """Train ``task``, and return the result.

    Under ``torchrun``, ``mpirun``, ``srun`` or another launcher each process calls this alike and
    becomes one rank. In a plain process, ``nproc=2`` starts two processes, which import the task's
    file again: keep ``fit`` under ``if __name__ == "__main__":``.

    Args:
        quiet: show nothing on the terminal.
        rank: this process's rank, where the caller knows it; with ``world_size`` and ``init_url``.
        world_size: the number of processes.
        init_url: where they meet, ``tcp://HOST:PORT``.
        options: those of ``paceline train``, such as ``epochs=3, nproc=2, run_dir="runs/a"``.

    Raises:
        UserError: an option, the task or the data cannot work.
        StopRequested: a signal asked for a stop; the state is saved, and the same call continues. A script that does
            not catch it exits with its code, 75 or 130.
        LaunchError: a started process failed.
        PacelineError: the training failed.
    """
    if "set" in options:
        raise ConfigError("fit(): set is for the command line. Give hyperparameters to the task: Task(lr=0.1).")
    refuse_call_at_import("fit()")
    open_closed_streams()
    config = config_from_mapping({**options, "task": task_spec(task)}, "fit()")
    worker_config = WorkerConfig(config=config, explicit_options=frozenset(options), quiet=quiet)
    environment = detect_environment(
        rank=rank, world_size=world_size, init_url=init_url, rdzv_endpoint=config.processes.rdzv_endpoint
    )
    environment = own_environment(config, options, environment)
    if is_rank(environment):
        require_recovery(config, environment)
    if is_rank(environment) or (
        config.processes.nproc == (1,)
        and config.processes.nodes == (1, 1)
        and config.processes.on in ("auto", "inprocess")
        and config.recovery.recover in ("auto", "none")
    ):
        try:
            return Result.of(run(worker_config, environment, task))
        except StopRequested as stop:
            if environment.rank == 0 and not quiet:
                print(f"paceline: {stop}", file=sys.stderr)
            raise
    fields = task_fields(task)
    require_rebuildable(type(task), fields)
    if (spec := config.processes.task).startswith("__main__:"):
        run_dir = config.records.run_dir or default_run_path(spec)
        file = import_object(PARTS["notebooks"])(type(task), Path(run_dir))
        config = config.replace(task=f"{file}:{type(task).__name__}", run_dir=run_dir)
    code, directory = launch(dataclasses.replace(worker_config, config=config, fields=fields))
    if code in (75, 130):
        raise StopRequested(f"stopped, as asked; everything is saved in {directory.path}", exit_code=code)
    record = directory.read_result()
    if code != 0 or record is None:
        raise LaunchError(f"the run in {directory.path} failed; the message above says why.", exit_code=code or 1)
    return Result.of(record)


def require_rebuildable(kind: type[Task], fields: Mapping[str, Any]) -> None:
    """Reject a task that other processes cannot build again from the values of its fields.

    Raises:
        TaskError: one of its fields then has another value.
    """
    again = task_fields(build_task(kind, fields))
    changed = [name for name, value in fields.items() if again[name] != value]
    if changed:
        raise TaskError(
            f"{kind.__name__}.{changed[0]} is {fields[changed[0]]!r}, but a task that is built with this value has "
            f"{again[changed[0]]!r}: __post_init__ changes it, and each process builds the task again. Keep the "
            "computed value in an attribute that is not a field."
        )


def is_rank(environment: Environment) -> bool:
    """Return whether a launcher has made this process one of several ranks."""
    return environment.source != "single"


def task_spec(task: Task) -> str:
    """Return the name by which other processes find the task's class.

    Raises:
        TaskError: the class cannot be found again by name.
    """
    kind = type(task)
    if kind.__qualname__ != kind.__name__:
        raise TaskError(
            f"the task class {kind.__qualname__} is defined inside something; move it to the top level of its file."
        )
    here = f"{kind.__module__}:{kind.__name__}"
    for name, recipe in BUILT_IN_TASKS.items():
        if recipe == here:
            return name
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    if kind.__module__ == "__main__" or kind.__module__.startswith("paceline_task_"):
        if file is None:
            # A notebook or `python -c`: only this process can import it.
            return f"__main__:{kind.__name__}"
        started_as = getattr(module, "__spec__", None)
        if started_as is not None and started_as.parent and kind.__module__ == "__main__":
            # `python -m package.module`: its relative imports work by that name only.
            return f"{started_as.name}:{kind.__name__}"
        return f"{_shown(Path(inspect.getfile(kind)))}:{kind.__name__}"
    return here


def _shown(path: Path) -> str:
    path = path.resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
