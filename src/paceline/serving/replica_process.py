"""One replica as the server sees it: a process, a channel, and the batches that it computes."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import socket
from typing import Any

from paceline.errors import ServingError
from paceline.serving import frames
from paceline.serving.options import ServingOptions
from paceline.serving.servable import Array, Arrays, ModelSpec, Source
from paceline.serving.starting import Process, Starter

_READ_LIMIT = 4 * 2**20
_LAST_WORDS_S = 0.2


class ReplicaDied(Exception):
    """The process has gone, and a batch was not answered.

    Attributes:
        computing: whether it was at work on the batch, which may then be the cause.
    """

    def __init__(self, *, computing: bool) -> None:
        super().__init__()
        self.computing = computing


class BatchFailed(Exception):
    """The model raised on a batch; the process goes on."""


class ReplicaProcess:
    """A process that has loaded a model. Make one with :meth:`start`.

    Attributes:
        in_flight: batches that it was sent and has not answered.
    """

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
        """Of its process."""
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
        cls, source: Source, spec: ModelSpec, device: str, options: ServingOptions, starter: Starter
    ) -> ReplicaProcess:
        """Start a process and wait until it has loaded its model.

        Raises:
            ServingError: it could not; says why.
        """
        try:
            async with asyncio.timeout(options.startup_timeout_s):
                return await cls._start(source, spec, device, options, starter)
        except TimeoutError:
            raise ServingError(
                f"{spec.name}: a replica did not load its model within {options.startup_timeout_s:g} s. "
                "Give it longer with --startup-timeout."
            ) from None

    @classmethod
    async def _start(
        cls, source: Source, spec: ModelSpec, device: str, options: ServingOptions, starter: Starter
    ) -> ReplicaProcess:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await starter.start(source, device, theirs)
            reader, writer = await asyncio.open_connection(sock=ours, limit=_READ_LIMIT)
        except BaseException:
            # A process that was started sees it, and ends.
            ours.close()
            raise
        replica = cls(process, reader, writer, options.hang_timeout_s)
        try:
            await replica._load(source, spec, device, options)
        except BaseException:
            await replica.end()
            raise
        replica._listening = asyncio.create_task(replica._listen())
        return replica

    async def _load(self, source: Source, spec: ModelSpec, device: str, options: ServingOptions) -> None:
        header = {
            "source": dataclasses.asdict(source),
            "spec": dataclasses.asdict(spec),
            "device": device,
            "threads": options.threads,
            "max_batch": options.max_batch,
        }
        try:
            self._writer.writelines(frames.encode(header))
            answer, _ = await self._receive()
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ServingError(
                f"{spec.name}: a replica's process died while it loaded its model; what it printed is above."
            ) from None
        if "failed" in answer:
            raise ServingError(f"{spec.name} cannot be loaded: {answer['failed']}")

    async def _receive(self) -> tuple[dict[str, Any], dict[str, Array]]:
        lengths = await self._reader.readexactly(frames.LENGTHS.size)
        text_length, payload_length = frames.LENGTHS.unpack(lengths)
        text = await self._reader.readexactly(text_length)
        return frames.decode(text, await self._reader.readexactly(payload_length))

    async def predict(self, inputs: Arrays) -> dict[str, Array]:
        """Compute a batch.

        Raises:
            BatchFailed: the model raised.
            ReplicaDied: the process died, or was killed because it took longer than a batch may.
        """
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
                    answer.set_exception(BatchFailed(header["error"]))
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
        """Break off the channel when the process ends: what the model's code has started may hold it open."""
        await self._process.wait()
        # What it has said last is read first.
        await asyncio.sleep(_LAST_WORDS_S)
        self._writer.transport.abort()

    async def wait_gone(self) -> None:
        """Return when the process has closed its channel: it has died."""
        await self._gone.wait()

    def kill(self) -> None:
        """End the process now."""
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
