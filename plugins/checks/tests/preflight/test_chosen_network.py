"""Machines with two networks, on each of which the same command is given: which one the job uses."""

from __future__ import annotations

import sys

import pytest
from plugins.checks.tests.preflight.examined import sh
from tests.lab.machines import Machines, Node

MEET = ("--nodes", "2", "--rdzv-endpoint", "node0:29560", "--threads", "1")
LINE = """
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


@dataclass
class Line(paceline.Task):
    defaults = paceline.Defaults(global_batch_size=8, microbatches=2, epochs=1)

    def build_model(self):
        return nn.Linear(1, 250_000, bias=False)  # 1 MB of gradients a step

    def build_dataset(self, split):
        return TensorDataset(torch.arange(32.0).unsqueeze(1)) if split == "train" else None

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1e-6)

    def loss(self, model, batch):
        return (model(batch[0]) - batch[0]).square().mean()
"""
NETWORK = """
import os
print("the others are on", os.environ["GLOO_SOCKET_IFNAME"])
"""


@pytest.fixture
def nodes(machines: Machines) -> list[Node]:
    """Two machines whose names are addresses of ``eth0``; a switch of its own joins their ``eth1``."""
    nodes = machines(2)
    nodes[0].lab.switch.run("ip link add second type bridge forward_delay 0 && ip link set second up")
    for number, node in enumerate(nodes):
        node.lab.switch.run(
            f"ip link add second{number} type veth peer name eth1 netns {node.pid} && "
            f"ip link set second{number} master second up"
        )
        sh(node, f"ip addr add 10.78.0.{number + 1}/24 dev eth1 && ip link set eth1 up")
    return nodes


def given_on_each(nodes: list[Node], options: tuple[str, ...], program: tuple[str, ...] = ()) -> list[str]:
    """What each machine printed."""
    state = str(nodes[0].lab.directory / "state")
    started = [
        node.start(
            [sys.executable, "-m", "paceline", *options, *MEET, "--node-rank", str(number), *program],
            env={"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": state},
        )
        for number, node in enumerate(nodes)
    ]
    assert [process.wait(240) for process in started] == [0, 0], [process.text for process in started]
    return [process.text for process in started]


def sent(node: Node, interface: str) -> int:
    """Bytes that a machine has sent there."""
    [line] = [x for x in node.run(["cat", "/proc/net/dev"]).stdout.splitlines() if f"{interface}:" in x]
    return int(line.split()[9])


def test_agents_meet_at_the_endpoint_and_gradients_go_over_the_interface(nodes: list[Node]) -> None:
    (nodes[0].lab.directory / "line.py").write_text(LINE)
    options = ("train", "line.py:Line", "--interface", "eth1", "--run-dir", "run", "--quiet")
    given_on_each(nodes, options)
    steps = 4
    assert sent(nodes[1], "eth1") > steps * 1_000_000
    assert sent(nodes[1], "eth0") < 1_000_000


@pytest.mark.parametrize("on", ["spawn", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_preflight_chooses_the_faster_one(nodes: list[Node], on: str) -> None:
    for node in nodes:
        node.slow(mbit_per_s=8)
    (nodes[0].lab.directory / "network.py").write_text(NETWORK)
    program = ("--", sys.executable, "network.py")
    texts = given_on_each(nodes, ("launch", "--on", on, "--preflight"), program)
    assert all("the others are on eth1" in text for text in texts), texts
    assert "paceline: preflight: the job uses --interface eth1." in texts[0]


@pytest.mark.slow
def test_a_host_name_that_is_a_loopback_address(nodes: list[Node]) -> None:
    """As Debian installs it; a job that is told its interface starts."""
    directory = nodes[0].lab.directory
    hosts = directory / "hosts-of-node1"
    hosts.write_text(nodes[0].lab.hosts.read_text().replace("10.77.0.2 node1", "127.0.1.1 node1"))
    sh(nodes[1], 'mount --bind "$1" /etc/hosts', hosts)
    (directory / "network.py").write_text(NETWORK)
    options = ("launch", "--on", "spawn", "--preflight", "--interface", "eth0")
    texts = given_on_each(nodes, options, ("--", sys.executable, "network.py"))
    assert texts == ["the others are on eth0\n"] * 2


@pytest.mark.slow
def test_a_task_trains_on_what_its_preflight_has_chosen(nodes: list[Node]) -> None:
    for node in nodes:
        node.slow(mbit_per_s=8)
    (nodes[0].lab.directory / "line.py").write_text(LINE)
    options = ("train", "line.py:Line", "--preflight", "--run-dir", "run", "--quiet")
    texts = given_on_each(nodes, options)
    assert "paceline: preflight: the job uses --interface eth1." in texts[0]
