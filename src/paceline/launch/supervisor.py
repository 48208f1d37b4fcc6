"""Watches the processes of a job from outside, and reports their end."""

from __future__ import annotations

import json
import math
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import psutil

from paceline.core import parent_death
from paceline.core.errors import LaunchError, PacelineError
from paceline.core.files import write_atomically
from paceline.core.job import Command
from paceline.core.owned_names import remove_leftovers
from paceline.core.parent_death import set_child_subreaper
from paceline.core.signals import STOP_SIGNALS, StopRequests, forwarded_signal, handle_signals
from paceline.launch.job_logs import follow_files
from paceline.launch.launcher import JobHandle, JobStatus, RecordedJob
from paceline.launch.rank_output import RankOutputs, shared_outputs
from paceline.launch.torchrun_agent import RANK_OUTPUTS
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import STOPPED, ProcessExit, expand, report_job_failure

# --- Orphans of a killed mpirun: its ranks, in process groups of their own, that no other process would end ---


_MARK = "PACELINE_STARTED_BY"


class OrphanReaper:
    """Makes this process the parent of its descendants whose own parent dies. Linux only.

    Attributes:
        mark: a variable for the environment of started processes, which distinguishes orphans from other children.
    """

    def __init__(self) -> None:
        self.mark = {_MARK: secrets.token_hex(8)}
        set_child_subreaper()

    def close(self) -> None:
        """Kill the orphans that bear the mark, and all below them."""
        while orphans := [child for child in psutil.Process().children() if self._is_marked(child)]:
            for orphan in orphans:
                with suppress(psutil.NoSuchProcess):
                    orphan.kill()
                with suppress(ChildProcessError):
                    os.waitpid(orphan.pid, 0)
        set_child_subreaper(False)

    def _is_marked(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return process.environ().get(_MARK) == self.mark[_MARK]
        return False


# --- Start a job's processes, watch them, and leave none behind ---


_TURN_S = 5.0  # a signal that comes just before a wait is heard only after it
_TETHER = str(Path(parent_death.__file__).resolve())


@dataclass
class _Running:
    rank: int | None
    popen: subprocess.Popen[bytes]
    pidfd: int
    serves: bool


@dataclass(frozen=True, kw_only=True)
class RankStarter:
    """A program that starts a job's ranks itself, as torchrun and mpirun do.

    Attributes:
        says_why: the program prints why its ranks failed, and cleans up: it gets the grace period also after a second
            stop request.
        stop_signal: the signal for a stop request; default: the signal that this process got.
        death_signal: the kernel's signal to it if this process dies; upon SIGTERM it ends its ranks.
        signal_ranks: signals the ranks of a stop request, of which the program must not hear.
        verdict: returns an addition to the message about a failure.
        piped_ranks: ranks to which it gives the pipes that its variable ``PACELINE_RANK_OUTPUTS`` names.
    """

    name: str
    says_why: bool = False
    stop_signal: signal.Signals | None = None
    death_signal: signal.Signals = signal.SIGTERM
    signal_ranks: Callable[[int], None] | None = None
    verdict: Callable[[], str] | None = None
    piped_ranks: int = 0


class ProcessGroup(Protocol):
    """The processes of a job that this process has started, and watches."""

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the running ones."""

    def wait(self) -> int:
        """Return the job's exit code: 0, that of the first failed rank, or 75 or 130 after a requested stop."""

    def cancel(self) -> None:
        """Request a stop, and kill remaining processes after the grace period; :meth:`wait` then returns."""


def check_program(program: str) -> None:
    """Check that a command can be started."""
    if shutil.which(program) is None:
        raise LaunchError(f"{program}: command not found or not executable.")


class SupervisedJob:
    """Subprocesses that start, stop and fail together.

    Each is the leader of a session of its own, so that Ctrl-C in a terminal reaches only the launcher,
    which passes it on once; and each is killed by the kernel if the launcher dies.
    When one fails, the others get SIGTERM, and SIGKILL after the grace period; their remaining children
    are killed with them. Processes that only serve others are ended after these.

    Args:
        starter: the program that the processes run, if they are not ranks themselves.
        directory: the run in which failures are recorded; default: no record.
        grace_s: how long the others may take to end after one failed.
        ignores_sigterm: they are killed after the grace period also if a signal requests a stop.
        rank_0_fds: descriptors that rank 0 inherits.
        serves_elsewhere: servers also serve processes of other nodes, and continue until :meth:`stop_servers`.

    Raises:
        LaunchError: one could not be started; none is left.
    """

    def __init__(
        self,
        commands: Sequence[Command],
        *,
        starter: RankStarter | None = None,
        directory: RunDirectory | None = None,
        grace_s: float = 10.0,
        ignores_sigterm: bool = False,
        rank_0_fds: tuple[int, ...] = (),
        serves_elsewhere: bool = False,
    ) -> None:
        self._starter = starter
        self._orphanage = None if starter is None else OrphanReaper()
        self._serves_elsewhere = serves_elsewhere
        self._directory = directory
        self._grace_s = grace_s
        self._ignores_sigterm = ignores_sigterm
        self._served = False
        self._running: list[_Running] = []
        self._exits: list[ProcessExit] = []
        self._requests = StopRequests()
        self._signal: int | None = None
        self._stopping = False
        self._deadline: float | None = None
        check_program(commands[0].argv[0])
        remove_leftovers()
        if self._directory is not None:
            self._directory.create()
            for old in self._directory.logs.glob("rank-*.error.json"):
                old.unlink(missing_ok=True)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._piped_ranks = 0 if starter is None else starter.piped_ranks
        several_print_here = max(self._piped_ranks, sum(command.log is None for command in commands)) > 1
        self._outputs = RankOutputs(shared_outputs() if several_print_here else ())
        try:
            for command in commands:
                self._start(command, rank_0_fds if command.rank == 0 else ())
            self._outputs.start()
        except OSError as error:
            self._kill_all()
            self._reap_all()
            raise LaunchError(f"a process could not be started: {error}.") from error

    def _start(self, command: Command, fds: tuple[int, ...]) -> None:
        death_signal = signal.SIGKILL if self._starter is None else self._starter.death_signal
        tethered = [sys.executable, "-I", "-S", _TETHER, str(int(death_signal)), str(os.getpid())]
        variables = {} if self._orphanage is None else self._orphanage.mark
        with ExitStack() as stack:
            if command.log is not None:
                log = stack.enter_context(open(command.log, "ab"))
                outputs = dict.fromkeys((1, 2), log.fileno())
            else:
                outputs = self._open_outputs(stack)
            piped = [self._open_outputs(stack) for _ in range(self._piped_ranks)]
            if piped:
                variables = {**variables, RANK_OUTPUTS: json.dumps(piped)}
            # A line that is in a rank's buffer is not seen while it runs, and lost if it is killed.
            unbuffered = {"PYTHONUNBUFFERED": "1"} if outputs else {}
            popen = subprocess.Popen(
                [*tethered, *command.argv],
                env={**unbuffered, **os.environ, **command.env, **variables},
                stdin=subprocess.DEVNULL,
                stdout=outputs.get(1),
                stderr=outputs.get(2),
                start_new_session=True,
                pass_fds=(*fds, *(end for ends in piped for end in ends.values())),
            )
        self._running.append(_Running(command.rank, popen, os.pidfd_open(popen.pid), command.serves))

    def _open_outputs(self, stack: ExitStack) -> dict[int, int]:
        ends = self._outputs.open()
        for end in ends.values():
            stack.callback(os.close, end)
        return ends

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(running.popen.pid for running in self._running)

    @property
    def asked_by(self) -> int | None:
        """The first signal that asked the job to stop."""
        return self._signal

    def wait(self) -> int:
        """Watch the job to its end; print one message if it failed; return its exit code."""
        with handle_signals(STOP_SIGNALS, self._on_signal):
            try:
                while self._running:
                    self._wait_once()
            finally:  # one more Ctrl-C must not interrupt this
                self._kill_all()
                self._reap_all()
        return self._conclude()

    def cancel(self) -> None:
        """Ask the processes to stop; may be called from another thread than :meth:`wait`."""
        if not self._running:
            return
        self._signal = self._signal or signal.SIGTERM
        self._stop_within_grace()
        os.eventfd_write(self._wake, 1)

    def stop_servers(self) -> None:
        """No process of other nodes needs the servers: end them once no other process runs here, as succeeded.

        May be called from any thread, like :meth:`cancel`.
        """
        self._served = True
        os.eventfd_write(self._wake, 1)

    def _wait_once(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        by_fd = {running.pidfd: running for running in self._running}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        remaining_s = math.inf if self._deadline is None else self._deadline - time.monotonic()
        ready = [fd for fd, _ in poll.poll(max(0.0, min(_TURN_S, remaining_s)) * 1000)]
        if self._wake in ready:
            os.eventfd_read(self._wake)
        for fd in ready:
            if fd in by_fd:
                self._ended(by_fd[fd])
        if self._served and self._running and all(running.serves for running in self._running):
            self._stop_within_grace()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._kill_all()
            self._deadline = None

    def _ended(self, running: _Running) -> None:
        code = self._reap(running)
        if running.serves and self._served:
            code = 0
        stopped = self._stopping or self._signal is not None
        name = "" if self._starter is None else self._starter.name
        self._exits.append(ProcessExit(running.rank, code, time.time(), stopped, name))
        if code != 0 and code not in STOPPED:
            self._stop_within_grace()
        elif not running.serves and not self._serves_elsewhere:
            self._served = all(other.serves for other in self._running)

    def _stop_within_grace(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._deadline = time.monotonic() + self._grace_s
            self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        # To the workers alone: their data-loading children would die under them.
        for running in tuple(self._running):
            with suppress(OSError):
                signal.pidfd_send_signal(running.pidfd, number)

    def _kill_all(self) -> None:
        for running in tuple(self._running):
            # Open MPI's mpirun starts its ranks in groups of their own, and they outlive it.
            below: list[psutil.Process] = []
            with suppress(psutil.NoSuchProcess):  # a signal may come just as it is reaped
                below = psutil.Process(running.popen.pid).children(recursive=True)
            with suppress(ProcessLookupError):
                os.killpg(running.popen.pid, signal.SIGKILL)
            for process in below:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def _reap_all(self) -> None:
        for running in list(self._running):
            self._reap(running)
        if self._orphanage is not None:
            self._orphanage.close()
        self._outputs.close()
        remove_leftovers()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def _reap(self, running: _Running) -> int:
        # Not reaped yet, a dead leader still holds its group's number: no stranger can be hit.
        os.waitid(os.P_PIDFD, running.pidfd, os.WEXITED | os.WNOWAIT)
        with suppress(ProcessLookupError):
            os.killpg(running.popen.pid, signal.SIGKILL)
        code = running.popen.wait()
        os.close(running.pidfd)
        self._running.remove(running)
        return code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        match self._requests.hear(number):
            case "first":
                self._signal = number
                told = None if self._starter is None else self._starter.stop_signal
                if self._starter is not None and self._starter.signal_ranks is not None:
                    self._starter.signal_ranks(told or forwarded_signal(number))
                else:
                    self._send(told or forwarded_signal(number))
                if self._ignores_sigterm and self._running:
                    self._deadline = time.monotonic() + self._grace_s
                    os.eventfd_write(self._wake, 1)  # what waits knows of no deadline yet
            case "end" if self._says_why and self._deadline is None:
                self._deadline = time.monotonic() + self._grace_s
                self._send(signal.SIGINT)
            case "end":
                self._kill_all()

    def _conclude(self) -> int:
        exits = [under for end in self._exits for under in expand(end, self._directory)]
        failed = any(end.code for end in exits)
        asks = None if self._starter is None else self._starter.verdict
        verdict = asks() if asks is not None and failed else ""
        return report_job_failure(self._directory, exits, self._signal, verdict, said_why=self._says_why)

    @property
    def _says_why(self) -> bool:
        return self._starter is not None and self._starter.says_why


# --- Jobs that end with the command that started them: mpirun, ssh, processes here ---


EXIT_CODE = "exit-code"
"""A file in a job's directory: written when the job has ended."""

OUTPUT = "output.log"
"""A file in a job's directory: the output of a detached job."""

_ASKED = "asked-to-end"
"""A file in a job's directory: it was cancelled once."""

_POLL_S = 0.2


class ForegroundJob(JobHandle):
    """A job that this process supervises.

    Args:
        directory: keeps the exit code for other commands; None: no other command knows of the job.
    """

    def __init__(self, processes: ProcessGroup, directory: Path | None) -> None:
        self._processes = processes
        self._directory = directory
        self._code: int | None = None
        if directory is not None:
            for name in (EXIT_CODE, _ASKED):
                with suppress(OSError):  # of the run's last job, which other nodes would read as this one's
                    (directory / name).unlink(missing_ok=True)

    @property
    def pids(self) -> tuple[int, ...]:
        return self._processes.pids

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
        self._processes.cancel()

    def wait(self) -> int:
        try:
            code = self._processes.wait()
        except BaseException as error:  # of a script in this process, whose end it is
            code = 130 if isinstance(error, KeyboardInterrupt) else 1
            self.ended_with(error.exit_code if isinstance(error, PacelineError) else code)
            raise
        return self.ended_with(code)

    def ended_with(self, code: int) -> int:
        """Keep the exit code for other commands."""
        self._code = code
        if self._directory is not None:
            with suppress(OSError):
                write_atomically(self._directory / EXIT_CODE, f"{self._code}\n".encode())
        return self._code


class BackgroundJob(RecordedJob):
    """A job that another process supervises."""

    def __init__(self, reference: Mapping[str, Any]) -> None:
        super().__init__(reference)
        self._directory = Path(reference["directory"])

    def status(self) -> JobStatus:
        """Running while its process does; then what it has left."""
        status = process_status(self._reference)
        if status.state != "running":
            with suppress(OSError, ValueError):
                return ended_status(int((self._directory / EXIT_CODE).read_text()))
        return status

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        ended = (lambda: self.status().ended) if follow else None
        yield from follow_files(lambda: [self._directory / OUTPUT], ended=ended)

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
        """Wait for the process to end."""
        while not (status := self.status()).ended:
            if status.state == "unknown":
                raise LaunchError(f"{status.detail}. Wait for it there.")
            time.sleep(_POLL_S)
        return 1 if status.exit_code is None else status.exit_code


def process_reference(pid: int) -> dict[str, Any]:
    """Return the identification of a process of this machine, also for times when its number means another or none.

    Raises:
        psutil.NoSuchProcess: it has ended.
    """
    created = psutil.Process(pid).create_time()
    return {"pid": pid, "created": created, "host": socket.gethostname(), **_process_table()}


def _process_table() -> dict[str, str]:
    """Return the scope of a process's number: one kernel, and one container."""
    return {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid_namespace": os.readlink("/proc/self/ns/pid"),
    }


def process_status(reference: Mapping[str, Any]) -> JobStatus:
    """Return the status of a process from the process table; unknown if that is another machine's."""
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
        return JobStatus(state="failed", detail=f"{host} was restarted, and it left no exit code")
    return JobStatus(state="unknown", detail=f"it runs in another container of {host}")


def recorded_process(reference: Mapping[str, Any]) -> psutil.Process | None:
    """Return the process of a reference, unless its number is another's: it has ended, or is elsewhere."""
    if any(reference.get(name, value) != value for name, value in _process_table().items()):
        return None
    try:
        process = psutil.Process(int(reference["pid"]))
        same = abs(process.create_time() - float(reference["created"])) < 0.02
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def process_to_end(reference: Mapping[str, Any], status: JobStatus) -> psutil.Process | None:
    """Return the process of a job to cancel; None if it has ended."""
    if status.state == "unknown":
        raise LaunchError(f"{status.detail}. Cancel it there.")
    return recorded_process(reference)


def ended_status(code: int, restarts: int = 0) -> JobStatus:
    """Return the status of a job that has ended with an exit code: stopped ones were cancelled."""
    if code == 0:
        return JobStatus(state="succeeded", exit_code=0, restarts=restarts)
    stopped = code in (*STOPPED, 128 + signal.SIGTERM)
    return JobStatus(
        state="cancelled" if stopped else "failed",
        detail=f"exit code {code}",
        exit_code=code,
        restarts=restarts,
    )
