"""One replica as the server sees it: a process, a channel, and the batches that it computes."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from paceline.errors import ServingError
from paceline.serving import frames
from paceline.serving.options import ServingOptions
from paceline.serving.servable import Array, Arrays, ModelSpec, Source

_READ_LIMIT = 4 * 2**20


class ReplicaDied(Exception):
    """The process has gone; its batches were not answered."""


class BatchFailed(Exception):
    """The model raised on a batch; the process goes on."""


class ReplicaProcess:
    """A process that has loaded a model. Make one with :meth:`start`.

    Attributes:
        in_flight: batches that it was sent and has not answered.
        seconds_a_row: how long a row takes it, smoothed; 0 until it has computed one.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
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
        self._listening: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    @property
    def in_flight(self) -> int:
        """Batches that it was sent and has not answered."""
        return len(self._answers)

    @classmethod
    async def start(
        cls, source: Source, spec: ModelSpec, device: str, options: ServingOptions
    ) -> ReplicaProcess:
        """Start a process and wait until it has loaded its model.

        Raises:
            ServingError: it could not; says why.
        """
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "paceline.serving.replica", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": str(options.threads)},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours, limit=_READ_LIMIT)
        replica = cls(process, reader, writer, options.hang_timeout_s)
        try:
            async with asyncio.timeout(options.startup_timeout_s):
                await replica._load(source, spec, device, options)
        except TimeoutError:
            await replica.end()
            raise ServingError(
                f"{spec.name}: a replica did not load its model within {options.startup_timeout_s:g} s. "
                "Give it longer with --startup-timeout."
            ) from None
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
            code = await self._process.wait()
            raise ServingError(
                f"{spec.name}: a replica ended with code {code} while it loaded its model; "
                "what it printed is above."
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
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Array]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        timer = asyncio.get_running_loop().call_later(self._hang_timeout_s, self.kill)
        try:
            if self._gone.is_set():
                raise ReplicaDied
            self._writer.writelines(frames.encode({"id": number}, inputs))
            return await answer
        finally:
            timer.cancel()
            self._answers.pop(number, None)

    async def _listen(self) -> None:
        try:
            while True:
                header, outputs = await self._receive()
                answer = self._answers.pop(header["id"], None)
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
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(ReplicaDied())

    async def wait_gone(self) -> None:
        """Return when the process has closed its channel: it has died."""
        await self._gone.wait()

    def kill(self) -> None:
        """End the process now."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    async def end(self) -> None:
        """Close the channel, upon which the process ends; kill it if it does not within some seconds."""
        self._writer.close()
        try:
            async with asyncio.timeout(5):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()
        if self._listening is not None:
            self._listening.cancel()
            with suppress(asyncio.CancelledError):
                await self._listening
