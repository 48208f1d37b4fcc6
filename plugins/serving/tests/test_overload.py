"""More than a server can do, tried with a replica that stands still: refused, given up and forgotten."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable

import httpx
import numpy as np
from plugins.serving.tests.conftest import Server, json_request
from plugins.serving.tests.load import PATH

PIXELS = np.zeros((8, 1, 28, 28), int)
BATCH = json.dumps(json_request(shape=list(PIXELS.shape), data=PIXELS.ravel().tolist()))


def test_a_full_queue_a_deadline_and_a_client_that_goes(start: Callable[..., Server]) -> None:
    words = ("--max-queue", "64", "--max-batch", "8", "--timeout", "2min", "--hang-timeout", "5min")
    server = start("fashion-mnist@prod", *words)
    [replica] = server.replicas()
    replica.send_signal(signal.SIGSTOP)
    try:
        asyncio.run(_ask(server, lambda: replica.send_signal(signal.SIGCONT)))
    finally:
        replica.send_signal(signal.SIGCONT)


async def _ask(server: Server, go_on: Callable[[], None]) -> None:
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=server.url, timeout=150, limits=limits) as client:
        # Two batches are with the replica, and then 56 rows wait: there is room for one request more.
        held = [asyncio.create_task(client.post(PATH, content=BATCH)) for _ in range(5)]
        await _until(client, 'waiting_rows{model="fashion-mnist"} 24.0')
        held += [asyncio.create_task(client.post(PATH, content=BATCH)) for _ in range(4)]
        await _until(client, 'waiting_rows{model="fashion-mnist"} 56.0')

        late = await client.post(PATH, json=json_request(), headers={"Request-Timeout-Ms": "50"})
        assert late.status_code == 504
        assert "50 ms" in late.json()["error"]

        # What nobody waits for any more does not keep others out.
        gone = asyncio.create_task(client.post(PATH, json=json_request()))
        await _until(client, 'waiting_rows{model="fashion-mnist"} 57.0')
        gone.cancel()
        await _until(client, 'requests_total{code="499",model="fashion-mnist"} 1.0')
        await _until(client, 'waiting_rows{model="fashion-mnist"} 56.0')
        held.append(asyncio.create_task(client.post(PATH, content=BATCH)))
        await _until(client, 'waiting_rows{model="fashion-mnist"} 64.0')

        refused = await client.post(PATH, content=BATCH)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert "the queue is full with " in refused.json()["error"]
        assert not any(task.done() for task in held)

        go_on()
        assert {(await task).status_code for task in held} == {200}
        await _until(client, 'waiting_rows{model="fashion-mnist"} 0.0')
        # What nobody waits for was not computed: ten batches of eight rows.
        assert 'batch_rows_sum{model="fashion-mnist"} 80.0' in (await client.get("/metrics")).text


async def _until(client: httpx.AsyncClient, line: str) -> None:
    async with asyncio.timeout(60):
        while line not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.01)
