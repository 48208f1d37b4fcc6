"""Start a job's processes, watch them, and leave none behind."""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from paceline.distributed import tether
from paceline.distributed.process import STOP_SIGNALS, StopRequests, passed_on, signals_handled
from paceline.errors import LaunchError
from paceline.launchers.local.base import RenderedProcess, RenderedProcesses
from paceline.launchers.local.failures import STOPPED, Exit, conclude, expand
from paceline.launchers.local.orphans import Orphanage

_TURN_S = 5.0  # a signal that comes just before a wait is heard only after it
_TETHER = str(Path(tether.__file__).resolve())


@dataclass
class _Running:
    rank: int | None
    popen: subprocess.Popen[bytes]
    pidfd: int
    serves: bool


@dataclass(frozen=True, kw_only=True)
class Starter:
    """What processes are that start a job's ranks themselves, as torchrun and mpirun do.

    Attributes:
        name: as messages call it.
        says_why: one that ends by itself has said why its ranks failed, and knows what is to be removed: it
            is given the grace period also when the user is in a hurry.
        stop_signal: what it is sent when the job is asked to stop; default: what this process got.
        death_signal: what the kernel sends it if this process dies; upon SIGTERM it ends its ranks.
        verdict: what else there is to say about a failure.
    """

    name: str
    says_why: bool = False
    stop_signal: signal.Signals | None = None
    death_signal: signal.Signals = signal.SIGTERM
    verdict: Callable[[], str] | None = None


class SupervisedJob:
    """Subprocesses that start, stop and fail together.

    Each is the leader of a session of its own, so that Ctrl-C in a terminal reaches only the launcher,
    which passes it on once; and each is killed by the kernel if the launcher dies.
    When one fails, the others get SIGTERM, and SIGKILL after the grace period; what they leave of
    their own children is killed with them. Those that only serve others are ended after these.

    Args:
        rendered: the processes.
        rank_0_fds: descriptors that rank 0 inherits.
        starter: what the processes are where they are no ranks themselves.
        serves_elsewhere: processes of other machines are served, too: what serves goes on until
            :meth:`end_serving`.

    Raises:
        LaunchError: one could not be started; none is left.
    """

    def __init__(
        self,
        rendered: RenderedProcesses,
        *,
        rank_0_fds: tuple[int, ...] = (),
        starter: Starter | None = None,
        serves_elsewhere: bool = False,
    ) -> None:
        self._starter = starter
        self._orphanage = None if starter is None else Orphanage()
        self._serves_elsewhere = serves_elsewhere
        self._directory = rendered.spec.directory
        self._grace_s = rendered.spec.grace_s
        self._deaf = rendered.spec.contract == "tensorflow"  # whose workers ignore SIGTERM
        self._served = False
        self._running: list[_Running] = []
        self._exits: list[Exit] = []
        self._requests = StopRequests()
        self._signal: int | None = None
        self._stopping = False
        self._deadline: float | None = None
        program = rendered.spec.argv[0]
        if shutil.which(program) is None:
            raise LaunchError(f"{program} is no program that can be run.")
        if self._directory is not None:
            self._directory.create()
            for old in self._directory.logs.glob("rank-*.error.json"):
                old.unlink(missing_ok=True)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            for process in rendered.processes:
                self._start(process, rank_0_fds if process.rank == 0 else ())
        except OSError as error:
            self._kill_all()
            self._reap_all()
            raise LaunchError(f"a process could not be started: {error}.") from error

    def _start(self, process: RenderedProcess, fds: tuple[int, ...]) -> None:
        death_signal = signal.SIGKILL if self._starter is None else self._starter.death_signal
        tethered = [sys.executable, "-I", "-S", _TETHER, str(int(death_signal)), str(os.getpid())]
        mark = {} if self._orphanage is None else self._orphanage.mark
        output = open(process.log, "ab") if process.log is not None else None  # noqa: SIM115
        try:
            popen = subprocess.Popen(
                [*tethered, *process.argv],
                env={**os.environ, **process.env, **mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=fds,
            )
        finally:
            if output is not None:
                output.close()
        self._running.append(_Running(process.rank, popen, os.pidfd_open(popen.pid), process.serves))

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that still run."""
        return tuple(running.popen.pid for running in self._running)

    @property
    def asked_by(self) -> int | None:
        """The first signal that asked the job to stop."""
        return self._signal

    def wait(self) -> int:
        """Watch the job to its end; print one message if it failed; return its exit code."""
        with signals_handled(STOP_SIGNALS, self._on_signal):
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

    def end_serving(self) -> None:
        """Nobody elsewhere is left to be served: end what serves once nothing else runs here, as done.

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
        self._exits.append(Exit(running.rank, code, time.time(), stopped, name))
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
                self._send(told or passed_on(number))
                if self._deaf and self._running:
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
        return conclude(self._directory, exits, self._signal, verdict, said_why=self._says_why)

    @property
    def _says_why(self) -> bool:
        return self._starter is not None and self._starter.says_why
