"""Python functions as jobs: ``paceline.submit(add, 5, 7)``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, LaunchError
from paceline.launch.launcher import LaunchSpec, job_name
from paceline.launch.submit import JobRecord, job_directory, record_id, remember, room_for_record
from paceline.launch.submitit import (
    SubmititJob,
    SubmititOptions,
    executor_arguments,
    executor_parameters,
    require_submitit,
    submission_error,
)
from paceline.launch.submitit_running import callable_for, check_private, make_private


class FunctionJob(SubmititJob):
    """A submitted function; :meth:`result` returns its result.

    Args:
        reference: see :class:`SubmititJob`.
        job: submitit's own.
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


def submit_functions(
    function: Callable[..., Any],
    calls: Iterable[tuple[tuple[Any, ...], Mapping[str, Any]]],
    *,
    options: SubmititOptions,
    folder: str | Path | None = None,
    name: str | None = None,
    nodes: int = 1,
    nproc: int = 1,
    cpus_per_task: int | None = None,
    gpus_per_node: int | None = None,
    walltime_s: float | None = None,
    python: str = sys.executable,
) -> list[FunctionJob]:
    """Submit one job for each call; on Slurm several are one array.

    Args:
        function: the function to call.
        calls: arguments and keyword arguments.
        options: the launcher's.
        folder: where submitit keeps its files; default: a new one in ``jobs/``.
        name: the job's; default: the function's.
        nodes: machines.
        nproc: tasks of each machine; each calls the function.
        cpus_per_task: of each.
        gpus_per_node: to ask for.
        walltime_s: how long a job may take.
        python: the interpreter on the machines.

    Raises:
        ConfigError: an option is wrong, the folder is not private, or the jobs cannot be recorded; none is
            left.
        LaunchError: submitit or Slurm refused.
    """
    for option, value in (("nodes", nodes), ("nproc", nproc)):
        if value < 1:
            raise ConfigError(f"{option} must be at least 1, but is {value}.")
    require_submitit()
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    name = name or job_name(getattr(function, "__name__", type(function).__name__))
    parameters = executor_parameters(
        options,
        name=name,
        nodes=nodes,
        tasks_per_node=nproc,
        cpus_per_task=cpus_per_task,
        gpus_per_node=gpus_per_node,
        walltime_s=walltime_s,
        signal_name=submitit.JobEnvironment.USR_SIG,
    )
    wrapped = callable_for(function)
    chosen = Path(folder) if folder is not None else job_directory(name, attached=False)
    spec = LaunchSpec(
        command=(name,),
        name=name,
        directory=chosen.absolute(),
        nodes=(nodes, nodes),
        nproc=(nproc,),
        cpus_per_task=cpus_per_task,
        gpus_per_node=gpus_per_node,
        walltime_s=walltime_s,
    )
    fresh = not chosen.exists()
    private = make_private(chosen)
    try:
        with room_for_record():
            executor = submitit.AutoExecutor(private, **executor_arguments(options, python))
            executor.update_parameters(**parameters)
            with executor.batch():
                jobs = [executor.submit(wrapped, *args, **kwargs) for args, kwargs in calls]
    except ConfigError:
        _clear(private, fresh=fresh)
        raise
    except (FailedJobError, FailedSubmissionError, RuntimeError, OSError) as error:
        _clear(private, fresh=fresh)
        raise submission_error(str(error), spec, options) from error
    except TypeError as error:
        _clear(private, fresh=fresh)
        raise ConfigError(f"{name} or its arguments cannot be sent to another process: {error}.") from error
    handles = [_handle(job, options, private, nodes * nproc) for job in jobs]
    for handle in handles:
        try:
            remember(_record(handle, private, name), handle)
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


def _handle(job: Any, options: SubmititOptions, folder: Path, tasks: int) -> FunctionJob:
    plain = SubmititJob.submitted(job.job_id, options.executor, folder, tasks=tasks, is_command=False)
    return FunctionJob(plain.reference, job)


def _record(handle: FunctionJob, folder: Path, name: str) -> JobRecord:
    return JobRecord(
        id=record_id("submitit", handle.reference),
        launcher="submitit",
        name=name,
        command=(name,),
        directory=str(folder),
        reference=handle.reference,
    )


def _clear(folder: Path, *, fresh: bool) -> None:
    """Leave nothing of a job that was not submitted."""
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
