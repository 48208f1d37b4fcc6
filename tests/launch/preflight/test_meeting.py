"""Machines that do not find machine 0: each is named, with what stands between them."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from tests.lab.machines import Machines
from tests.launch.preflight.examined import PORT, begin, end, examine, found, need, not_passed, sh
from tests.launch.preflight.test_faults import FIREWALL

from paceline.launch.preflight.spec import PreflightReport


def absent(report: PreflightReport) -> str:
    assert report.status == "fail"
    assert {id for id, _ in not_passed(report)} == {"machines", "all-reduce"}
    assert found(report, "all-reduce").found == "not run: some nodes are missing"
    return found(report, "machines").found


@pytest.mark.slow
def test_no_way_at_all_and_a_machine_that_was_not_started(machines: Machines) -> None:
    need("nft")
    nodes = machines(3)
    sh(nodes[0], FIREWALL, "tcp", "dport", "1024-65535")
    report = examine(nodes, "--timeout", "20", present=[0, 1], codes=[0, 1])
    assert report.machines == ("node0", "node1", "node 2")
    blocked = found(report, "machines", "node1").found
    assert blocked.startswith(f"it does not reach node0:{PORT} (no answer) nor 10.77.0.1:")
    assert found(report, "machines", "node 2").found == "it did not connect within 20 s"
    assert "paceline: node 1 did not reach node 0" in nodes[1].processes[-1].text


@pytest.mark.slow
def test_a_directory_that_is_not_shared(machines: Machines) -> None:
    nodes = machines(2)
    meeting = nodes[0].lab.directory / "meeting"
    meeting.mkdir()
    sh(nodes[1], 'mount -t tmpfs tmpfs "$1"', meeting)
    report = examine(nodes, "--timeout", "15", codes=[0, 1])
    why = absent(report)
    assert f"do not see {meeting}" in why
    assert "10.77.0.2" in why
    assert "do the nodes share that directory?" in nodes[1].processes[-1].text


WAITS_ON_NODE_1 = """
import pathlib, socket, time
if socket.gethostname() == "node1":
    pathlib.Path(__file__).with_name("importing").touch()
    time.sleep(600)
import paceline
class Small(paceline.Task):
    pass
"""


def test_a_machine_that_dies_in_the_middle(machines: Machines, wait_until: Callable[..., None]) -> None:
    nodes = machines(2)
    directory = nodes[0].lab.directory
    (directory / "waits.py").write_text(WAITS_ON_NODE_1)
    started = begin(nodes, "--task", "waits.py:Small")
    wait_until((directory / "importing").exists, "the import", 60)
    nodes[1].kill()
    report = end(nodes, started, [0, -signal.SIGKILL])
    assert report.machines == ("node0", "node1")
    assert absent(report).startswith("it was lost in the middle (facts): ")
