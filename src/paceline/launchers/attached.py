"""Jobs that end with the command that started them: mpirun, ssh, processes here."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from paceline.errors import LaunchError, PacelineError
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

_ASKED = "asked-to-end"
"""A file in a job's directory: it was cancelled once."""

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
        for name in (EXIT_CODE, _ASKED):
            with suppress(OSError):  # of the run's last job, which other machines would take for this one's
                (directory / name).unlink(missing_ok=True)

    @property
    def reference(self) -> dict[str, Any]:
        """This process, which the job ends with."""
        pid = os.getpid()
        return {"id": str(pid), **process_reference(pid), "directory": str(self._directory)}

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
        try:
            code = self._job.wait()
        except BaseException as error:  # of a script in this process, whose end it is
            code = 130 if isinstance(error, KeyboardInterrupt) else 1
            self.ended_with(error.exit_code if isinstance(error, PacelineError) else code)
            raise
        return self.ended_with(code)

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
        status = process_status(self._reference)
        if status.state != "running":
            with suppress(OSError, ValueError):
                return ended_status(int((self._directory / EXIT_CODE).read_text()))
        return status

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """What it printed, where it was detached."""
        ended = (lambda: self.status().ended) if follow else None
        yield from follow_files([self._directory / OUTPUT], ended=ended)

    def cancel(self) -> None:
        """Ask its process to end all that it has started; a second call has it kill what does not end.

        Raises:
            LaunchError: it is not one of this machine's.
        """
        process = process_to_end(self._reference, self.status())
        asked = self._directory / _ASKED
        if process is not None:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGINT if asked.exists() else signal.SIGTERM)
            with suppress(OSError):
                asked.touch()

    def wait(self) -> int:
        """Wait for the process to end.

        Raises:
            LaunchError: it is not one of this machine's.
        """
        while not (status := self.status()).ended:
            if status.state == "unknown":
                raise LaunchError(f"{status.detail}. Wait for it there.")
            time.sleep(_POLL_S)
        return 1 if status.exit_code is None else status.exit_code


def process_reference(pid: int) -> dict[str, Any]:
    """What a process of this machine is found by, also where its number means another or none.

    Raises:
        psutil.NoSuchProcess: it has ended.
    """
    created = psutil.Process(pid).create_time()
    return {"pid": pid, "created": created, "host": socket.gethostname(), **_process_table()}


def _process_table() -> dict[str, str]:
    """Where a process's number means the same process: under one kernel, in one container."""
    return {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid_namespace": os.readlink("/proc/self/ns/pid"),
    }


def process_status(reference: Mapping[str, Any]) -> JobStatus:
    """What the process table says of a process; unknown, where it would have to be another machine's."""
    if recorded_process(reference) is not None:
        return JobStatus(state="running", detail=f"process {reference['pid']}")
    here, host = _process_table(), reference.get("host")
    if host is None:  # recorded before machines were
        detail = f"there is no process {reference['pid']} here, but there may be on another machine"
        return JobStatus(state="unknown", detail=detail)
    if all(reference[name] == value for name, value in here.items()):
        return JobStatus(state="failed", detail="its process is gone, and left no exit code")
    if host != socket.gethostname():
        return JobStatus(state="unknown", detail=f"it runs on {host}")
    if reference["pid_namespace"] == here["pid_namespace"]:
        return JobStatus(state="failed", detail=f"{host} was started anew, and it left no exit code")
    return JobStatus(state="unknown", detail=f"it runs in another container of {host}")


def recorded_process(reference: Mapping[str, Any]) -> psutil.Process | None:
    """The process that a reference names, unless its number is another's: it has ended, or is elsewhere."""
    if any(reference.get(name, value) != value for name, value in _process_table().items()):
        return None
    try:
        process = psutil.Process(int(reference["pid"]))
        same = abs(process.create_time() - float(reference["created"])) < 0.02
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def process_to_end(reference: Mapping[str, Any], status: JobStatus) -> psutil.Process | None:
    """The process of a job that is to be cancelled; None where it has ended.

    Raises:
        LaunchError: it is not one of this machine's.
    """
    if status.state == "unknown":
        raise LaunchError(f"{status.detail}. Cancel it there.")
    return recorded_process(reference)


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
