"""One machine at the end of an ssh: what is said to it, and what it says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import IO

from paceline.distributed import tether
from paceline.errors import LaunchError
from paceline.launchers.base import Command
from paceline.launchers.ssh.remote import READY

LOST = 255
"""What ssh exits with when its connection fails; remote commands never do."""


class SshMachine:
    """An ssh client. It is killed by the kernel if this process dies; then what runs there ends too.

    Attributes:
        name: the host's.
        pidfd: readable once the client has ended.
        ready: nothing is in the way of the command there.
        code: what the client ended with, once it was reaped.
        said: what came before it was ready.

    Raises:
        LaunchError: the client could not be started.
    """

    def __init__(self, name: str, command: Command, prefix: str) -> None:
        self.name = name
        self.ready = False
        self.code: int | None = None
        self.said: list[str] = []
        self._prefix = prefix.encode()
        self._unsent = command.stdin.encode()
        self._partial: dict[int, bytes] = {}
        # In a session of its own: Ctrl-C in a terminal reaches only the launcher, which passes it on.
        mine = [sys.executable, "-I", "-S", tether.__file__, str(int(signal.SIGKILL)), str(os.getpid())]
        try:
            self._popen = subprocess.Popen(
                [*mine, *command.argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"ssh could not be started for {name}: {error}.") from error
        self.pidfd = os.pidfd_open(self._popen.pid)
        stdin, stdout, stderr = self._popen.stdin, self._popen.stdout, self._popen.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        self._stdin, self._stderr = stdin, stderr
        self._outputs: list[IO[bytes]] = [stdout, stderr]
        for pipe in (stdin, stdout, stderr):
            os.set_blocking(pipe.fileno(), False)

    @property
    def pid(self) -> int:
        """The client's process number."""
        return self._popen.pid

    @property
    def readable(self) -> tuple[int, ...]:
        """The descriptors on which something may come."""
        return tuple(pipe.fileno() for pipe in self._outputs)

    @property
    def writable(self) -> tuple[int, ...]:
        """The descriptor on which something is to be sent, if there is anything."""
        return (self._stdin.fileno(),) if self._unsent and not self._stdin.closed else ()

    def tell(self, word: str) -> None:
        """Send a line, as far as it is taken; the rest with the next :meth:`write`."""
        if len(self._unsent) < 4096:  # one that takes nothing is lost, and ssh will find that out
            self._unsent += f"{word}\n".encode()

    def write(self) -> None:
        """Send what is taken."""
        if not self.writable:
            return
        try:
            self._unsent = self._unsent[os.write(self._stdin.fileno(), self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._unsent = b""  # the client has ended, and says so

    def read(self, fd: int) -> bool:
        """Take what is there; False where there is nothing, or never will be again."""
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return False
        errors = fd == (None if self._stderr.closed else self._stderr.fileno())
        *lines, rest = (self._partial.pop(fd, b"") + data).split(b"\n")
        if data:
            self._partial[fd] = rest
        elif rest:
            lines.append(rest)
        for line in lines:
            self._take(line, errors=errors)
        if not data:
            [ended] = [pipe for pipe in self._outputs if pipe.fileno() == fd]
            self._outputs.remove(ended)
            ended.close()
        return bool(data)

    def let_go(self) -> None:
        """End its input, and with it what runs there."""
        with suppress(OSError):
            self._stdin.close()

    def kill(self) -> None:
        """Kill the client here."""
        self._popen.kill()

    def reap(self) -> int:
        """Wait for the client's end, and take its last words; return its exit code, LOST if it was killed."""
        code = self._popen.wait()
        self.code = LOST if code < 0 else code
        os.close(self.pidfd)
        for fd in self.readable:
            # A master connection that the user has set up may hold the other end open for ever.
            while self.read(fd):
                pass
            if rest := self._partial.pop(fd, b""):
                self._take(rest, errors=not self._stderr.closed and fd == self._stderr.fileno())
        self.let_go()
        for pipe in self._outputs:
            pipe.close()
        self._outputs = []
        return self.code

    def _take(self, line: bytes, *, errors: bool) -> None:
        if not self.ready:
            # Start-up files of a shell may print as well, and ssh itself does.
            text = line.decode(errors="replace").rstrip()
            self.ready = text == READY
            if not self.ready:
                self.said.append(text)
            return
        stream = sys.stderr if errors else sys.stdout
        with suppress(BrokenPipeError, ValueError):
            stream.flush()
            stream.buffer.write(self._prefix + line + b"\n")
            stream.buffer.flush()
