"""The program that the ssh launcher starts on a machine: ``python -m paceline.launch.ssh_remote OPTIONS -- COMMAND``.

It runs the command while the other end of its standard input is open, and then ends all its processes: ssh itself
forwards no signal, and its remote command continues when it dies.

Its input has one message per line: ``go``: start the command; ``signal N``: forward that signal; ``kill``: end all
immediately; an empty line: a heartbeat. The end of the input, or silence, is the end of the connection.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from paceline.core import parent_death
from paceline.core.signals import STOP_SIGNALS, forwarded_signal, handle_signals

READY = "paceline: ready"
"""Printed when nothing is in the way of the command any more."""

_GRACE_S = 30.0
_LAST_OUTPUT_S = 10.0


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m paceline.launch.ssh_remote", description=__doc__)
    parser.add_argument("--silence", type=float, default=60.0, help="seconds without a message after which it ends")
    parser.add_argument("--shared", type=Path, help="a directory that must be there")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    if options.shared is not None and not options.shared.is_dir():
        print(
            f"paceline: there is no directory {options.shared}. The machines of a job must share the run's "
            "directory: put --run-dir on a file system that they all have.",
            file=sys.stderr,
        )
        return 2
    print(READY, flush=True)
    control = _Control(options.silence)
    while (word := control.next(None)) == "":
        pass
    return _Supervised(options.command).run(control) if word == "go" else 1


class _Control:
    """The lines that come in."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._heard = time.monotonic()
        self._unread = b""

    def next(self, pidfd: int | None) -> str | None:
        """Return the next line; None once the connection has ended; ``ended`` if the process has ended first."""
        while b"\n" not in self._unread:
            poll = select.poll()
            poll.register(0, select.POLLIN)
            if pidfd is not None:
                poll.register(pidfd, select.POLLIN)
            remaining_s = self._heard + self._silence_s - time.monotonic()
            ready = {fd for fd, _ in poll.poll(max(0.0, remaining_s) * 1000)}
            if pidfd in ready:
                return "ended"
            data = os.read(0, 4096) if ready else b""
            if not data:
                return None
            self._heard = time.monotonic()
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode(errors="replace").strip()


class _Supervised:
    """The command, and all that it starts, however deep: orphans become this process's children."""

    def __init__(self, command: Sequence[str]) -> None:
        parent_death.set_child_subreaper()
        mine = [sys.executable, "-I", "-S", parent_death.__file__, str(int(signal.SIGKILL)), str(os.getpid())]
        # Through pipes of our own: a write must not fail in the job because the connection has.
        self._popen = subprocess.Popen(
            [*mine, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._copiers = [
            threading.Thread(target=_copy, args=(source.fileno(), target), daemon=True)
            for source, target in ((self._popen.stdout, 1), (self._popen.stderr, 2))
        ]
        for copier in self._copiers:
            copier.start()

    def run(self, control: _Control) -> int:
        """Execute messages until the command ends."""
        connected = True
        with handle_signals(STOP_SIGNALS, lambda number, _: self._signal(number)):
            try:
                while (word := control.next(self._pidfd)) is not None and word not in ("ended", "kill"):
                    if word.startswith("signal "):
                        self._signal(int(word.removeprefix("signal ")))
                    self._reap_orphans()
                connected = word is not None
                if not connected:
                    self._signal(signal.SIGTERM)
                    select.select([self._pidfd], [], [], _GRACE_S)
            finally:
                code = self._end()
        for copier in self._copiers if connected else ():
            copier.join(_LAST_OUTPUT_S)
        if code < 0:
            return 128 - code
        return 1 if code == 255 else code  # with 255 ssh says that it has failed itself

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, forwarded_signal(number))

    def _reap_orphans(self) -> None:
        """Bury what was left to this process, but not the command itself."""
        with suppress(ChildProcessError):
            while True:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None or ended.si_pid == self._popen.pid:
                    return
                os.waitpid(ended.si_pid, 0)

    def _end(self) -> int:
        """Kill what is left of the command and below; return its exit code."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        code = self._popen.wait()
        while children := psutil.Process().children(recursive=True):
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            with suppress(ChildProcessError):
                os.waitpid(-1, 0)
        return code


def _copy(source: int, target: int) -> None:
    """Forward output; drop it once the reader is gone."""
    with suppress(OSError):  # closed under it at the interpreter's end
        while data := os.read(source, 65536):
            with suppress(OSError):
                while data:
                    data = data[os.write(target, data) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
