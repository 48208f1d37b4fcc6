"""What the targets work on: a run, a registry and a server."""

from __future__ import annotations

from pathlib import Path

from plugins.serving.tests.conftest import start_server
from plugins.serving.tests.packages import put
from tests.fuzz.targets import World
from tests.processes import Processes

_TASK = Path(__file__).with_name("tiny_task.py")


def make_world(processes: Processes, directory: Path) -> World:
    """Train a run, export a package and start a server, in a directory."""
    run, registry, scratch = (directory / name for name in ("runs/tiny", "packages", "scratch"))
    scratch.mkdir()
    words = ("train", f"{_TASK}:Tiny", "--run-dir", run, "--nproc", "1", "--threads", "1", "--log-every", "1")
    done = processes.paceline(*words, "--checkpoint-every", "2steps")
    assert done.returncode == 0, done.stderr
    put(registry, "fashion-mnist", name="fashion-mnist")
    env = {"PACELINE_REGISTRY": str(registry), "XDG_CONFIG_HOME": str(registry / "config")}
    server = start_server(processes, env, "fashion-mnist@prod", "--grpc-port", "0", shared=True)
    return World(run, registry, scratch, server)
