"""The agent's side of its zygote and of the host of the members' stores."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from paceline.core.process_group import RenderedProcess

STORE_HOST = -1
"""Stands for the store host where a report names a worker."""

_LONGEST = 65536
_END_S = 5.0
_SERVED_S = 2.0  # how long the store host may take to open or close a store: milliseconds, unless it hangs


@dataclass(frozen=True)
class Forked:
    """A worker runs; ``pidfd`` is the receiver's."""

    worker: int
    pid: int
    pidfd: int


@dataclass(frozen=True)
class NotForked:
    """A worker could not be started."""

    worker: int
    error: str


@dataclass(frozen=True)
class Exited:
    """A process has ended; minus the signal's number where one killed it."""

    pid: int
    code: int


Report = Forked | NotForked | Exited


class ForkServer:
    """A subprocess that forks workers; see :mod:`paceline.elastic.forkserver`.

    Args:
        rendered: its command, to which its socket's descriptor is added.
        inherited: descriptors that it and its children shall keep.
    """

    def __init__(self, rendered: RenderedProcess, inherited: Sequence[int]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._popen = subprocess.Popen(
                [*rendered.argv, str(theirs.fileno())],
                env={**os.environ, **rendered.env},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(theirs.fileno(), *inherited),
            )

    @property
    def pid(self) -> int:
        """The zygote's own."""
        return self._popen.pid

    def fileno(self) -> int:
        """The descriptor that reports come through, for a selector."""
        return self._socket.fileno()

    def fork(self, worker: int, slot: int, job: str, descriptors: Sequence[int]) -> None:
        """Ask for a worker; ``descriptors`` are its channel and, above slot 0, its log."""
        self._ask({"fork": worker, "slot": slot, "job": job}, descriptors)

    def host(self, descriptor: int) -> None:
        """Ask for a store host that takes commands from ``descriptor``."""
        self._ask({"host": 0}, [descriptor])

    def _ask(self, document: Mapping[str, object], descriptors: Sequence[int]) -> None:
        # Where it has died, its end of file says so, and what it owes is asked of the next one.
        with suppress(ConnectionError):
            socket.send_fds(self._socket, [json.dumps(document).encode()], list(descriptors))

    def report(self) -> Report | None:
        """The next report; None once the zygote has ended."""
        content: bytes = b""
        descriptors: list[int] = []
        with suppress(ConnectionError):
            content, descriptors, _, _ = socket.recv_fds(self._socket, _LONGEST, 1)
        if not content:
            return None
        document = json.loads(content)
        if "exited" in document:
            return Exited(document["exited"], document["code"])
        if "failed" in document:
            return NotForked(document["failed"], document["error"])
        return Forked(document["forked"], document["pid"], descriptors[0])

    def end(self) -> int:
        """Have it kill what it has forked, and end; return its exit code."""
        self._socket.close()
        try:
            return self._popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            return self._popen.wait()


class StoreHost:
    """A process that serves one store a generation; see :mod:`paceline.elastic.store_host`."""

    def __init__(self, zygote: ForkServer) -> None:
        self._pidfd: int | None = None
        self._owed = 0  # commands that were not answered yet
        self._patience_ends = math.inf
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            zygote.host(theirs.fileno())

    def fileno(self) -> int:
        """The descriptor that reads an end of file when the host has ended, for a selector."""
        return self._socket.fileno()

    def open(self, generation: int, address: str) -> int:
        """Serve a store for this generation; return its port, to which members may connect at once."""
        with socket.create_server((address, 0), backlog=128) as listener:
            self._tell({"open": generation}, [listener.fileno()])
            port: int = listener.getsockname()[1]
        return port

    @property
    def deadline(self) -> float:
        """When the host should have done what it was told, by the monotonic clock."""
        return self._patience_ends if self._owed and self._pidfd is not None else math.inf

    def runs(self, pidfd: int) -> None:
        """It was forked; ``pidfd`` is its own now."""
        self._pidfd = pidfd
        self._patience_ends = time.monotonic() + _SERVED_S

    def report(self) -> bool:
        """Take note of what it reports; False once it has ended."""
        content = b""
        with suppress(ConnectionError):
            content = self._socket.recv(_LONGEST)
        if content:
            self._owed -= 1
        return bool(content)

    def close(self, generation: int) -> None:
        """Serve it no longer, and reset who is connected to it."""
        self._tell({"close": generation}, [])

    def end(self) -> None:
        """End the host, even where it hangs; its clients are reset."""
        self._socket.close()
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._pidfd = None

    def _tell(self, command: Mapping[str, int], descriptors: Sequence[int]) -> None:
        self._patience_ends = time.monotonic() + _SERVED_S
        self._owed += 1
        # Where the host has died, the members' connections are refused, and they ask again.
        with suppress(ConnectionError):
            socket.send_fds(self._socket, [json.dumps(command).encode()], list(descriptors))
