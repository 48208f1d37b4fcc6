"""How long a replica may take, by a clock of the test's own."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

import numpy as np
import pytest
from plugins.serving.tests.clock import Clock

from paceline_serving import frames
from paceline_serving.model import ModelLocation, ModelSpec, ServedModel, ServingOptions
from paceline_serving.replica_process import ReplicaDied, ReplicaProcess, ReplicaStarter

INPUTS = {"x": np.zeros((1, 1), np.float32)}
SOURCE = ModelLocation(package="nowhere", digest="0" * 64, kind="pt2")
SPEC = ModelSpec(name="m", version="1", inputs={}, outputs={})


async def pass_by(clock: Clock, seconds: float) -> None:
    """Let so much time pass at once, and then whatever is due happen."""
    clock.now += seconds
    for _ in range(10):
        await asyncio.sleep(0)


class Puppet(ReplicaStarter):
    """Starts a process that answers when it is told to, and none else."""

    pid = 0

    def __init__(self) -> None:
        self.killed = asyncio.Event()

    async def start(self, source: ModelLocation, device: str, channel: socket.socket) -> Puppet:
        self.channel = channel.dup()
        frames.send(self.channel, frames.encode({"ready": 0, "exact_sizes": ()}))
        return self

    def answer(self, number: int) -> None:
        frames.send(self.channel, frames.encode({"id": number}, INPUTS))

    async def wait(self) -> object:
        return await self.killed.wait()

    def kill(self) -> None:
        self.killed.set()


async def started() -> tuple[Puppet, ReplicaProcess]:
    """A replica whose batches may take 4 s."""
    puppet = Puppet()
    options = ServingOptions(hang_timeout_s=4.0)
    return puppet, await ReplicaProcess.start(ServedModel(SOURCE, SPEC), "cpu", options, puppet)


async def end(puppet: Puppet, replica: ReplicaProcess) -> None:
    await replica.end()
    puppet.channel.close()


def test_a_batch_that_was_sent_ahead_has_its_own_time() -> None:
    """Together two batches take longer than one may, and neither does; then the second does."""
    clock = Clock()

    async def run() -> None:
        puppet, replica = await started()
        first, second = (asyncio.create_task(replica.predict(INPUTS)) for _ in range(2))
        await pass_by(clock, 3.0)
        puppet.answer(0)
        await first
        await pass_by(clock, 3.0)
        assert not puppet.killed.is_set()
        await pass_by(clock, 1.5)
        await pass_by(clock, 1.0)  # in which an answer that is there would be read
        assert puppet.killed.is_set()
        await pass_by(clock, 1.0)
        with pytest.raises(ReplicaDied):
            await second
        await end(puppet, replica)

    with closing(clock):
        clock.run_until_complete(run())


def test_an_answer_that_came_while_the_server_stood_still_is_taken() -> None:
    clock = Clock()

    async def run() -> None:
        puppet, replica = await started()
        answer = asyncio.create_task(replica.predict(INPUTS))
        await asyncio.sleep(0)
        puppet.answer(0)
        await pass_by(clock, 60.0)
        assert (await answer).keys() == INPUTS.keys()
        await pass_by(clock, 60.0)
        assert not puppet.killed.is_set()
        puppet.kill()
        await end(puppet, replica)

    with closing(clock):
        clock.run_until_complete(run())
