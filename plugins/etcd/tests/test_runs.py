"""Runs that etcd decides for, while etcd itself loses its leader, its majority, or all of its members."""

from __future__ import annotations

import pytest
from tests.elastic.recovery_nodes.runs import Run
from tests.lab.etcd import EtcdCluster

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.parametrize("coordinator", ["etcd"], indirect=True),
]


def cluster_of(run: Run) -> EtcdCluster:
    assert run.etcd is not None
    return run.etcd


def test_etcds_own_leader_is_killed_and_then_the_runs(run: Run, undisturbed: str) -> None:
    """And when all has ended, nothing of the run is left in etcd."""
    etcd, processes = cluster_of(run), run.begin(nproc="1")
    etcd.kill(etcd.wait_for_leader())
    run.lab.nodes[0].kill()
    run.hold(14)
    run.wait_for("joined", lambda event: True, processes[1])
    run.go_on()
    assert processes[1].wait(60) == 0, processes[1].text
    assert run.result()["model_sha256"] == undisturbed
    assert etcd.keys() == []


def test_etcds_own_leader_is_frozen_while_a_machine_is_lost(run: Run, undisturbed: str) -> None:
    etcd, processes = cluster_of(run), run.begin(nproc="1")
    frozen = etcd.wait_for_leader()
    etcd.freeze(frozen)
    run.lab.nodes[1].kill()
    run.hold(14)
    run.wait_for("joined", lambda event: True, processes[0])
    run.go_on()
    assert processes[0].wait(60) == 0, processes[0].text
    assert run.result()["model_sha256"] == undisturbed
    etcd.unfreeze(frozen)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_two_of_three_members_are_down_when_a_machine_is_lost(run: Run, undisturbed: str, victim: int) -> None:
    """The run trains on until then; without etcd it re-forms on the same machines, but not on fewer."""
    etcd, processes = cluster_of(run), run.begin(nproc="2")
    etcd.kill(0, 1)
    run.wait_for("coordinator", lambda event: not event["answers"], *processes)
    run.hold(14)
    run.wait_until((run.path / "held-14").exists, "two steps without etcd")
    run.kill_worker(run.lab.nodes[1])
    run.wait_for("fault", lambda event: True, *processes)
    run.hold(16)
    run.wait_for("joined", lambda event: True, *processes)
    run.wait_until((run.path / "held-16").exists, "two steps after a process was replaced")
    generation = run.generation()
    survivor = processes[1 - victim]
    run.lab.nodes[victim].kill()
    if victim == 0:
        run.wait_for("paused", lambda event: "does not answer" in event["why"], survivor)
    else:
        run.wait_for("node lost", lambda event: True, survivor)
        assert "Training continues; no new worker group can form until it answers" in survivor.text
    assert run.generation() == generation
    etcd.restart(0, 1)
    run.hold(18)
    run.wait_for("joined", lambda event: event["generation"] > generation, survivor)
    run.go_on()
    assert survivor.wait(60) == 0, survivor.text
    assert run.result()["model_sha256"] == undisturbed


def test_all_members_are_restarted_from_their_disks(run: Run, undisturbed: str) -> None:
    etcd, processes = cluster_of(run), run.begin(nproc="1")
    etcd.kill(0, 1, 2)
    run.wait_for("coordinator", lambda event: not event["answers"], *processes)
    etcd.restart(0, 1, 2)
    run.wait_for("coordinator", lambda event: event["answers"], *processes)
    run.lab.nodes[0].kill()
    run.hold(14)
    run.wait_for("joined", lambda event: True, processes[1])
    run.go_on()
    assert processes[1].wait(60) == 0, processes[1].text
    assert run.result()["model_sha256"] == undisturbed
