"""How many rows may wait, by a clock of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from plugins.serving.tests.clock import Clock

from paceline_serving.batching import Batcher, Overloaded
from paceline_serving.model import Array, Arrays, ServingOptions

BATCH = {"x": np.zeros((4, 1), np.float32)}


class Replica:
    """Takes ``seconds`` for a batch, one after the other."""

    gone = False

    def __init__(self, clock: Clock) -> None:
        self.in_flight = 0
        self.seconds = 1.0
        self._turn = asyncio.Lock()
        self._clock = clock

    async def predict(self, inputs: Arrays) -> dict[str, Array]:
        self.in_flight += 1
        async with self._turn:
            await asyncio.sleep(0)
            self._clock.now += self.seconds
        self.in_flight -= 1
        return dict(inputs)


async def crowd(batcher: Batcher, batches: int) -> int:
    """Keep the queue full until so many batches were taken; how many rows wait then."""
    for _ in range(batches):
        while batcher.refusal(4) is None:
            batcher.submit(BATCH)
        while batcher.refusal(4) is not None:
            await asyncio.sleep(0)
    while batcher.refusal(4) is None:
        batcher.submit(BATCH)
    waiting = batcher.waiting_rows
    with pytest.raises(Overloaded, match=f"the queue is full with {waiting} rows"):
        batcher.submit(BATCH)
    return waiting


def run_on_a_clock(run: Callable[[Clock], Coroutine[Any, Any, None]]) -> None:
    """Run a test in an event loop whose time the test decides."""
    clock = Clock()
    try:
        clock.run_until_complete(run(clock))
    finally:
        clock.close()


@pytest.mark.parametrize(("slower", "most"), [(1, 40), (2, 20), (0.5, 40), (100, 8)])
def test_fewer_may_wait_while_batches_take_longer_than_at_best(slower: float, most: int) -> None:
    """So that nobody waits longer; but two batches always may, or the replica would be idle."""

    async def run(clock: Clock) -> None:
        batcher = Batcher(ServingOptions(max_batch=4, max_queue=40), lambda rows, seconds: None)
        replica = Replica(clock)
        batcher.add(replica)
        assert await crowd(batcher, 100) == 40
        replica.seconds = slower
        assert await crowd(batcher, 300) == most
        await batcher.finish()
        await batcher.submit({"x": BATCH["x"][:1]})
        await batcher.finish()
        assert await crowd(batcher, 0) == 40, "the next crowd finds all the room again"
        await batcher.finish()

    run_on_a_clock(run)


def test_a_request_of_many_batches_takes_its_turn_piece_by_piece() -> None:
    inputs = {"x": np.arange(10_001, dtype=np.float32).reshape(-1, 1)}

    async def run(clock: Clock) -> None:
        batcher = Batcher(ServingOptions(max_batch=4, max_queue=40), lambda rows, seconds: None)
        asked = batcher.submit(inputs)
        assert batcher.waiting_rows == 10_001
        await asyncio.sleep(0)
        assert batcher.waiting_rows == 10_001
        assert len(batcher._queue) <= 64, "each piece in the queue takes memory"
        with pytest.raises(Overloaded):
            batcher.submit(BATCH)
        asked.cancel()
        await asyncio.wait([asked])
        await asyncio.sleep(0)
        assert batcher.waiting_rows == 0
        batcher.submit(inputs).cancel()  # before it has begun
        for _ in range(3):
            await asyncio.sleep(0)
        assert batcher.waiting_rows == 0
        batcher.add(Replica(clock))
        np.testing.assert_array_equal((await batcher.submit(inputs))["x"], inputs["x"])
        assert batcher.waiting_rows == 0
        await batcher.finish()

    run_on_a_clock(run)
