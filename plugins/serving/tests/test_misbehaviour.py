"""A model that dies, fails, sleeps and leaves children, behind a server of one replica."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from plugins.serving.tests import puppet
from plugins.serving.tests.conftest import Server, start_server
from plugins.serving.tests.packages import put_files
from safetensors.torch import save
from tests.processes import Processes, children

PATH = "/v2/models/puppet/infer"


@pytest.fixture(scope="module")
def puppets(module_processes: Processes, registry: Path, serving_env: dict[str, str]) -> Server:
    task = puppet.PuppetTask()
    inference = task.inference_signature(task.build_model())
    put_files(registry, inference, save({}), {}, name="puppet")
    words = ("--task", f"{puppet.__file__}:PuppetTask", "--max-batch", "4")
    words = (*words, "--hang-timeout", "20s", "--timeout", "2min")
    return start_server(module_processes, serving_env, "puppet@prod", *words, shared=True)


def row(*acts: float) -> dict[str, object]:
    tensor = {"name": "act", "datatype": "FP32", "shape": [len(acts), 1], "data": list(acts)}
    return {"inputs": [tensor]}


def ask(server: Server, *requests: dict[str, object], pause_s: float = 0) -> list[httpx.Response]:
    """Send all of them, each on a connection of its own."""

    async def send() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            sent = []
            for request in requests:
                sent.append(asyncio.create_task(client.post(PATH, json=request)))
                await asyncio.sleep(pause_s)
            return await asyncio.gather(*sent)

    return asyncio.run(send())


def pid_of(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["outputs"][0]["data"][0])


@pytest.mark.parametrize("act", [puppet.DIE, puppet.LOSE_GPU])
def test_what_kills_each_replica_is_given_up_and_nothing_else_is(puppets: Server, act: float) -> None:
    [before] = ask(puppets, row(0))
    poison, *others = ask(puppets, row(act), *[row(0)] * 6, pause_s=0.02)
    assert poison.status_code == 503
    assert "died" in poison.json()["error"]
    assert {answer.status_code for answer in others} == {200}
    assert pid_of(others[-1]) != pid_of(before)


def test_what_the_model_cannot_compute_fails_by_itself(puppets: Server) -> None:
    [before] = ask(puppets, row(0))
    # While the first is computed, the others gather, and are then one batch.
    wrong = (row(puppet.FAIL), row(puppet.WRONG_INDEX))
    sleeper, *others = ask(puppets, row(0.5), *[row(0)] * 2, *wrong, row(0), pause_s=0.02)
    assert [answer.status_code for answer in (sleeper, *others)] == [200, 200, 200, 500, 400, 200]
    assert "ValueError: it is told to fail" in others[2].json()["error"]
    assert "an index in this input is out of the model's range" in others[3].json()["error"]
    assert pid_of(others[4]) == pid_of(before)


@pytest.mark.slow
def test_a_batch_that_takes_too_long_is_given_up(puppets: Server) -> None:
    [stuck] = ask(puppets, row(1000))
    assert stuck.status_code == 503
    [after] = ask(puppets, row(0))
    assert after.status_code == 200


def test_a_child_of_a_dead_replica_does_not_keep_it(puppets: Server) -> None:
    """What the model's code has forked holds the channel open, so that it never ends."""
    [answer] = ask(puppets, row(puppet.LEAVE_A_CHILD))
    child = pid_of(answer)
    try:
        [before] = ask(puppets, row(0))
        os.kill(pid_of(before), signal.SIGKILL)
        [after] = ask(puppets, row(0))
        assert pid_of(after) != pid_of(before)
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_process_that_forks_is_replaced_too(puppets: Server, wait_until: Callable[..., None]) -> None:
    before = puppets.fork_server()
    before.send_signal(signal.SIGKILL)
    [alive] = ask(puppets, row(0))
    assert alive.status_code == 200, "a replica does not need who has forked it"
    os.kill(pid_of(alive), signal.SIGKILL)
    [after] = ask(puppets, row(0))
    assert pid_of(after) != pid_of(alive)
    assert puppets.fork_server() != before


def test_control_c_while_replicas_are_started_says_nothing(
    run_processes: Processes, serving_env: dict[str, str], wait_until: Callable[..., None]
) -> None:
    words = ("fashion-mnist@prod", "--port", "0", "--replicas", "2")
    popen = run_processes.start([sys.executable, "-m", "paceline", "serve", *words], env=serving_env)
    wait_until(lambda: children(popen.pid), "the first process of its own", timeout_s=120)
    os.killpg(popen.pid, signal.SIGINT)
    done = run_processes.finish(popen, timeout_s=120)
    assert "Traceback" not in done.stderr
    assert "KeyboardInterrupt" not in done.stderr


def test_a_second_control_c_waits_for_no_model(
    run_processes: Processes, puppets: Server, serving_env: dict[str, str], wait_until: Callable[..., None]
) -> None:
    """The first one waits for what is computed, here for five minutes."""
    words = ("--task", f"{puppet.__file__}:PuppetTask", "--hang-timeout", "10min", "--timeout", "10min")
    server = start_server(run_processes, serving_env, "puppet@prod", *words, "--drain-delay", "1ms")
    [replica] = server.replicas()

    async def interrupt() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            asked = asyncio.create_task(client.post(PATH, json=row(300)))
            while 'paceline_waiting_rows{model="puppet"} 0.0' not in (await client.get("/metrics")).text:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            server.popen.send_signal(signal.SIGINT)
            await asyncio.sleep(0.5)
            assert server.popen.poll() is None
            server.popen.send_signal(signal.SIGINT)
            with pytest.raises(httpx.RemoteProtocolError):
                await asked

    asyncio.run(interrupt())
    ended = run_processes.finish(server.popen, timeout_s=60)
    assert ended.returncode == 0
    assert "Traceback" not in ended.stderr
    wait_until(lambda: not replica.is_running(), "its replica to end")
