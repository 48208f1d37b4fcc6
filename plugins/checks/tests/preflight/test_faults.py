"""Ten faults, planted for real on machines in namespaces, and each of them found, named and placed."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from plugins.checks.tests.preflight.examined import PORT, begin, examine, found, need, not_passed, report_of, sh
from tests.lab.machines import Machines, Node

from paceline.core.environment import HOSTS, NODE_RANK, NODES
from paceline_checks.preflight.spec import CHECKS, PreflightSpec

FIREWALL = """
nft add table inet filter
nft add chain inet filter input '{ type filter hook input priority 0; }'
nft add rule inet filter input "$@" drop
"""


def second_network(nodes: list[Node]) -> None:
    """An ``eth1`` on each machine, on a switch of its own."""
    nodes[0].lab.switch.run("ip link add second type bridge forward_delay 0 && ip link set second up")
    for number, node in enumerate(nodes):
        node.lab.switch.run(
            f"ip link add second{number} type veth peer name eth1 netns {node.pid} && "
            f"ip link set second{number} master second up"
        )
        sh(node, f"ip addr add 10.78.0.{number + 1}/24 dev eth1 && ip link set eth1 up")


@pytest.mark.slow
def test_a_healthy_pair(machines: Machines) -> None:
    nodes = machines(2)
    report = examine(nodes, "fashion-mnist", "--threads", "1", code=0)
    assert not_passed(report) == set(), report.checks
    assert report.status == "pass"
    assert report.machines == ("node0", "node1")
    there_is_none = ("gpu-health", "locked-memory")
    assert [check.id for check in report.checks] == [id for id in CHECKS if id not in there_is_none], "once, for all"
    assert "fashion-mnist, a model of 0.1 MiB" in found(report, "task").found
    assert "gloo, 2 ranks" in found(report, "all-reduce").found
    assert found(report, "interface").found == "eth0"
    directory = nodes[0].lab.directory
    assert f"{directory} is shared" in found(report, "run-directory").found, "there is no run yet"
    assert not [path.name for path in directory.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_a_machine_that_differs(machines: Machines) -> None:
    """Library, clock, name, limit, run directory, interface and GPUs: none of these hides another."""
    need("faketime")
    nodes = machines(2)
    directory = nodes[0].lab.directory
    metadata = directory / "other/numpy-9.9.9.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 9.9.9\n")
    hosts = directory / "hosts-of-node1"
    hosts.write_text(nodes[0].lab.hosts.read_text().replace("10.77.0.2 node1", "127.0.1.1 node1"))
    (directory / "run").mkdir()
    sh(nodes[1], 'mount --bind "$1" /etc/hosts && mount -t tmpfs tmpfs "$2"', hosts, directory / "run")
    path = os.pathsep.join([str(metadata.parents[1]), os.environ.get("PYTHONPATH", "")])
    report = examine(
        nodes,
        *("--gpus-per-node", "1"),
        own={1: ["--interface", "eth9"]},
        env={1: {"PYTHONPATH": path}},
        before={1: ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", "faketime", "-m", "-f", "+90s"]},
    )
    assert not_passed(report) == {
        ("libraries", "all"),
        ("gpus", "all"),
        ("interface", "node1"),
        ("host-name", "node1"),
        ("clock", "node1"),
        ("run-directory", "node0"),
        ("run-directory", "node1"),
        ("open-files", "node1"),
    }
    assert {check.status for check in report.checks} == {"pass", "fail"}
    assert "9.9.9 (node1)" in found(report, "libraries").found
    assert found(report, "gpus").found == "0 GPUs, 1 requested"
    assert "node1, resolves to 127.0.1.1" in found(report, "host-name", "node1").found
    assert "Map node1 to 10.77.0.2" in found(report, "host-name", "node1").advice
    assert found(report, "clock").found == "90.0 s ahead of node0"
    assert "is not the directory of node0" in found(report, "run-directory", "node1").found
    assert found(report, "interface").found.startswith("--interface 'eth9' has no IPv4 address on this node")
    assert found(report, "interface").advice == "Give --interface one of: eth0 (10.77.0.2)"
    assert found(report, "open-files", "node1").found == "ulimit -n is 64, but must be 520"
    assert "hard limit is 64" in found(report, "open-files", "node1").advice


def test_a_slow_link_and_the_wrong_interface(machines: Machines) -> None:
    nodes = machines(2)
    second_network(nodes)
    nodes[1].slow(mbit_per_s=8)
    report = examine(nodes)
    slow = found(report, "bandwidth", "node0 -> node1")
    assert slow.status == "fail"
    assert "Mbit/s" in slow.found
    interface = found(report, "interface")
    assert interface.advice == "Give --interface eth1"
    assert interface.status == "warn"
    assert {id for id, _ in not_passed(report)} == {"bandwidth", "interface"}


def test_a_blocked_rendezvous_port(machines: Machines) -> None:
    need("nft")
    nodes = machines(2)
    sh(nodes[0], FIREWALL, "iifname", "eth0", "tcp", "dport", str(PORT))
    started = begin(nodes, "--timeout", "15s")
    assert [process.wait(240) for process in started] == [1, 1], [process.text for process in started]
    assert not_passed(report_of(started[0])) == {("machines", "node 1"), ("all-reduce", "all")}
    assert "paceline: preflight: node1: " in started[1].text
    assert f"Rank 1 does not reach it at node0:{PORT} (timed out)" in started[1].text
    assert f"open TCP port {PORT}" in started[1].text


def test_blocked_ephemeral_ports(machines: Machines) -> None:
    need("nft")
    nodes = machines(2)
    sh(
        nodes[0],
        FIREWALL,
        "iifname",
        "eth0",
        "tcp",
        "dport",
        "32768-65535",
        "tcp",
        "flags",
        "&",
        "(syn|ack)",
        "==",
        "syn",
    )
    report = examine(nodes)
    port = found(report, "ports")
    assert (port.where, port.status) == ("node1 -> node0", "fail")
    assert "at 10.77.0.1: no answer" in port.found
    assert "Open TCP ports" in port.advice
    assert not_passed(report) == {("ports", "node1 -> node0"), ("all-reduce", "all")}


def test_a_job_uses_the_faster_network_of_its_preflight(machines: Machines) -> None:
    nodes = machines(2)
    second_network(nodes)
    for node in nodes:
        node.slow(mbit_per_s=8)
    directory = nodes[0].lab.directory
    examination = PreflightSpec(run=str(directory), before_job=True)
    preflight = shlex.join(examination.command(sys.executable))
    words = ("--rank-launcher", "spawn", "--nodes", "2", "--env-style", "none", "--preflight", preflight)
    started = [
        node.start(
            [sys.executable, "-P", "-m", "paceline.launch.node", *words, "--", "printenv", "GLOO_SOCKET_IFNAME"],
            env={"OMP_NUM_THREADS": "1", NODE_RANK: str(number), NODES: "2", HOSTS: "node0,node1"},
        )
        for number, node in enumerate(nodes)
    ]
    assert [process.wait(240) for process in started] == [0, 0], [process.text for process in started]
    assert all("eth1" in process.text.splitlines() for process in started)
    assert "paceline: preflight: the job uses --interface eth1." in started[0].text


def test_a_full_disk(machines: Machines, tmp_path: Path) -> None:
    [node] = machines(1)
    run = node.lab.directory / "run"
    run.mkdir()
    sh(node, 'mount -t tmpfs -o size=1m tmpfs "$1" && head -c 900k /dev/zero > "$1/data"', run)
    report = examine([node], "--checkpoint-size", "1000000")
    assert not_passed(report) == {("run-directory", "node0"), ("disk-space", "node0")}
    assert found(report, "run-directory").found == f"{run} cannot be written: No space left on device"
    space = found(report, "disk-space")
    assert space.status == "fail"
    assert "3 + 1 checkpoints of 977 KiB" in space.found
    assert "3.81 MiB are needed" in space.advice
