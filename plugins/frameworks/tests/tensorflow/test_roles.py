"""What TensorFlow's processes need of whoever starts them, without TensorFlow: ports, roles, and an end."""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.lab.sshd import SshLab
from tests.processes import Processes

from paceline.core.errors import ConfigError
from paceline.launch.launcher import LaunchSpec, get_launcher
from paceline.launch.rank import rank_command

# As under the parameter server strategy: workers and servers serve for ever, the chief listens while at work.
CLUSTER = """
import json, os, pathlib, signal, socket, sys
config = json.loads(os.environ["TF_CONFIG"])
kind, cluster = config["task"]["type"], config["cluster"]
if kind in ("chief", "worker", "ps"):
    port = int(cluster[kind][config["task"]["index"]].rpartition(":")[2])
    listener = socket.create_server(("", port))
if "obeys" not in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(kind).touch()
if kind in ("ps", "worker"):
    signal.pause()
if kind == "chief" and "watched" in sys.argv:
    listener.accept()
while not all(pathlib.Path(other).exists() for other in sys.argv[3:]):
    pass
os.write(1, f"{kind} is done\\n".encode())  # in one piece, also where Python's output is not buffered
"""


def launch(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "paceline", "launch", "--env-style", "tensorflow", "--threads", "1"]
    return [*command, *arguments]


def test_servers_end_after_those_whom_they_serve(run_processes: Processes, tmp_path: Path) -> None:
    """An evaluator is waited for too. Nothing is left, and the exit code is that of who was served."""
    (tmp_path / "cluster.py").write_text(CLUSTER)
    roles = ("--nproc", "4", "--roles", "chief=1,worker=1,ps=1,evaluator=1")
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    done = run_processes.run(
        launch("--on", "spawn", *roles, "--", "cluster.py", "obeys", "-", "ps", "worker", "chief"), env=state
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["chief is done", "evaluator is done"]
    assert done.stderr == ""


@pytest.mark.ssh
def test_servers_on_another_machine_end_too(ssh_machines: Callable[[int], SshLab]) -> None:
    lab = ssh_machines(2)
    (lab.path / "cluster.py").write_text(CLUSTER)
    options = ("--env-style", "tensorflow", "--threads", "1", "--roles", "chief=1,ps=1,worker=2")
    launcher = lab.launch(
        lab.nodes[0], "node0:2,node1:2", *options, "--", "cluster.py", "obeys", "watched", "ps", "worker"
    )
    assert launcher.wait() == 0, launcher.text
    assert launcher.text == "node0 | chief is done\n"


# The chief still needs the servers when the evaluator, which is on their machine, is done.
LONG_SAVE = """
import json, os, pathlib, signal, socket, time
config = json.loads(os.environ["TF_CONFIG"])
kind, cluster = config["task"]["type"], config["cluster"]
if kind != "evaluator":
    port = int(cluster[kind][config["task"]["index"]].rpartition(":")[2])
    listener = socket.create_server(("", port))
pathlib.Path(kind).touch()
if kind in ("ps", "worker"):
    signal.pause()
if kind == "evaluator":
    while not all(pathlib.Path(other).exists() for other in cluster):
        time.sleep(0.01)
    pathlib.Path("evaluated").touch()
else:
    while not pathlib.Path("evaluated").exists():
        time.sleep(0.01)
    time.sleep(1.5)
    for server in ("ps", "worker"):
        host, _, port = cluster[server][0].rpartition(":")
        socket.create_connection((host, int(port)), timeout=5).close()
    os.write(1, b"saved\\n")
"""


@pytest.mark.ssh
def test_servers_outlive_the_evaluator_of_their_machine(ssh_machines: Callable[[int], SshLab]) -> None:
    lab = ssh_machines(2)
    (lab.path / "cluster.py").write_text(LONG_SAVE)
    roles = ("--roles", "chief=1,worker=1,ps=1,evaluator=1")
    options = ("--env-style", "tensorflow", "--threads", "1", *roles)
    launcher = lab.launch(lab.nodes[0], "node0:1,node1:3", *options, "--", "cluster.py")
    assert launcher.wait() == 0, launcher.text
    assert launcher.text == "node0 | saved\n"


def test_a_deaf_process_is_killed_after_the_grace_period(
    run_processes: Processes, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """TensorFlow's workers ignore SIGTERM."""
    (tmp_path / "cluster.py").write_text(CLUSTER)
    driver = """
import sys
from paceline.core.job import RecoveryPolicy
from paceline.launch.launcher import LaunchSpec, get_launcher
spawn = get_launcher("spawn")
soon, command = RecoveryPolicy(grace_s=0.2), (sys.executable, "cluster.py")
spec = LaunchSpec(command=command, nproc=(1,), env_style="tensorflow", recovery=soon, threads=1)
sys.exit(spawn.submit(spawn.render(spec)).wait())
"""
    started = run_processes.start([sys.executable, "-c", driver])
    wait_until((tmp_path / "worker").exists, "a worker")
    started.send_signal(signal.SIGTERM)
    assert run_processes.finish(started).returncode == 143


def test_each_process_has_a_free_port(tmp_path: Path) -> None:
    spec = LaunchSpec(command=(sys.executable, "train.py"), nproc=(3,), env_style="tensorflow")
    first, second = (get_launcher("spawn").render(spec) for _ in range(2))
    ports = [
        [int(worker.rpartition(":")[2]) for worker in json.loads(r.commands[0].env["TF_CONFIG"])["cluster"]["worker"]]
        for r in (first, second)
    ]
    for row in ports:
        assert row == list(range(row[0], row[0] + 3))
        assert 20000 <= row[0] < 32000
    assert ports[0] != ports[1]


def test_a_port_that_is_taken_is_said_before_anything_is_started() -> None:
    spawn = get_launcher("spawn")
    spec = LaunchSpec(command=("none", "train.py"), nproc=(2,), env_style="tensorflow")
    rendered = spawn.render(spec)
    address = json.loads(rendered.commands[1].env["TF_CONFIG"])["cluster"]["worker"][1]
    port = int(address.rpartition(":")[2])
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ConfigError, match=f"port {port} of .*, on which worker 1 would listen, is taken"),
    ):
        spawn.submit(rendered)


def test_servers_that_nobody_would_end_are_refused(tmp_path: Path) -> None:
    roles = ("chief", "worker", "ps")
    spec = LaunchSpec(
        command=("train.py",), name="a", directory=tmp_path, nproc=(3,), rank_launcher="srun", roles=roles
    )
    with pytest.raises(ConfigError, match=r"does not work with --rank-launcher srun: .* Use --rank-launcher spawn"):
        rank_command(spec)
