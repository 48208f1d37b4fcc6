"""Predictions of many rows: by replicas of this machine, or by a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import numpy as np

from paceline.errors import ServingError
from paceline.serving.chunks import Journal
from paceline.serving.client import Client
from paceline.serving.deployment import LocalDeployment
from paceline.serving.failures import RequestFailure
from paceline.serving.options import ServingOptions
from paceline.serving.servable import Array, Arrays, Opened
from paceline.serving.starting import Starter

Predict = Callable[[Arrays], Awaitable[dict[str, Array]]]
Engine = AbstractAsyncContextManager[Predict]
OnRows = Callable[[int], None]


@asynccontextmanager
async def replicas(opened: Opened, options: ServingOptions) -> AsyncIterator[Predict]:
    """A package's own replicas, for as long as this lasts."""
    starter = Starter(options.threads)
    deployment = LocalDeployment(starter, opened, options)

    async def predict(inputs: Arrays) -> dict[str, Array]:
        try:
            return await deployment.submit(inputs)
        except RequestFailure as failure:
            raise ServingError(str(failure)) from failure

    try:
        await deployment.start()
        yield predict
    finally:
        await deployment.close()
        await starter.close()


@asynccontextmanager
async def server(url: str, model: str, token_file: Path | None, connections: int) -> AsyncIterator[Predict]:
    """A server, through so many connections."""
    clients = [Client(url, token_file=token_file) for _ in range(connections)]
    free: asyncio.Queue[Client] = asyncio.Queue()
    for client in clients:
        free.put_nowait(client)

    async def predict(inputs: Arrays) -> dict[str, Array]:
        client = await free.get()
        try:
            return await asyncio.to_thread(client.infer, model, inputs)
        finally:
            free.put_nowait(client)

    try:
        yield predict
    finally:
        for client in clients:
            client.__exit__(None, None, None)


async def predict_into(
    journal: Journal, arrays: Arrays, engine: Engine, concurrency: int, on_rows: OnRows
) -> None:
    """Compute the chunks of a job that are missing, several at once."""
    on_rows(sum(journal.chunks[number][1] - journal.chunks[number][0] for number in journal.done))
    missing = iter([n for n in range(len(journal.chunks)) if n not in journal.done])
    async with engine as predict, asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(_work(missing, journal, arrays, predict, on_rows))


async def _work(
    missing: Iterator[int], journal: Journal, arrays: Arrays, predict: Predict, on_rows: OnRows
) -> None:
    for number in missing:
        start, stop = journal.chunks[number]
        inputs = {name: np.ascontiguousarray(array[start:stop]) for name, array in arrays.items()}
        journal.write(number, await predict(inputs))
        on_rows(stop - start)


async def predict_all(arrays: Arrays, engine: Engine, chunk_rows: int, on_rows: OnRows) -> dict[str, Array]:
    """Compute all rows and return their outputs, nothing being kept on the way."""
    total = len(next(iter(arrays.values())))
    answers = []
    async with engine as predict:
        for start in range(0, total, chunk_rows):
            inputs = {name: np.ascontiguousarray(a[start : start + chunk_rows]) for name, a in arrays.items()}
            answers.append(await predict(inputs))
            on_rows(len(next(iter(inputs.values()))))
    return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}
