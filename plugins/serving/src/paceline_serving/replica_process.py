"""A replica's process from outside: started, asked, and ended."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from paceline.core.errors import ServingError
from paceline.core.fork_server import Forked, ForkServer, NotForked
from paceline_serving import frames
from paceline_serving.model import Array, Arrays, ModelLocation, ServedModel, ServingOptions

# --- How a server gets the processes of its replicas: forked, or from a fresh interpreter ---


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

    async def wait(self) -> None:
        await self._ended.wait()

    def kill(self) -> None:
        if not self._ended.is_set():
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


Process = asyncio.subprocess.Process | _Forked
"""A replica's process, however it was started."""

_PYTHON = (sys.executable, "-P", "-m")  # -P: no library comes from the current directory


class ReplicaStarter:
    """Starts the replicas' processes of one server.

    Those that compute with torch on CPUs are forked by a process that has imported it, which is started with
    the first of them, and again should it die. CUDA does not survive a fork, and onnxruntime is imported at
    once: these get fresh interpreters.
    """

    def __init__(self, threads: int) -> None:
        """``threads`` of each replica."""
        self._threads = threads
        self._fork_server: ForkServer | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # one request to fork at a time

    async def start(self, source: ModelLocation, device: str, channel: socket.socket) -> Process:
        """Start a process that serves the other end of ``channel``."""
        if source.kind == "onnx" or device != "cpu" or not hasattr(os, "pidfd_open"):
            return await asyncio.create_subprocess_exec(
                *(*_PYTHON, "paceline_serving.replica", str(channel.fileno())),
                pass_fds=(channel.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env=self._env(),
                # A Ctrl-C in the terminal is for the server alone, which drains.
                start_new_session=True,
            )
        forked = await asyncio.to_thread(self._fork, source.kind, channel.dup())
        # One that is not wanted any more ends by itself: the other end of its channel is closed.
        return _Forked(forked.pid, forked.pidfd)

    def close(self) -> None:
        """End the process that forks; its children continue."""
        self._is_closed = True
        if (fork_server := self._fork_server) is not None:
            # It has nothing to lose, and may be in the middle of its imports.
            fork_server.kill()

    def _env(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": str(self._threads)}

    def _fork(self, kind: str, channel: socket.socket) -> Forked:
        with channel, self._lock:
            for _ in range(2):
                if self._fork_server is None:
                    self._fork_server = ForkServer((*_PYTHON, "paceline_serving.fork_server", kind), self._env())
                if not self._is_closed:
                    self._fork_server.fork(0, [channel.fileno()])
                    while (report := self._fork_server.report()) is not None:
                        if isinstance(report, Forked):
                            return report
                        if isinstance(report, NotForked):
                            raise ServingError(f"a replica's process cannot be forked: {report.error}")
                        # That a replica has ended, its pidfd has said.
                self._fork_server.kill()
                self._fork_server = None
                if self._is_closed:
                    break
        raise ServingError("the process that forks replicas died; its output is above.")


# --- One replica as the server sees it: a process, a channel, and the batches that it computes ---


_READ_LIMIT = 4 * 2**20
_LAST_WORDS_S = 0.2


class ReplicaDied(Exception):
    """The process has gone, and a batch was not answered.

    Attributes:
        computing: whether it computed the batch, which may then be the cause.
    """

    def __init__(self, *, computing: bool) -> None:
        super().__init__()
        self.computing = computing


class BatchFailed(Exception):
    """The model raised on a batch; the process continues.

    Attributes:
        is_invalid: whether the batch is the cause: it holds an index that the model does not have.
    """

    def __init__(self, message: str, *, is_invalid: bool = False) -> None:
        super().__init__(message)
        self.is_invalid = is_invalid


def load_header(model: ServedModel, device: str, options: ServingOptions) -> dict[str, Any]:
    """Return what :func:`~paceline_serving.replica.load_warm` loads."""
    return {
        "source": dataclasses.asdict(model.source),
        "spec": dataclasses.asdict(model.spec.program),
        "device": device,
        "threads": options.threads,
        "max_batch": options.max_batch,
        "exact": options.exact,
    }


class ReplicaProcess:
    """A process that has loaded a model. Make one with :meth:`start`.

    Attributes:
        exact_sizes: with ``--exact``, the sizes of the batches that it computes.
    """

    exact_sizes: tuple[int, ...] = ()

    def __init__(
        self,
        process: Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        hang_timeout_s: float,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._hang_timeout_s = hang_timeout_s
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[dict[str, Array]]] = {}
        self._hang: asyncio.TimerHandle | None = None
        self._gone = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None
        self._watching = asyncio.create_task(self._watch())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def in_flight(self) -> int:
        """Batches that it was sent and has not answered."""
        return len(self._answers)

    @property
    def gone(self) -> bool:
        """Whether it can compute no more."""
        return self._gone.is_set() or self._writer.transport.is_closing()

    @classmethod
    async def start(
        cls, model: ServedModel, device: str, options: ServingOptions, starter: ReplicaStarter
    ) -> ReplicaProcess:
        """Start a process and wait until it has loaded its model; a ServingError says why it could not."""
        ours, theirs = socket.socketpair()
        try:
            async with asyncio.timeout(options.startup_timeout_s):
                try:
                    with theirs:
                        process = await starter.start(model.source, device, theirs)
                    reader, writer = await asyncio.open_connection(sock=ours, limit=_READ_LIMIT)
                except BaseException:
                    # A process that was started sees it, and ends.
                    ours.close()
                    raise
                replica = cls(process, reader, writer, options.hang_timeout_s)
                try:
                    await replica._load(model.spec.name, load_header(model, device, options))
                except BaseException:
                    await replica.end()
                    raise
        except TimeoutError:
            raise ServingError(
                f"{model.spec.name}: a replica did not load its model within {options.startup_timeout_s:g} s. "
                "Give it longer with --startup-timeout."
            ) from None
        replica._listening = asyncio.create_task(replica._listen())
        return replica

    async def _load(self, name: str, header: Mapping[str, Any]) -> None:
        try:
            self._writer.writelines(frames.encode(header))
            answer, _ = await self._receive()
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ServingError(
                f"{name}: a replica's process died while it loaded its model; its output is above."
            ) from None
        if "failed" in answer:
            raise ServingError(f"{name} cannot be loaded: {answer['failed']}")
        self.exact_sizes = tuple(answer["exact_sizes"])

    async def _receive(self) -> tuple[dict[str, Any], dict[str, Array]]:
        lengths = await self._reader.readexactly(frames.LENGTHS.size)
        text_length, payload_length = frames.LENGTHS.unpack(lengths)
        text = await self._reader.readexactly(text_length)
        return frames.decode(text, await self._reader.readexactly(payload_length))

    async def predict(self, inputs: Arrays) -> dict[str, Array]:
        """Compute a batch; see :class:`~paceline_serving.batching.BatchExecutor`."""
        if self.gone:
            raise ReplicaDied(computing=False)
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Array]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        if self._hang is None:
            self._expect_answer()
        try:
            self._writer.writelines(frames.encode({"id": number}, inputs))
            return await answer
        finally:
            self._answers.pop(number, None)

    def _expect_answer(self) -> None:
        """Measure from now on how long a batch takes; one that was sent ahead waits its turn."""
        if self._hang is not None:
            self._hang.cancel()
        loop = asyncio.get_running_loop()
        self._hang = loop.call_later(self._hang_timeout_s, self._overdue) if self._answers else None

    def _overdue(self) -> None:
        # Perhaps it is this process that stood still: an answer that has come meanwhile is read first.
        self._hang = asyncio.get_running_loop().call_later(_LAST_WORDS_S, self.kill)

    async def _listen(self) -> None:
        try:
            while True:
                header, outputs = await self._receive()
                answer = self._answers.pop(header["id"], None)
                self._expect_answer()
                if answer is None or answer.done():
                    continue
                if "error" in header:
                    answer.set_exception(BatchFailed(header["error"], is_invalid=header["is_invalid"]))
                else:
                    answer.set_result(outputs)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._gone.set()
            if self._hang is not None:
                self._hang.cancel()
            # It computes in the order in which it was sent.
            for position, answer in enumerate(self._answers.values()):
                if not answer.done():
                    answer.set_exception(ReplicaDied(computing=position == 0))

    async def _watch(self) -> None:
        """Close the channel when the process ends, because children of the model's code may hold it open."""
        await self._process.wait()
        # What it has said last is read first.
        await asyncio.sleep(_LAST_WORDS_S)
        self._writer.transport.abort()

    async def wait_gone(self) -> None:
        await self._gone.wait()

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # it has ended
            self._process.kill()

    async def end(self) -> None:
        """Close the channel, upon which the process ends; kill it if it does not within some seconds."""
        self._writer.close()
        try:
            async with asyncio.timeout(5):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()
        tasks = [task for task in (self._watching, self._listening) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
