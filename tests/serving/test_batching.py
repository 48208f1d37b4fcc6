"""How many rows may wait, by a clock of the test's own."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from paceline.serving.batching import Batcher
from paceline.serving.failures import Overloaded
from paceline.serving.options import ServingOptions
from paceline.serving.servable import Array, Arrays

BATCH = {"x": np.zeros((4, 1), np.float32)}


class Clock(asyncio.SelectorEventLoop):
    """An event loop in which time passes when a replica says so."""

    now = 0.0

    def time(self) -> float:
        return self.now


class Replica:
    """Takes ``seconds`` for a batch, and begins none while it is held."""

    gone = False

    def __init__(self, clock: Clock) -> None:
        self.in_flight = 0
        self.seconds = 1.0
        self.released = asyncio.Event()
        self.released.set()
        self._clock = clock

    async def predict(self, inputs: Arrays) -> dict[str, Array]:
        self.in_flight += 1
        await self.released.wait()
        self._clock.now += self.seconds
        self.in_flight -= 1
        return dict(inputs)


async def most_waiting(batcher: Batcher, replica: Replica) -> int:
    """Rows that wait when the next are refused."""
    replica.released.clear()
    asked = []
    while batcher.refusal(4) is None:
        asked.append(batcher.submit(BATCH))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    waiting = batcher.waiting_rows
    with pytest.raises(Overloaded, match=f"{waiting} rows wait already"):
        batcher.submit(BATCH)
    replica.released.set()
    await asyncio.gather(*asked)
    return waiting


@pytest.mark.parametrize(("slower", "most"), [(1, 40), (2, 20), (0.5, 40), (100, 8)])
def test_fewer_may_wait_while_batches_take_longer_than_at_best(slower: float, most: int) -> None:
    """So that nobody waits longer; but two batches always may, or the replica would be idle."""

    async def run(clock: Clock) -> None:
        batcher = Batcher(ServingOptions(max_batch=4, max_queue=40), lambda rows, seconds: None)
        replica = Replica(clock)
        batcher.add(replica)
        assert await most_waiting(batcher, replica) == 40
        for seconds in (1.0, slower):
            replica.seconds = seconds
            for _ in range(100):
                await batcher.submit(BATCH)
        assert await most_waiting(batcher, replica) == most

    clock = Clock()
    try:
        clock.run_until_complete(run(clock))
    finally:
        clock.close()
