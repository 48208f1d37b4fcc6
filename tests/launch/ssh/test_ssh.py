"""Jobs over real ssh servers, each on a machine of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable

import psutil
import pytest
from tests.lab.machines import NodeProcess
from tests.lab.sshd import SshLab

pytestmark = [pytest.mark.ssh, pytest.mark.timeout(180)]

WHO = """
import contextlib, json, os, pathlib, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SECRET")
seen = {name: os.environ[name] for name in names}
commands = []
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    with contextlib.suppress(OSError):  # it has ended meanwhile
        commands.append(path.read_bytes())
seen["shown"] = any(os.environ["SECRET"].splitlines()[0].encode() in command for command in commands)
print(json.dumps({**seen, "host": os.uname().nodename, "arguments": sys.argv[1:], "in": os.getcwd()}))
print("to stderr", file=sys.stderr)
"""
SUM = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
by = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "another"
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: the sum is {total.item()}, started by {by}")
dist.destroy_process_group()
"""
# Each process leaves an orphan behind, and waits to be ended, deaf to SIGTERM if so asked.
STAYS = """
import os, pathlib, signal, sys
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
elif os.environ["RANK"] in sys.argv:
    while len(list(pathlib.Path().glob("here-*"))) < 1:
        pass
    sys.exit(3)
else:
    pathlib.Path("here-" + os.environ["RANK"]).touch()
while True:
    signal.pause()
"""


@pytest.fixture
def lab(ssh_machines: Callable[[int], SshLab], request: pytest.FixtureRequest) -> SshLab:
    """Two machines, or as many as the test's parameter says."""
    started = ssh_machines(getattr(request, "param", 2))
    (started.path / "who.py").write_text(WHO)
    (started.path / "stays.py").write_text(STAYS)
    return started


def left(lab: SshLab) -> list[str]:
    """What of jobs there is on all machines, launchers and ssh clients too."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = process.info["cmdline"] or [""]
        here = process.info["cwd"] == str(lab.path) or any(str(lab.path) in word for word in words)
        if here and (words[0] == "ssh" or words[0].endswith(f"/{os.path.basename(sys.executable)}")):
            found.append(" ".join(words))
    return found


@pytest.fixture
def staying(lab: SshLab, wait_until: Callable[..., None]) -> Callable[..., NodeProcess]:
    """Start two processes that stay, from the last machine, and wait until both are there."""

    def start(*more: str, options: tuple[str, ...] = ()) -> NodeProcess:
        command = ("--rank-launcher", "spawn", "--threads", "1", *options, "--", "stays.py", *more)
        launcher = lab.launch(lab.nodes[-1], "node0,node1", *command)

        def there() -> bool:
            assert launcher.poll() is None, launcher.text
            return len(list(lab.path.glob("here-*"))) == 2

        wait_until(there, "both processes", timeout_s=60)
        # Whoever looks for what is left sees the processes, and what they leave behind.
        assert len([line for line in left(lab) if line.endswith(" ".join(("stays.py", *more)))]) >= 4
        return launcher

    return start


def test_each_process_knows_its_place(lab: SshLab) -> None:
    """Whose values have spaces, quotes and line ends; which no list of processes shows."""
    secret = 'it\'s $HOME\nand "more"'
    command = ("--threads", "1", "--", "who.py", "{node_rank} of {nnodes}", "{master_addr}:{master_port}")
    launcher = lab.launch(
        lab.nodes[0],
        "node0:1,node1:2",
        "--rank-launcher",
        "spawn",
        "--env",
        "SECRET",
        *command,
        env={"SECRET": secret},
    )
    assert launcher.wait() == 0, launcher.text
    seen = {}
    for line in launcher.text.splitlines():
        host, _, text = line.partition(" | ")
        if text.startswith("{"):
            found = json.loads(text)
            seen[int(found["RANK"])] = found
            assert found["host"] == host
            assert found["SECRET"] == secret
            assert not found["shown"]
            assert found["in"] == str(lab.path)
            assert found["arguments"] == [
                f"{host[-1]} of 2",
                f"node0:{found['MASTER_PORT']}",
            ]
    assert [(s["host"], s["LOCAL_RANK"], s["WORLD_SIZE"], s["MASTER_ADDR"]) for _, s in sorted(seen.items())] == [
        ("node0", "0", "3", "node0"),
        ("node1", "0", "3", "node0"),
        ("node1", "1", "3", "node0"),
    ]
    assert launcher.text.count("node1 | to stderr\n") == 2
    listed = lab.paceline(lab.nodes[0], "jobs", "--json")
    assert listed.wait() == 0
    [job] = json.loads(listed.text)
    assert (job["launcher"], job["status"]["state"]) == ("ssh", "succeeded")
    assert secret not in listed.text


@pytest.mark.parametrize("lab", [4], indirect=True)
def test_machines_that_cannot_be_used_are_all_named(lab: SshLab) -> None:
    lab.servers[1].send_signal(signal.SIGKILL)
    lab.servers[1].wait()
    lab.nodes[3].cut()
    options = ("--setup", "test $(hostname) != node2", "--connect-timeout", "15")
    launcher = lab.launch(lab.nodes[0], "node0,node1,node7,node2,node3", *options, "--", "who.py")
    assert launcher.wait() == 1
    assert "4 of 5 machines cannot be used; nothing runs on the others" in launcher.text
    assert "node1: ssh: connect to host node1 port 22: Connection refused" in launcher.text
    assert "node7: ssh: Could not resolve hostname node7" in launcher.text
    assert "node2: its shell exited with 1 and said nothing" in launcher.text
    assert re.search(
        "node3: ssh: connect to host node3 port 22: (Connection timed out|No route to host)", launcher.text
    )
    assert not left(lab)
    # Of the job nothing is left in the list, nor where jobs are kept.
    assert not (lab.path / "state").exists()
    launcher = lab.launch(lab.nodes[0], "node7", "--detach", "--", "who.py")
    assert launcher.wait() == 1
    assert "node7: ssh: Could not resolve hostname node7" in launcher.text
    assert not (lab.path / "state").exists()


def test_ctrl_c_while_a_machine_is_waited_for(lab: SshLab, wait_until: Callable[..., None]) -> None:
    lab.nodes[1].cut()
    launcher = lab.launch(lab.nodes[0], "node0,node1", "--connect-timeout", "1000", "--", "who.py")
    wait_until(lambda: any("-T" in p.cmdline() for p in launcher.tree()), "an ssh")
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait() == 130
    assert "Traceback" not in launcher.text
    assert not left(lab)
    assert not (lab.path / "state").exists()


def test_what_a_machine_lacks_is_said(lab: SshLab) -> None:
    own = lab.nodes[0].start(["mkdir", "/dev/shm/only-here"])
    assert own.wait() == 0
    command = [
        sys.executable,
        "-m",
        "paceline",
        "launch",
        "--on",
        "ssh",
        "--hosts",
        "node0,node1",
        *lab.options,
    ]
    launcher = lab.nodes[0].start(
        [*command, "--", "true"], cwd="/dev/shm/only-here", env={"XDG_STATE_HOME": str(lab.path / "state")}
    )
    assert launcher.wait() == 1
    assert "node1: there is no directory /dev/shm/only-here, where the command" in launcher.text
    options = ("--python", "/usr/bin/none-such")
    launcher = lab.launch(lab.nodes[0], "node0,node1", *options, "--", "true")
    assert launcher.wait() == 1
    assert "/usr/bin/none-such is not a Python with Paceline" in launcher.text
    train = ("train", "fashion-mnist", "--on", "ssh", "--hosts", "node0,node1", *lab.options)
    launcher = lab.paceline(lab.nodes[0], *train, "--run-dir", "/dev/shm/run")
    assert launcher.wait() == 1
    assert "node1: there is no directory /dev/shm/run/job. The machines of a job must share" in launcher.text
    assert lab.nodes[0].start(["test", "!", "-e", "/dev/shm/run"]).wait() == 0
    launcher = lab.paceline(lab.nodes[0], *train, "--device", "cuda", "--run-dir", str(lab.path / "run"))
    assert launcher.wait() != 0
    assert "--device cuda: torch" in launcher.text
    assert "sees no GPU on this node" in launcher.text
    assert not left(lab)


@pytest.mark.slow
def test_torchrun_starts_the_ranks_of_a_script(lab: SshLab, wait_until: Callable[..., None]) -> None:
    """The default; detached from the command that started it, and followed by its logs."""
    (lab.path / "sum.py").write_text(SUM)
    of_torchrun = ("--torchrun", "tee=3", "--torchrun", "role=trainer")  # lines after the role and the local rank
    command = ("--detach", "--name", "sum", "--threads", "1", *of_torchrun, "--", "sum.py")
    launcher = lab.launch(lab.nodes[0], "node0,node1", *command)
    assert launcher.wait() == 0, launcher.text
    logs = lab.paceline(lab.nodes[0], "logs", "-f", "sum")
    assert logs.wait() == 0, logs.text
    assert sorted(line for line in logs.text.splitlines() if "sum" in line) == [
        "node0 | [trainer0]:rank 0 of 2: the sum is 3.0, started by torchrun",
        "node1 | [trainer0]:rank 1 of 2: the sum is 3.0, started by torchrun",
    ]
    assert lab.paceline(lab.nodes[0], "status", "sum").wait() == 0
    wait_until(lambda: not left(lab), "the end of the detached launcher")


def test_one_that_fails_ends_the_others(lab: SshLab) -> None:
    launcher = lab.launch(
        lab.nodes[0], "node0,node1", "--rank-launcher", "spawn", "--threads", "1", "--", "stays.py", "1"
    )
    assert launcher.wait() == 3, launcher.text
    assert "node1 | paceline: rank 1 exited with status 3" in launcher.text
    assert "paceline: node1 failed, with exit code 3." in launcher.text
    assert not left(lab)


@pytest.mark.parametrize("lab", [3], indirect=True)
def test_nothing_outlives_the_launcher_or_its_connections(
    lab: SshLab, staying: Callable[..., NodeProcess], wait_until: Callable[..., None]
) -> None:
    """The launcher killed; an ssh killed; the cable pulled; Ctrl-C; Ctrl-C twice, with deaf processes."""

    def all_end(what: str) -> None:
        wait_until(lambda: not left(lab), what, timeout_s=60)
        for file in lab.path.glob("here-*"):
            file.unlink()

    launcher = staying()
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    all_end("the end of what a killed launcher had started")

    launcher = staying()
    client = next(process for process in launcher.tree() if process.name() == "ssh")
    client.kill()
    assert launcher.wait() == 1
    assert " was lost: its ssh has ended." in launcher.text
    all_end("the end of what a killed ssh had started")

    launcher = staying(options=("--lost-after", "8"))
    lab.nodes[2].cut()
    assert launcher.wait() == 1
    all_end("the end of what nobody is heard of any more")
    lab.nodes[2].heal()

    launcher = staying()
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait() == 130, launcher.text
    all_end("the end after Ctrl-C")

    launcher = staying("deaf")
    command = launcher.tree()[0]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        command.send_signal(number)
    assert launcher.wait() == 130, launcher.text
    all_end("the end after Ctrl-C twice")
