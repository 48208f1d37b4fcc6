"""One ssh for each machine: reached first, then started together, watched, and ended together."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

from paceline.distributed.process import (
    STOP_SIGNALS,
    StopRequests,
    interrupted_afterwards,
    passed_on,
    signals_handled,
)
from paceline.errors import LaunchError
from paceline.launchers.base import Command
from paceline.launchers.local.failures import STOPPED
from paceline.launchers.ssh.machine import LOST, SshMachine

_START_S = 60.0  # to start Python there, over a slow file system too
_GRACE_S = 10.0
_KILL_S = 5.0


class SshJob:
    """The machines of a job, each at the end of an ssh.

    Args:
        names: of the machines.
        commands: one for each; its ``stdin`` ends in starting :mod:`paceline.launchers.ssh.remote`.
        outlives_machines: the job goes on when a machine is lost, and succeeds if one succeeds.
        connect_timeout_s: within which each must answer.
        heartbeat_s: how often each is told that somebody is there.

    Raises:
        LaunchError: not all could be reached and made ready; nothing runs anywhere.
    """

    def __init__(
        self,
        *,
        names: Sequence[str],
        commands: Sequence[Command],
        outlives_machines: bool,
        connect_timeout_s: float,
        heartbeat_s: float,
    ) -> None:
        if shutil.which("ssh") is None:
            raise LaunchError(
                "there is no ssh here. Install OpenSSH's client (on Debian: apt-get install openssh-client)."
            )
        self._outlives_machines = outlives_machines
        self._heartbeat_s = heartbeat_s
        self._beat_at = time.monotonic()
        self._requests = StopRequests()
        self._heard: list[int] = []
        self._cancelled = False
        self._signal: int | None = None
        self._failed: list[SshMachine] = []
        self._stopping = False
        self._deadline: float | None = None
        self._killing = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._machines: list[SshMachine] = []
        self._width = max(map(len, names)) if len(names) > 1 else 0
        try:
            for name, command in zip(names, commands, strict=True):
                prefix = f"{name:{self._width}} | " if self._width else ""
                with interrupted_afterwards():
                    self._machines.append(SshMachine(name, command, prefix))
            self._reach_all(connect_timeout_s + _START_S)
        except BaseException:
            self._end_all()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """The ssh clients that still run."""
        return tuple(machine.pid for machine in self._running)

    def wait(self) -> int:
        """Watch the job to its end; say what failed; return its exit code."""
        with signals_handled(STOP_SIGNALS, self._on_signal):
            try:
                self._tell("go")
                while self._running:
                    self._poll(self._deadline)
                    self._obey()
                    if self._deadline is not None and time.monotonic() >= self._deadline:
                        self._hurry()
            finally:  # one more Ctrl-C must not interrupt this
                self._end_all()
        return self._conclude()

    def cancel(self) -> None:
        """Ask the job to stop, and kill what remains; may be called from another thread than :meth:`wait`."""
        self._cancelled = True
        os.eventfd_write(self._wake, 1)

    @property
    def _running(self) -> list[SshMachine]:
        return [machine for machine in self._machines if machine.code is None]

    def _reach_all(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline and any(not machine.ready for machine in self._running):
            self._poll(deadline)
        missing = [machine for machine in self._machines if not machine.ready or machine.code is not None]
        if not missing:
            return
        lines = [f"  {machine.name}: {_why(machine, within_s)}" for machine in missing]
        others = "; nothing runs on the others" if len(missing) < len(self._machines) else ""
        raise LaunchError(
            f"{len(missing)} of {len(self._machines)} machines cannot be used{others}.\n" + "\n".join(lines)
        )

    def _poll(self, until: float | None) -> None:
        """Take and send what there is, waiting for it until ``until`` or the next heartbeat."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        running = self._running
        for machine in running:
            for fd in (machine.pidfd, *machine.readable):
                poll.register(fd, select.POLLIN)
            for fd in machine.writable:
                poll.register(fd, select.POLLOUT)
        next_beat = self._beat_at + self._heartbeat_s
        wait_s = max(0.0, min(next_beat, until or next_beat) - time.monotonic())
        ready = {fd for fd, _ in poll.poll(wait_s * 1000)}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        for machine in running:
            for fd in machine.readable:
                if fd in ready:
                    machine.read(fd)
            machine.write()
            if machine.pidfd in ready:
                self._ended(machine)
        if time.monotonic() >= next_beat:
            self._beat_at = time.monotonic()
            self._tell("")

    def _tell(self, word: str) -> None:
        """Say it to those that listen: the others' shells still read what they are to run."""
        for machine in self._running:
            if machine.ready:
                machine.tell(word)

    def _ended(self, machine: SshMachine) -> None:
        code = machine.reap()
        if not machine.ready or code in (0, *STOPPED):
            return
        if not self._stopping and self._signal is None:
            self._failed.append(machine)
        if not self._outlives_machines:
            self._stop_within_grace()

    def _stop_within_grace(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._deadline = time.monotonic() + _GRACE_S
            self._tell(f"signal {int(signal.SIGTERM)}")

    def _hurry(self) -> None:
        """What was asked to stop and did not is killed, there first, then here."""
        self._deadline = time.monotonic() + _KILL_S
        if self._killing:
            for machine in self._running:
                machine.kill()
        self._killing = True
        self._tell("kill")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._heard.append(number)
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _obey(self) -> None:
        """Do what signals and other threads ask for, where nothing is being written."""
        if self._cancelled:
            self._signal = self._signal or signal.SIGTERM
            self._stop_within_grace()
        while self._heard:
            number = self._heard.pop(0)
            match self._requests.hear(number):
                case "first":
                    self._signal = number
                    self._tell(f"signal {int(passed_on(number))}")
                case "end":
                    self._hurry()

    def _end_all(self) -> None:
        """Let go of all machines: their input ends, and with it all that runs there."""
        running = self._running
        for machine in running:
            machine.let_go()
        deadline = time.monotonic() + _KILL_S
        for machine in running:
            wait_s = max(0.0, deadline - time.monotonic()) if machine.ready else 0.0
            if not select.select([machine.pidfd], [], [], wait_s)[0]:
                machine.kill()
            machine.reap()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    def _conclude(self) -> int:
        codes = {machine.code for machine in self._machines}
        if 0 in codes and (self._outlives_machines or codes == {0}):
            for machine in self._machines:
                if machine.code:
                    print(f"paceline: {_end_of(machine)}; the others have finished.", file=sys.stderr)
            return 0
        # Where machines may be lost, what has failed on another one is the cause.
        culprits = [m for m in self._failed if m.code != LOST or not self._outlives_machines] or self._failed
        if culprits:
            lost = culprits[0].code == LOST
            if self._width or lost:
                print(f"paceline: {_end_of(culprits[0])}.", file=sys.stderr)
            return 1 if lost else culprits[0].code or 1
        for code in STOPPED:
            if code in codes:
                return code
        # Stopped as asked, by processes that know no better than to die of it.
        return 128 + (self._signal or signal.SIGTERM)


def _why(machine: SshMachine, within_s: float) -> str:
    """Why a machine is not ready, in its own words."""
    said = [line for line in machine.said if line.strip()][-3:]
    if machine.code is None:
        return ": ".join([f"Paceline has not come up there within {within_s:.0f} s", *said[-1:]])
    if not said:
        who = "ssh" if machine.code == LOST else "its shell"
        return f"{who} exited with {machine.code} and said nothing. Try: ssh {machine.name} true"
    advice = f"\n    Try: ssh {machine.name} true" if machine.code == LOST else ""
    return "\n    ".join(line.removeprefix("paceline: ").strip() for line in said) + advice


def _end_of(machine: SshMachine) -> str:
    if machine.code == LOST:
        return f"{machine.name} was lost: its ssh has ended"
    return f"{machine.name} failed, with exit code {machine.code}"
