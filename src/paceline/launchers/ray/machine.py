"""One machine's part of a job in a Ray cluster: an actor that runs one command. Ray sends only its name here.

The actor ends with the process that asked for it, whatever happens to that one; and the command is killed by
the kernel when its actor ends.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

from paceline.distributed.sockets import bound_socket
from paceline.distributed.tether import tethered

_LINES_KEPT = 10_000
_LINES_AT_ONCE = 1_000


class Machine:
    """Runs a command, and keeps what it prints until that is fetched; its methods run in threads."""

    def __init__(self) -> None:
        # Bounded: a command that prints faster than the terminal shows waits, as at any pipe.
        self._lines: queue.Queue[tuple[int, bytes] | None] = queue.Queue(_LINES_KEPT)
        self._popen: subprocess.Popen[bytes] | None = None
        self._code: int | None = None

    def address(self) -> tuple[str, str]:
        """The name of this machine, and its address in the cluster."""
        import ray

        return os.uname().nodename, ray.util.get_node_ip_address()

    def can_listen(self, port: int) -> bool:
        """Whether nobody listens at this port."""
        import ray

        try:
            bound_socket(ray.util.get_node_ip_address(), port).close()
        except OSError:
            return False
        return True

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        """Start the command; ``env`` is added to this machine's variables.

        Raises:
            OSError: it cannot be started.
        """
        started: Future[None] = Future()
        threading.Thread(target=self._run, args=(argv, env, cwd, started), daemon=True).start()
        started.result()

    def read(self, timeout_s: float) -> tuple[list[tuple[int, bytes]], int | None]:
        """What was printed since the last call: (1 or 2, line) for stdout or stderr.

        Args:
            timeout_s: how long to wait for a line.

        Returns:
            The lines, and the exit code after the last of them; minus the signal's number where one killed
            the command.
        """
        lines = []
        with suppress(queue.Empty):
            line = self._lines.get(timeout=timeout_s)
            while line is not None:
                lines.append(line)
                if len(lines) == _LINES_AT_ONCE:
                    return lines, None
                line = self._lines.get_nowait()
            return lines, self._code
        return lines, None

    def send_signal(self, number: int) -> None:
        """Signal the command, and not its children."""
        if self._popen is not None:
            self._popen.send_signal(number)

    def end(self) -> None:
        """Kill the command and all that it has started."""
        if self._popen is None:
            return
        with suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self._popen.pid).children(recursive=True)
            self._popen.kill()
            for process in tree:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def _run(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, started: Future[None]) -> None:
        # This thread lives as long as the command: by the end of the thread that started it, the kernel knows
        # that the command is to end too.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            popen = subprocess.Popen(
                tethered(argv),
                env={**own_variables(), **env},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            started.set_exception(error)
            return
        self._popen = popen
        started.set_result(None)
        readers = [
            threading.Thread(target=self._keep, args=(number, pipe), daemon=True)
            for number, pipe in ((1, popen.stdout), (2, popen.stderr))
        ]
        for reader in readers:
            reader.start()
        # Not reaped yet, a dead leader still holds its group's number: no stranger can be hit.
        os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
        with suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        for reader in readers:
            reader.join()
        self._code = popen.wait()
        self._lines.put(None)

    def _keep(self, number: int, pipe: IO[bytes] | None) -> None:
        assert pipe is not None
        with pipe:
            for line in pipe:
                self._lines.put((number, line))


def own_variables() -> dict[str, str]:
    """This process's variables, without the number of threads that Ray gives each actor: it decides bits."""
    variables = dict(os.environ)
    try:
        parents = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return variables
    if not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in parents):
        variables.pop("OMP_NUM_THREADS", None)
    return variables
