"""Machines that do not find machine 0: each is named, with what stands between them."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from plugins.checks.tests.preflight.examined import begin, found, not_passed, report_of
from tests.lab.machines import Machines

WAITS_ON_NODE_1 = """
import pathlib, socket, time
if socket.gethostname() == "node1":
    pathlib.Path(__file__).with_name("importing").touch()
    time.sleep(600)
import paceline
class Small(paceline.Task):
    pass
"""


def test_a_machine_that_dies_before_it_joins(machines: Machines, wait_until: Callable[..., None]) -> None:
    nodes = machines(2)
    directory = nodes[0].lab.directory
    (directory / "waits.py").write_text(WAITS_ON_NODE_1)
    started = begin(nodes, "waits.py:Small", "--timeout", "10s")
    wait_until((directory / "importing").exists, "the import", 60)
    nodes[1].kill()
    assert [process.wait(240) for process in started] == [1, -signal.SIGKILL], [process.text for process in started]
    report = report_of(started[0])
    assert report.machines == ("node0", "node 1")
    assert not_passed(report) == {("machines", "node 1"), ("all-reduce", "all")}
    assert "1 of 2 ranks did not appear within 10 s: rank 1" in found(report, "machines").found
    assert found(report, "all-reduce").found == "not run: some ranks are missing"


@pytest.mark.slow
def test_torch_that_one_machine_cannot_import(machines: Machines) -> None:
    nodes = machines(2)
    broken = nodes[0].lab.directory / "broken"
    (broken / "torch").mkdir(parents=True)
    (broken / "torch/__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    started = begin(nodes, "--timeout", "10s", env={1: {"PYTHONPATH": str(broken)}})
    assert [process.wait(240) for process in started] == [1, 1], [process.text for process in started]
    said = "node1: torch cannot be imported: ImportError: libcudart.so.13: cannot open shared object file. Install it"
    assert said in started[1].text
    assert not_passed(report_of(started[0])) == {("machines", "node 1"), ("all-reduce", "all")}
