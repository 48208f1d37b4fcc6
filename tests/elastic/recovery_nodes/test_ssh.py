"""A run whose machines ssh has started: the launcher outlives a machine, and passes on what it is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.elastic.recovery_nodes.runs import OPTIONS, PATIENT, Run
from tests.lab.machines import NodeProcess
from tests.lab.sshd import SshLab

pytestmark = [pytest.mark.ssh, pytest.mark.timeout(240)]


@pytest.mark.slow
def test_a_run_is_cancelled_continued_and_loses_its_first_machine(
    ssh_machines: Callable[[int], SshLab], wait_until: Callable[..., None], undisturbed: str
) -> None:
    lab = ssh_machines(3)
    run = Run(lab.lab, wait_until)

    def train() -> NodeProcess:
        task = ("train", "small.py:Small", *OPTIONS, *PATIENT, "--run-dir", "run")
        return lab.paceline(lab.nodes[2], *task, "--on", "ssh", "--hosts", "node0:2,node1:2", *lab.options)

    run.hold(7)
    launcher = train()
    wait_until((run.path / "held-7").exists, "the run to stand at step 7", timeout_s=90)
    # The first node has one address in the list of hosts and another one in its own words.
    assert "node lost" not in {event["event"] for event in run.directory.read_events()}
    cancel = lab.paceline(lab.nodes[2], "cancel", "run")
    assert cancel.wait() == 0, cancel.text
    run.wait_for_the_stop()
    run.go_on()
    assert launcher.wait(90) == 75, launcher.text
    assert "everything is saved" in launcher.text

    run.hold(12)
    launcher = train()
    run.wait_for("checkpoint", lambda event: event["step"] == 10, launcher)
    lab.nodes[0].kill()
    run.hold(14)
    run.wait_for("takeover", lambda event: True, launcher)
    run.wait_for("joined", lambda event: True, launcher)
    run.go_on()
    assert launcher.wait(120) == 0, launcher.text
    assert "paceline: node0 was lost: its ssh has ended; the others have finished." in launcher.text
    result = run.result()
    assert (result["model_sha256"], result["world_size"]) == (undisturbed, 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_machines_that_come_late_or_come_back_take_part(
    ssh_machines: Callable[[int], SshLab], wait_until: Callable[..., None], undisturbed: str
) -> None:
    """``--nodes 1:2``: the second one is not there at first, and the first one is lost in between."""
    lab = ssh_machines(3)
    first, second, here = lab.nodes
    run = Run(lab.lab, wait_until)
    second.kill()
    run.hold(12)
    task = ("train", "small.py:Small", *OPTIONS, *PATIENT, "--run-dir", "run")
    where = ("--on", "ssh", "--hosts", "node0:1,node1:1", "--nodes", "1:2", "--connect-timeout", "3")
    launcher = lab.paceline(here, *task, *where, *lab.options)
    run.wait_for("checkpoint", lambda event: event["step"] == 10, launcher)
    lab.boot(second)
    run.wait_for_joiners(1, launcher, leader=first)
    run.step_until("group", lambda event: event["nodes"] == 2, launcher)
    first.kill()
    run.step_until("takeover", lambda event: True, launcher)
    run.step_until("group", lambda event: event["nodes"] == 1, launcher)
    generation = run.generation()
    lab.boot(first)
    run.wait_for_joiners(1, launcher, leader=second)
    run.step_until("group", lambda event: event["generation"] > generation and event["nodes"] == 2, launcher)
    run.go_on()
    assert launcher.wait(120) == 0, launcher.text
    assert "paceline: node0 was lost: its ssh has ended. It rejoins once it can be reached." in launcher.text
    assert "paceline: node1 joins.\n" in launcher.text
    assert "paceline: node0 joins.\n" in launcher.text
    result = run.result()
    assert (result["model_sha256"], result["world_size"]) == (undisturbed, 2)
