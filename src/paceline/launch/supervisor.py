"""Watches the processes of a job from outside, and reports their end."""

from __future__ import annotations

import json
import math
import os
import secrets
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import FrameType

import psutil

from paceline.core.errors import LaunchError
from paceline.core.job import Command
from paceline.core.ownership import remove_leftovers
from paceline.core.parent_death import kill_with_parent_command, set_child_subreaper
from paceline.core.signals import STOP_SIGNALS, StopRequests, forwarded_signal, handle_signals
from paceline.launch.rank_output import RankOutputs, shared_outputs
from paceline.launch.torchrun_agent import RANK_OUTPUTS
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import STOPPED, ProcessExit, expand, report_job_failure


def end_processes(processes: Iterable[psutil.Process]) -> None:
    """Kill processes by their ids, as far as they are still there."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


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
            end_processes(orphans)
            for orphan in orphans:
                with suppress(ChildProcessError):
                    os.waitpid(orphan.pid, 0)
        set_child_subreaper(False)

    def _is_marked(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return process.environ().get(_MARK) == self.mark[_MARK]
        return False


# --- Start a job's processes, watch them, and leave none behind ---


_TURN_S = 5.0  # a signal that comes just before a wait is heard only after it


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
        relays_output: this process passes its output on: a write must not fail there because the reader is gone.
    """

    name: str
    says_why: bool = False
    stop_signal: signal.Signals | None = None
    death_signal: signal.Signals = signal.SIGTERM
    signal_ranks: Callable[[int], None] | None = None
    verdict: Callable[[], str] | None = None
    piped_ranks: int = 0
    relays_output: bool = False


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
        relays = several_print_here or (starter is not None and starter.relays_output)
        self._outputs = RankOutputs(shared_outputs() if relays else ())
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
                kill_with_parent_command(command.argv, death_signal),
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

    def forward(self, number: int) -> None:
        """Send a signal that asks to stop; may be called from any thread."""
        self._signal = self._signal or number
        self._send(forwarded_signal(number))

    def kill(self) -> None:
        """Kill what still runs; may be called from any thread."""
        self._signal = self._signal or signal.SIGTERM
        self._deadline = 0.0
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
            end_processes(below)

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
