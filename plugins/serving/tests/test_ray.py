"""Ray Serve: what it starts, who can reach it, another version, lost replicas and machines, and the end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from plugins.serving.tests.conftest import Server, metrics
from plugins.serving.tests.load import Load
from tests.processes import Processes, children

from paceline.core.errors import ConfigError, LaunchError
from paceline_serving.model import ServingOptions, parse_replicas
from paceline_serving.ray_serve import RayServeOptions, ray_serve, reason

MODEL = 'model="fashion-mnist"'
PATIENCE_S = 240


def replicas_of(server: Server) -> list[psutil.Process]:
    found = []
    for process in children(server.popen.pid, recursive=True):
        with suppress(psutil.NoSuchProcess, IndexError):
            if process.cmdline()[0].startswith("ray::ServeReplica"):
                found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_loopback_another_version_and_the_end(
    ray_server: Server, run_processes: Processes, serving_env: dict[str, str], wait_until: Callable[..., None]
) -> None:
    """The last to use this server, which it ends."""
    head = psutil.Process(ray_server.popen.pid)
    tree = head.children(recursive=True)
    listening: set[str] = set()
    words: set[str] = set()
    for process in (head, *tree):
        with suppress(psutil.NoSuchProcess):  # Ray ends a worker that has been idle for long
            connections = process.net_connections("tcp")
            listening |= {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
            words |= set(process.cmdline())
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
    [directory] = {Path(word.partition("=")[2]).parent for word in words if word.startswith("--temp-dir=")}
    assert directory.stat().st_mode & 0o777 == 0o700

    with Load(ray_server.url, connections=2) as load:
        wait_until(lambda: load.statuses[200] > 20, "answers before", timeout_s=120)
        done = run_processes.paceline("deploy", ray_server.url, "fashion-mnist@next", env=serving_env, timeout_s=360)
        assert done.returncode == 0, done.stderr
        wait_until(lambda: len(load.versions) == 2, "answers from the other version")
        seen = load.statuses[200]
        wait_until(lambda: load.statuses[200] > seen + 20, "answers after")
        tree = children(ray_server.popen.pid, recursive=True)
        ray_server.popen.send_signal(signal.SIGTERM)
        load.join()
    assert load.statuses.keys() == {200}
    assert load.broken == []
    assert ray_server.popen.wait(60) == 0
    assert not [process for process in tree if process.is_running()]
    assert not directory.exists()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_replicas_follow_the_load_and_lost_ones_are_replaced(
    start: Callable[..., Server], wait_until: Callable[..., None]
) -> None:
    server = start("fashion-mnist@prod", "--on", "ray", "--replicas", "1:2", "--startup-timeout", "5min")
    assert len(replicas_of(server)) == 1
    with Load(server.url) as load:
        two = f"ready_replicas{{{MODEL}}} 2.0"
        wait_until(lambda: two in metrics(server), "a second replica", timeout_s=PATIENCE_S)
        replicas_of(server)[0].send_signal(signal.SIGKILL)
        wait_until(lambda: two not in metrics(server), "one is missed", timeout_s=PATIENCE_S)
        wait_until(lambda: two in metrics(server), "another in its place", timeout_s=PATIENCE_S)
    assert load.statuses.keys() == {200}
    assert load.broken == []
    # Ctrl-C in a terminal reaches every process of its group; Ray's must not die before it has drained.
    tree = children(server.popen.pid, recursive=True)
    os.killpg(server.popen.pid, signal.SIGINT)
    assert server.popen.wait(60) == 0
    assert not [process for process in tree if process.is_running()]


@pytest.mark.parametrize(
    ("text", "numbers"), [("2", (2, 2)), ("1:4", (1, 4)), (" 3 ", (3, 3)), ("256:256", (256, 256))]
)
def test_how_many_replicas(text: str, numbers: tuple[int, int]) -> None:
    assert parse_replicas(text) == numbers


@pytest.mark.parametrize("text", ["", "0", "-1", "2:1", "1:", ":2", "two", "1:257", "9" * 5000])
def test_how_many_replicas_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="--replicas must be between 1 and 256, or MIN:MAX"):
        parse_replicas(text)


def test_where_replicas_run(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ServingOptions()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert RayServeOptions.make(None, "1:4", options) == RayServeOptions(address=None, least=1, most=4)
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    assert RayServeOptions.make(None, "1", options).address == "192.0.2.1:6379"
    assert RayServeOptions.make("auto", "1", options).address == "auto"
    with pytest.raises(ConfigError, match=r"--ray-address .* must run on one of its nodes"):
        RayServeOptions.make("ray://head:10001", "1", options)
    with pytest.raises(ConfigError, match="--ray-address"):
        RayServeOptions.make("head", "1", options)
    with pytest.raises(ConfigError, match=r"--devices cuda:0,cuda:1: must be cpu or cuda with --on ray"):
        RayServeOptions.make(None, "1", ServingOptions(devices=("cuda:0", "cuda:1")))


def test_why_a_replica_could_not_load_its_model() -> None:
    message = (
        "The deployment failed to start 1 times in a row. See controller logs for details. Error:\n"
        'ray::ServeReplica:a:M.initialize() (pid=1)\n  File "replica.py", line 1\n'
        "RuntimeError: Traceback (most recent call last):\n"
        '  File "loading.py", line 2, in load\n'
        "paceline.core.errors.ConfigError: --devices cuda: torch finds no GPU here.\n"
    )
    assert reason(message) == "ConfigError: --devices cuda: torch finds no GPU here."
    assert reason("the cluster is gone\nand more") == "the cluster is gone"


def test_a_missing_library_names_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with monkeypatch.context() as without_ray:
        without_ray.setitem(sys.modules, "ray", None)
        with (
            pytest.raises(LaunchError, match=r"pip install 'ray\[serve\]<"),
            ray_serve(RayServeOptions(address="127.0.0.1:1")),
        ):
            pass


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ray-address", "h:1"), "--ray-address is only for --on ray. Add --on ray"),
        (("--replicas", "1:2"), "--replicas 1:2: the number of replicas follows the load only with --on ray"),
        (
            ("--on", "ray", "--ray-address", "127.0.0.1:1"),
            "no Ray cluster answers at --ray-address 127.0.0.1:1",
        ),
    ],
)
def test_what_cannot_be_served_says_so(
    run_processes: Processes, serving_env: dict[str, str], words: tuple[str, ...], said: str
) -> None:
    done = run_processes.paceline("serve", "fashion-mnist@prod", *words, "--port", "0", env=serving_env)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr
