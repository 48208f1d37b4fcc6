"""The lab itself: machines that die, are cut off and come back, and of which nothing is left."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.lab.machines import Lab, Machines, Node
from tests.processes import _warm_starts, runs

SUMS = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} on {os.uname().nodename}: {int(total)}", flush=True)
try:
    while "forever" in sys.argv:
        dist.all_reduce(total)
except RuntimeError as error:
    print(f"noticed: {error}", flush=True)
    os._exit(3)
dist.destroy_process_group()
"""

# The first argument is the address; "listen" waits for a connection, "connect" makes one. Lines of a file
# tell each what to do next, so that the test decides when.
TALK = """
import socket, sys, time
from pathlib import Path
address, role, orders = sys.argv[1], sys.argv[2], Path(sys.argv[3])
if role == "listen":
    with socket.create_server((address, 5000)) as server:
        print("listening", flush=True)
        peer = server.accept()[0]
else:
    peer = socket.create_connection((address, 5000))
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1500 if "impatient" in sys.argv else 120_000)
print("connected", flush=True)
done = 0
while True:
    lines = orders.read_text().splitlines() if orders.exists() else []
    if len(lines) == done:
        time.sleep(0.01)
        continue
    verb, _, count = lines[done].partition(" ")
    done += 1
    if verb == "end":
        break
    try:
        if verb == "send":
            peer.sendall(b"x" * int(count))
        elif verb == "receive":
            left = int(count)
            while left and (data := peer.recv(left)):
                left -= len(data)
            if left:
                print("closed", flush=True)
        print(lines[done - 1], "done", flush=True)
    except OSError as error:
        print("lost:", type(error).__name__, error, flush=True)
"""

WaitUntil = Callable[..., None]


class Talk:
    """Two nodes with one connection between them."""

    def __init__(self, nodes: list[Node], path: Path, wait_until: WaitUntil, *options: str) -> None:
        self.orders = [path / "orders0", path / "orders1"]
        self._wait_until = wait_until
        listen = [sys.executable, "-c", TALK, nodes[0].address, "listen", self.orders[0], *options]
        connect = [sys.executable, "-c", TALK, nodes[0].address, "connect", self.orders[1], *options]
        self.processes = [nodes[0].start(listen)]
        self.expect(0, "listening")
        self.processes.append(nodes[1].start(connect))
        self.expect(0, "connected")
        self.expect(1, "connected")

    def order(self, who: int, line: str) -> None:
        with self.orders[who].open("a") as file:
            file.write(line + "\n")

    def expect(self, who: int, text: str) -> None:
        process = self.processes[who]
        self._wait_until(lambda: text in process.text, f"{text!r} from {who}")


def torchrun(nodes: list[Node], script: Path, *arguments: str) -> None:
    """The same command on each node; ranks are given, as ``--node-rank`` says."""
    for rank, node in enumerate(nodes):
        node.start(
            [
                *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(nodes)}"),
                *(f"--node-rank={rank}", f"--master-addr={nodes[0].address}", "--master-port=29500"),
                *("--nproc-per-node=1", script, *arguments),
            ],
            env={"OMP_NUM_THREADS": "1"},
        )


def test_torchrun_across_two_machines(machines: Machines, tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(SUMS)
    nodes = machines(2)
    torchrun(nodes, tmp_path / "sums.py")
    for rank, node in enumerate(nodes):
        assert node.processes[0].wait() == 0
        assert f"rank {rank} on node{rank}: 2" in node.processes[0].text


def test_a_killed_machine_is_noticed_by_the_others(machines: Machines, tmp_path: Path, wait_until: WaitUntil) -> None:
    (tmp_path / "sums.py").write_text(SUMS)
    nodes = machines(2)
    torchrun(nodes, tmp_path / "sums.py", "forever")
    for rank, node in enumerate(nodes):
        wait_until(lambda node=node, rank=rank: f"rank {rank} on" in node.processes[0].text, "the first sum")
    tree = nodes[1].processes[0].tree()
    nodes[1].kill()
    assert len(tree) >= 2, "torchrun and its worker"
    assert not any(process.is_running() for process in tree)
    assert nodes[1].processes[0].poll() == -signal.SIGKILL
    assert nodes[0].processes[0].wait() == 1
    assert "noticed:" in nodes[0].processes[0].text


def test_a_cut_is_no_news_and_what_was_sent_arrives_once_it_is_healed(
    machines: Machines, tmp_path: Path, wait_until: WaitUntil
) -> None:
    nodes = machines(2)
    talk = Talk(nodes, tmp_path, wait_until)
    nodes[1].cut()
    talk.order(0, "send 1000")
    talk.expect(0, "send 1000 done")
    talk.order(1, "receive 1000")
    nodes[1].heal()
    talk.expect(1, "receive 1000 done")
    for who in (0, 1):
        talk.order(who, "end")
        assert talk.processes[who].wait() == 0
        assert "lost" not in talk.processes[who].text
        assert "closed" not in talk.processes[who].text


def test_a_machine_that_dies_behind_a_cut_is_lost_only_after_a_time_out(
    machines: Machines, tmp_path: Path, wait_until: WaitUntil
) -> None:
    nodes = machines(2)
    talk = Talk(nodes, tmp_path, wait_until, "impatient")
    nodes[1].cut()
    nodes[1].kill()
    talk.order(0, "send 10")
    talk.order(0, "receive 1")
    talk.expect(0, "lost:")
    # Its own patience ended; the peer has said nothing.
    assert "ConnectionReset" not in talk.processes[0].text
    assert "closed" not in talk.processes[0].text


def test_a_machine_starts_again_at_its_address(machines: Machines, tmp_path: Path, wait_until: WaitUntil) -> None:
    nodes = machines(2)
    for attempt in range(2):
        (path := tmp_path / str(attempt)).mkdir()
        talk = Talk(nodes, path, wait_until)
        nodes[1].kill()
        talk.order(0, "receive 1")
        talk.expect(0, "closed")
        talk.order(0, "end")
        assert talk.processes[0].wait() == 0
        nodes[1].boot()


def test_a_slow_machine(machines: Machines, tmp_path: Path, wait_until: WaitUntil) -> None:
    nodes = machines(2)
    nodes[1].slow(mbit_per_s=8)
    talk = Talk(nodes, tmp_path, wait_until)
    talk.order(0, "send 300000")
    talk.order(1, "receive 300000")
    talk.expect(1, "receive 300000 done")
    shaped = subprocess.run(
        ["nsenter", f"--target={nodes[1].lab.switch.pid}", "--net", "tc", "-s", "qdisc", "show"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    match = re.search(r"qdisc tbf .*overlimits (\d+)", shaped, re.DOTALL)
    assert match is not None, shaped
    assert int(match[1]) > 0, "packets had to wait"
    nodes[1].slow(mbit_per_s=None)


def test_machines_share_no_names_no_processes_and_no_shared_memory(machines: Machines) -> None:
    looks = "import os, socket\nprint(socket.gethostname(), len(os.listdir('/dev/shm')), socket.gethostbyname('node1'))"
    first, second = machines(2)
    first.start(["sh", "-c", "touch /dev/shm/mine; mktemp >/dev/null"]).wait()
    (other,) = machines(1)
    assert (first.address, first.name) == (other.address, other.name)
    for node, said in ((first, f"node0 2 {second.address}"), (second, f"node1 0 {second.address}")):
        seen = node.start([sys.executable, "-c", looks])
        assert seen.wait() == 0
        assert seen.text.strip() == said
    assert other.start(["getent", "hosts", "node1"]).wait() != 0
    counted = other.start(["sh", "-c", "ls -d /proc/[0-9]* | wc -l"])
    assert counted.wait() == 0
    assert int(counted.text) <= 5


def _interfaces() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


def test_a_warm_process_says_of_its_machine_what_a_cold_one_does(machines: Machines) -> None:
    says = (
        "import json, os, platform, socket, sys, tempfile\n"
        "names = {name: os.readlink(f'/proc/self/ns/{name}') for name in ('net', 'mnt', 'uts', 'ipc', 'pid')}\n"
        "here = [platform.node(), socket.gethostname(), tempfile.gettempdir(), os.getcwd(), os.getppid()]\n"
        "print(json.dumps([names, here, os.getpid() < 100, sys.argv, sys.orig_argv]))\n"
        "print('torch' in sys.modules)\n"
    )
    [node] = machines(1)
    command = [sys.executable, "-c", says, "a", "b"]
    process = node.start(command)
    assert process.wait() == 0
    warm, was_warm = process.text.splitlines()
    with _warm_starts.resting():
        process = node.start(command)
        assert process.wait() == 0
    cold, was_cold = process.text.splitlines()
    assert (was_warm, was_cold) == ("True", "False")
    assert warm == cold


def test_nothing_is_left_of_a_lab(machines: Machines, tmp_path: Path) -> None:
    assert machines is not None  # skips where there can be none
    before = _interfaces()
    lab = Lab(tmp_path, 2)
    orphans = lab.nodes[0].start(["sh", "-c", "setsid sleep 1000 & setsid sleep 1000 & wait"])
    others = [psutil.Process(lab.switch.pid), *(psutil.Process(node.pid) for node in lab.nodes)]
    links = [os.readlink(f"/proc/{process.pid}/ns/net") for process in others]
    assert len(set(links)) == 3
    tree = orphans.tree()
    lab.end()
    assert not any(process.is_running() for process in (*others, *tree))
    assert _interfaces() == before
    held = set()
    for process in psutil.process_iter():
        try:
            held.add(os.readlink(f"/proc/{process.pid}/ns/net"))
        except OSError:
            continue
    assert not held & set(links)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_nothing_is_left_when_the_tests_are_ended(
    machines: Machines, tmp_path: Path, run_processes, wait_until: WaitUntil, how: signal.Signals
) -> None:
    assert machines is not None
    script = (
        "import pathlib, sys, time, psutil\n"
        "from tests.lab.machines import Lab\n"
        "lab = Lab(pathlib.Path(sys.argv[1]), 2)\n"
        "lab.nodes[0].start(['sleep', '1000'])\n"
        "try:\n"
        "    while len(lab.nodes[0].processes[0].tree()) < 1: pass\n"
        "    print(*(p.pid for p in psutil.Process().children(recursive=True)), flush=True)\n"
        "    while True: time.sleep(0.1)\n"
        "finally:\n"
        "    lab.end()\n"
    )
    root = Path(__file__).parents[2]
    user = run_processes.start([sys.executable, "-c", script, tmp_path], env={"PYTHONPATH": str(root)})
    left = [psutil.Process(int(pid)) for pid in user.stdout.readline().split()]
    assert len(left) >= 7, "the switch, two nodes with two processes each, and a command with two"
    user.send_signal(how)
    user.wait(30)
    wait_until(lambda: not any(map(runs, left)), "the end of all")
