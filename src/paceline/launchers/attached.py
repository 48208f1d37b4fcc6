"""Jobs that end with the command that started them: mpirun, ssh, processes here."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from paceline.launchers.base import JobHandle, JobStatus, Launcher, Rendered
from paceline.launchers.local.base import LocalJob, LocalSpec, RenderedProcess, RenderedProcesses
from paceline.launchers.local.failures import STOPPED
from paceline.launchers.local.supervision import Starter, SupervisedJob
from paceline.launchers.log_files import follow_files
from paceline.run_directory import write_atomically

EXIT_CODE = "exit-code"
"""A file in a job's directory: written when the job has ended."""

OUTPUT = "output.log"
"""A file in a job's directory: what a detached job prints."""

_POLL_S = 0.2


class AttachedLauncher(Launcher):
    """Starts its job here, under this process's supervision."""

    attached = True

    def reopen(self, reference: Mapping[str, Any]) -> JobHandle:
        """Find the process that started the job."""
        return DetachedJob(reference)


def start_commands(rendered: Rendered, starter: Starter) -> LocalJob:
    """Start a rendered job's commands, under one supervision.

    Args:
        rendered: the job.
        starter: what the commands are.

    Raises:
        LaunchError: one could not be started; none is left.
    """
    processes = tuple(
        RenderedProcess(title=command.title, argv=command.argv, env=command.env)
        for command in rendered.commands
    )
    local = LocalSpec(command=processes[0].argv, python="")
    return SupervisedJob(RenderedProcesses(spec=local, processes=processes), starter=starter)


class AttachedJob(JobHandle):
    """A job that this process supervises."""

    def __init__(self, job: LocalJob, directory: Path) -> None:
        self._job = job
        self._directory = directory
        self._code: int | None = None

    @property
    def reference(self) -> dict[str, Any]:
        """This process, which the job ends with."""
        started = psutil.Process().create_time()
        return {
            "id": str(os.getpid()),
            "pid": os.getpid(),
            "created": started,
            "directory": str(self._directory),
        }

    def status(self) -> JobStatus:
        """Running, until :meth:`wait` has returned."""
        return ended_status(self._code) if self._code is not None else JobStatus(state="running")

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Nothing: the job prints where this process does."""
        return iter(())

    def cancel(self) -> None:
        """Ask the processes to stop, then kill them."""
        self._job.cancel()

    def wait(self) -> int:
        """Supervise the job to its end."""
        return self.ended_with(self._job.wait())

    def ended_with(self, code: int) -> int:
        """Keep the exit code for others who ask."""
        self._code = code
        with suppress(OSError):
            write_atomically(self._directory / EXIT_CODE, f"{self._code}\n".encode())
        return self._code


class DetachedJob(JobHandle):
    """A job that another process supervises."""

    def __init__(self, reference: Mapping[str, Any]) -> None:
        self._reference = dict(reference)
        self._directory = Path(reference["directory"])

    @property
    def reference(self) -> dict[str, Any]:
        """As it was recorded."""
        return self._reference

    def status(self) -> JobStatus:
        """Running while its process does; then what it has left."""
        if recorded_process(self._reference) is not None:
            return JobStatus(state="running", detail=f"process {self._reference['pid']}")
        try:
            return ended_status(int((self._directory / EXIT_CODE).read_text()))
        except (OSError, ValueError):
            return JobStatus(state="failed", detail="its process is gone, and left no exit code")

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """What it printed, where it was detached."""
        ended = (lambda: self.status().ended) if follow else None
        yield from follow_files([self._directory / OUTPUT], ended=ended)

    def cancel(self) -> None:
        """Ask its process to stop; it ends all that it has started."""
        process = recorded_process(self._reference)
        if process is not None:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Wait for the process to end."""
        while not (status := self.status()).ended:
            time.sleep(_POLL_S)
        return 1 if status.exit_code is None else status.exit_code


def recorded_process(reference: Mapping[str, Any]) -> psutil.Process | None:
    """The process that a reference names, unless it has ended and its number is another's by now."""
    try:
        process = psutil.Process(int(reference["pid"]))
        same = abs(process.create_time() - float(reference["created"])) < 0.02
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def ended_status(code: int, restarts: int = 0) -> JobStatus:
    """The status of a job that has ended with an exit code: stopped ones were cancelled."""
    if code == 0:
        return JobStatus(state="succeeded", exit_code=0, restarts=restarts)
    stopped = code in (*STOPPED, 128 + signal.SIGTERM)
    return JobStatus(
        state="cancelled" if stopped else "failed",
        detail=f"exit code {code}",
        exit_code=code,
        restarts=restarts,
    )
