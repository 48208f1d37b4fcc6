"""Python functions and tasks as jobs: ``paceline.submit(add, 5, 7)``."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from paceline.api import Result, task_spec
from paceline.core.config import config_from_mapping
from paceline.core.errors import ConfigError, LaunchError, TaskError
from paceline.core.options import parse_walltime_s
from paceline.core.task import Task
from paceline.core.task_loading import check_spec, convert, is_same, parse_assignments, task_fields
from paceline.launch.job_records import JobRecord, record_id, room_for_record
from paceline.launch.launcher import JobHandle, JobStatus, LaunchSpec, get_launcher, make_options, option_names
from paceline.launch.submit import finish, job_directory, job_name, remember, task_job
from paceline.launch.submit import submit as submit_job
from paceline.runs.directory import RunDirectory
from paceline_frameworks.submitit import (
    SubmititJob,
    executor_arguments,
    executor_parameters,
    require_submitit,
    submission_error,
)
from paceline_frameworks.submitit_running import callable_for, check_private, make_private

if TYPE_CHECKING:
    from paceline_frameworks.submit_options import FunctionJobOptions, TaskJobOptions
    from paceline_frameworks.submitit import Executor


class FunctionJob(SubmititJob):
    """A submitted function; :meth:`result` returns its result.

    Args:
        reference: see :class:`SubmititJob`.
    """

    def __init__(self, reference: Mapping[str, Any], job: Any) -> None:
        super().__init__(reference)
        self._job = job

    def result(self) -> Any:
        """Wait for the function, and return what it returned.

        Raises:
            ConfigError: the job has several tasks, so several results.
            LaunchError: the function raised, or was ended; the message has its traceback.
        """
        if self._tasks > 1:
            raise ConfigError(f"job {self.id} has {self._tasks} tasks: ask for its results().")
        return self.results()[0]

    def results(self) -> list[Any]:
        """Wait for all tasks, and return what each returned, by rank.

        Raises:
            LaunchError: one raised, or was ended; the message has its traceback.
        """
        from submitit.core.utils import UncompletedJobError

        self.wait()
        check_private(self._folder)
        try:
            results: list[Any] = self._job.results()
        except UncompletedJobError as error:
            raise LaunchError(f"job {self.id} failed: {error}") from error
        return results

    def wait(self) -> int:
        """Wait for all tasks; return 0, or the first code that is not 0."""
        code = super().wait()
        if self._reference["executor"] == "local":
            self._job.wait()  # its controller's end
        return code

    def stdout(self) -> str:
        """Return the function's output."""
        return str(self._job.stdout() or "")

    def stderr(self) -> str:
        """Return the function's error output."""
        return str(self._job.stderr() or "")

    def __repr__(self) -> str:
        return f"FunctionJob(id={self.id!r}, tasks={self._tasks}, folder={str(self._folder)!r})"


_FUNCTION_OPTIONS = ("name", "nodes", "nproc", "cpus_per_task", "gpus_per_node", "walltime")


def _submit_functions(
    function: Callable[..., Any],
    calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
    on: str,
    folder: str | Path | None,
    given: Mapping[str, Any],
) -> list[FunctionJob]:
    """Submit one job for each call, of arguments and keyword arguments; on Slurm several are one array."""
    own = {key: value for key, value in given.items() if key not in _FUNCTION_OPTIONS}
    options = make_options(get_launcher("submitit"), {"executor": on, **own})
    nodes, nproc = given.get("nodes", 1), given.get("nproc", 1)
    walltime = given.get("walltime")
    walltime_s = None if walltime is None else parse_walltime_s(walltime)
    for option, value in (("nodes", nodes), ("nproc", nproc)):
        if value < 1:
            raise ConfigError(f"{option} must be at least 1, but is {value}.")
    require_submitit()
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    name = given.get("name") or job_name(getattr(function, "__name__", type(function).__name__))
    wrapped = callable_for(function)
    chosen = Path(folder) if folder is not None else job_directory(name, attached=False)
    spec = LaunchSpec(
        command=(name,),
        name=name,
        directory=chosen.absolute(),
        nodes=(nodes, nodes),
        nproc=(nproc,),
        cpus_per_task=given.get("cpus_per_task"),
        gpus_per_node=given.get("gpus_per_node"),
        walltime_s=walltime_s,
    )
    parameters = executor_parameters(
        spec,
        options,
        tasks_per_node=nproc,
        cpus_per_task=spec.cpus_per_task,
        signal_name=submitit.JobEnvironment.USR_SIG,
    )
    fresh = not chosen.exists()
    private = make_private(chosen)
    try:
        with room_for_record():
            executor = submitit.AutoExecutor(private, **executor_arguments(options, sys.executable))
            executor.update_parameters(**parameters)
            with executor.batch():
                jobs = [executor.submit(wrapped, *args, **kwargs) for args, kwargs in calls]
    except (ConfigError, FailedJobError, FailedSubmissionError, RuntimeError, OSError, TypeError) as error:
        if fresh:
            shutil.rmtree(private, ignore_errors=True)
        if isinstance(error, ConfigError):
            raise
        if isinstance(error, TypeError):
            raise ConfigError(f"{name} or its arguments cannot be sent to another process: {error}.") from error
        raise submission_error(str(error), spec, options) from error
    handles: list[FunctionJob] = []
    for job in jobs:
        plain = SubmititJob.submitted(job.job_id, options.executor, private, tasks=nodes * nproc, is_command=False)
        handles.append(FunctionJob(plain.reference, job))
    for handle in handles:
        record = JobRecord(
            id=record_id("submitit", handle.reference),
            launcher="submitit",
            name=name,
            command=(name,),
            directory=str(private),
            reference=handle.reference,
        )
        try:
            remember(record, handle)
        except (ConfigError, LaunchError):
            _end(handles, cancelled=handle)
            raise
    return handles


def _end(handles: Sequence[FunctionJob], *, cancelled: FunctionJob) -> None:
    """Cancel all jobs but the one that is already; those of this machine have ended then."""
    for handle in handles:
        with suppress(LaunchError):
            if handle is not cancelled:
                handle.cancel()
    for handle in handles:
        if handle.reference["executor"] == "local":
            handle.wait()


# --- ``paceline.submit`` and ``paceline.submit_array`` ---


class TaskJob:
    """A task that was submitted; its result is that of the run."""

    def __init__(self, record: JobRecord, handle: JobHandle) -> None:
        self._record = record
        self._handle = handle

    @property
    def id(self) -> str:
        """The system's number of the job."""
        return str(self._handle.reference["id"])

    @property
    def run(self) -> Path:
        """The run's directory."""
        assert self._record.run is not None
        return Path(self._record.run)

    def result(self) -> Result:
        """Wait for the end of the training; over all restarts of the job.

        Raises:
            LaunchError: it failed.
        """
        code = finish(self._record, self._handle)
        record = RunDirectory(self.run).read_result()
        if code != 0 or record is None:
            raise LaunchError(
                f"job {self.id}, which trains in {self.run}, ended with exit code {code}. What it printed: "
                f"paceline logs {self._record.id}",
                exit_code=code or 1,
            )
        return Result.of(record)

    def status(self) -> JobStatus:
        """Return the job's status."""
        return self._handle.status()

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Yield the job's output, line by line; with ``follow`` until it ends."""
        return self._handle.logs(follow=follow)

    def cancel(self) -> None:
        """Cancel the job, which saves its state first."""
        self._handle.cancel()

    def __repr__(self) -> str:
        return f"TaskJob(id={self.id!r}, run={str(self.run)!r})"


@overload
def submit(work: Task, *, on: Executor = "slurm", **options: Unpack[TaskJobOptions]) -> TaskJob: ...
@overload
def submit(
    work: Callable[..., Any],
    *args: Any,
    on: Executor = "slurm",
    kwargs: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    **options: Unpack[FunctionJobOptions],
) -> FunctionJob: ...
def submit(
    work: Task | Callable[..., Any],
    *args: Any,
    on: Executor = "slurm",
    kwargs: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    **options: Any,
) -> TaskJob | FunctionJob:
    """Submit a function or a task as a job, by submitit, and return at once.

    ``submit(add, 5, 7).result()`` is 12. With ``nproc=3`` three processes call the function, each with
    torch's variables for its rank, and ``results()`` lists what they returned. Where the system stops a job
    early, it is queued again: a task then continues exactly; a callable with a method ``checkpoint`` is
    asked for the callable to continue with, any other function begins again.

    Args:
        work: a function, any callable, or a task.
        on: "slurm", or "local" for processes of this machine.
        folder: the directory of a function's files, private to this user; default: a new one in ``jobs/``. A task's
            job is kept in its run.
        options: the job's: ``nodes``, ``nproc``, ``cpus_per_task``, ``gpus_per_node``, ``walltime="2h"``,
            ``name``, Slurm's such as ``partition``, and a task's run options as for :func:`fit`.

    Raises:
        ConfigError: an option is unknown or wrong, or the folder is open to others.
        TaskError: a field of the task cannot be given to a job.
        LaunchError: the job was refused.
    """
    if isinstance(work, Task):
        if args or kwargs or folder is not None:
            raise ConfigError("submit(): a task takes no arguments and no folder; its fields are its arguments.")
        return _submit_task(work, on, options)
    [job] = _submit_functions(work, [(args, kwargs or {})], on, folder, options)
    return job


def submit_array(
    function: Callable[..., Any],
    *iterables: Iterable[Any],
    on: Executor = "slurm",
    folder: str | Path | None = None,
    **options: Unpack[FunctionJobOptions],
) -> list[FunctionJob]:
    """Submit a job for each element, as ``map(function, *iterables)`` would call; on Slurm as one array.

    Args:
        iterables: its arguments, all of one length.
        on: as for :func:`submit`.
        folder: as for :func:`submit`.
        options: as for :func:`submit`; each job gets them.

    Raises:
        ConfigError: an option is unknown or wrong, or there is nothing to submit.
        LaunchError: the jobs were refused.
    """
    try:
        calls: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = [
            (arguments, {}) for arguments in zip(*iterables, strict=True)
        ]
    except ValueError as error:
        raise ConfigError(f"submit_array(): the arguments differ in length: {error}.") from None
    if not calls:
        raise ConfigError("submit_array(): there are no arguments, so there is nothing to submit.")
    return _submit_functions(function, calls, on, folder, options)


def _submit_task(task: Task, on: str, options: Mapping[str, Any]) -> TaskJob:
    launcher = get_launcher("submitit")
    of_launcher = {name: options[name] for name in option_names("submitit") if name in options}
    of_job = {
        name: options[name]
        for name in ("name", "cpus_per_task", "gpus_per_node", "rank_launcher", "env")
        if name in options
    }
    of_run = {name: value for name, value in options.items() if name not in {**of_launcher, **of_job}}
    config = config_from_mapping(
        {**of_run, "task": task_spec(task), "set": task_assignments(task), "on": "submitit"}, "submit()"
    )
    check_spec(config.processes.task)
    counts = config.processes.nproc
    if counts is None:
        raise ConfigError("submit(): give nproc, the number of processes a machine.")
    fields = {**of_job, "nodes": config.processes.nodes, "nproc": counts}
    spec = task_job(config, fields, launcher, sys.executable)
    own = make_options(launcher, {"executor": on, **of_launcher})
    return TaskJob(*submit_job(launcher, launcher.render(spec, own)))


def task_assignments(task: Task) -> tuple[str, ...]:
    """Return the fields that differ from their defaults, in the form of ``--set``."""
    hints = typing.get_type_hints(type(task))
    defaults = {f.name: f.default for f in dataclasses.fields(task)}
    assignments = []
    for name, value in task_fields(task).items():
        given = getattr(task, name)
        if is_same(given, defaults[name]):
            continue
        where = f"{type(task).__name__}.{name}"
        text = parse_assignments([f"{name}={value}"])[name]
        read = convert(text, hints[name], where)
        if not is_same(read, given):
            raise TaskError(
                f"{where} is {given!r}, which --set would read as {read!r}. "
                "Choose text that is not a number, true, false or none, and has no leading or trailing blanks."
            )
        assignments.append(f"{name}={value}")
    return tuple(assignments)
