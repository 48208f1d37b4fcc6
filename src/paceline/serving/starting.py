"""How a server gets the processes of its replicas: forked, or from a fresh interpreter."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Protocol

from paceline.errors import ServingError
from paceline.serving.servable import Source

_LONGEST = 4096


class Process(Protocol):
    """A replica's process, however it was started."""

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    async def wait(self) -> object:
        """Return when it has ended."""
        ...

    def kill(self) -> None:
        """End it now; nothing happens where it has ended."""
        ...


class _Fresh:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    async def wait(self) -> object:
        return await self._process.wait()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)


class _Forked:
    """A process that is not our child, by its pidfd: its number may be another's one day."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._on_end)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._ended.set()

    async def wait(self) -> object:
        return await self._ended.wait()

    def kill(self) -> None:
        if not self._ended.is_set():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


class Starter:
    """Starts the replicas' processes of one server.

    Those that compute with torch on CPUs are forked by a process that has imported it, which is started with
    the first of them, and again should it die. CUDA does not survive a fork, and onnxruntime is imported at
    once: these get fresh interpreters.
    """

    def __init__(self, threads: int) -> None:
        """``threads`` of each replica."""
        self._threads = threads
        self._server: asyncio.subprocess.Process | None = None
        self._requests: socket.socket | None = None
        self._turn = asyncio.Lock()

    async def start(self, source: Source, device: str, channel: socket.socket) -> Process:
        """Start a process that serves the other end of ``channel``.

        Raises:
            ServingError: no process could be forked.
        """
        if source.kind == "onnx" or device != "cpu" or not hasattr(os, "pidfd_open"):
            return _Fresh(await self._exec("replica", channel))
        async with self._turn:
            try:
                return await self._fork(source.kind, channel)
            except ConnectionError:
                await self._end_server()
            try:
                return await self._fork(source.kind, channel)
            except ConnectionError:
                await self._end_server()
                raise ServingError(
                    "the process that forks replicas died; what it printed is above."
                ) from None

    async def close(self) -> None:
        """End the process that forks; what it has forked goes on."""
        async with self._turn:
            await self._end_server()

    async def _exec(self, module: str, channel: socket.socket, *words: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"paceline.serving.{module}", str(channel.fileno()), *words),
            pass_fds=(channel.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": str(self._threads)},
            # A Ctrl-C in the terminal is for the server alone, which drains.
            start_new_session=True,
        )

    async def _fork(self, kind: str, channel: socket.socket) -> Process:
        if self._requests is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            self._requests = ours
            with theirs:
                self._server = await self._exec("fork_server", theirs, kind)
        requests = self._requests
        try:
            socket.send_fds(requests, [b"f"], [channel.fileno()])
            await _readable(requests)
        except asyncio.CancelledError:
            # Its answer would be taken for the next one's.
            await self._end_server()
            raise
        content, descriptors, _, _ = socket.recv_fds(requests, _LONGEST, 1)
        if not content:
            raise ConnectionError
        if not descriptors:
            raise ServingError(f"a replica's process cannot be forked: {content.decode()}")
        return _Forked(int(content), descriptors[0])

    async def _end_server(self) -> None:
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if self._server is not None:
            # It has nothing to lose, and may be in the middle of its imports.
            with suppress(ProcessLookupError):
                self._server.kill()
            await self._server.wait()
            self._server = None


async def _readable(channel: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(channel, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(channel)
