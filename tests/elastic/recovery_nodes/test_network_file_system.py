"""Nodes that share a network file system: what one of them writes, another sees late, or otherwise than on a disk."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.elastic.recovery_nodes.runs import OPTIONS, Run
from tests.lab.machines import Lab, Machines, Node, NodeProcess
from tests.lab.network_file_system import Mount, network_file_system

from paceline.runs.directory import RunDirectory

pytestmark = [pytest.mark.system, pytest.mark.timeout(480)]
_AWAY_S = 15.0  # longer than a node may be silent


class SharedRun(Run):
    """A run in a network file system, which each machine sees at a mount of its own."""

    def __init__(self, lab: Lab, wait_until: Callable[..., None], mounts: dict[str, Mount], backing: Path) -> None:
        super().__init__(lab, wait_until)
        self.mounts = mounts
        self.directory = RunDirectory(backing / "run")

    def at(self, node: Node) -> Path:
        """The run's directory, as this machine sees it."""
        return self.mounts[node.name].path / "run"

    def paceline(self, node: Node, *arguments: str) -> NodeProcess:
        return super().paceline(node, *(str(self.at(node)) if word == "run" else word for word in arguments))


@pytest.fixture(params=[20.0])
def shared(
    request: pytest.FixtureRequest, tmp_path: Path, machines: Machines, wait_until: Callable[..., None]
) -> Iterator[SharedRun]:
    """Two machines; each believes for so many seconds that a file is absent."""
    names = ("node0", "node1")
    with network_file_system(tmp_path, names, absence_s=request.param) as mounts:  # before the machines, which copy it
        yield SharedRun(machines(2)[0].lab, wait_until, mounts, tmp_path / "backing")


def test_the_first_node_is_killed_at_the_start(shared: SharedRun, undisturbed: str) -> None:
    """There are no hard links either, and nodes that append to one file overwrite each other's lines."""
    for mount in shared.mounts.values():
        mount.set(link_error=errno.EPERM, appends_overwrite=True)
    first, second = shared.lab.nodes
    shared.hold(2)
    processes = [shared.train(node, "2", "1", "--node-rank", node.name[-1]) for node in (first, second)]
    shared.wait_until((shared.path / "held-2").exists, "the second step")
    first.kill()
    survivor = processes[1]
    shared.wait_for("takeover", lambda event: True, survivor)
    shared.go_on()
    assert survivor.wait(120) == 0, survivor.text
    assert shared.result()["model_sha256"] == undisturbed
    kinds = [event["event"] for event in shared.directory.read_events()]
    assert len(shared.directory.event_files()) == 2
    assert (kinds[-1], kinds.count("created"), kinds.count("takeover")) == ("finished", 1, 1)


def test_a_node_that_believes_in_an_absence_joins(shared: SharedRun, undisturbed: str) -> None:
    first, second = shared.lab.nodes
    shared.at(first).mkdir()
    assert not (shared.at(second) / "agents.json").exists()
    assert not (shared.at(second) / "agents.token").exists()
    shared.hold(2)
    leading = shared.train(first, "1:2", "1")
    shared.wait_until((shared.path / "held-2").exists, "the second step")
    joining = shared.paceline(second, "join", "run")
    shared.wait_for_joiners(1, leading, joining)
    shared.go_on()
    codes = [leading.wait(120), joining.wait(120)]
    assert codes == [0, 0], (leading.text, joining.text)
    assert "waiting for" in joining.text, "the absence was cached"
    assert shared.result()["model_sha256"] == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("shared", [50.0], indirect=True)
def test_a_restart_on_a_node_that_believes_in_absences_begins_at_the_checkpoint(
    shared: SharedRun, undisturbed: str
) -> None:
    first, second = shared.lab.nodes
    shared.hold(2)
    restarts = ("--recover", "restart")
    processes = [shared.train(node, "2", "1", "--node-rank", node.name[-1], *restarts) for node in (first, second)]
    shared.wait_until((shared.path / "held-2").exists, "the second step")
    assert not (shared.at(second) / "checkpoints").exists()
    shared.hold(12)
    shared.wait_for("checkpoint", lambda event: event["step"] == 10, *processes)
    assert not (shared.at(second) / "checkpoints").exists(), "the absence is cached no more"
    first.kill()
    shared.go_on()
    assert processes[1].wait(180) == 0, processes[1].text
    assert shared.result()["model_sha256"] == undisturbed
    events = shared.directory.read_events()
    assert [event["step"] for event in events if event["event"] == "started"] == [0, 10]
    assert not {"fallback", "paused"} & {event["event"] for event in events}


def test_a_silent_file_system_removes_no_leading_node(shared: SharedRun, undisturbed: str) -> None:
    """A worker of the other node ends meanwhile, on which the leader decides without its disk."""
    first, second = shared.lab.nodes
    shared.hold(12)
    processes = [shared.train(node, "2", "1", "--node-rank", node.name[-1]) for node in (first, second)]
    shared.wait_for("checkpoint", lambda event: event["step"] == 10, *processes)
    shared.mounts[first.name].set(away=True)
    shared.kill_worker(second)
    time.sleep(_AWAY_S)
    shared.mounts[first.name].set()
    shared.go_on()
    assert [process.wait(180) for process in processes] == [0, 0], [process.text for process in processes]
    assert shared.result()["model_sha256"] == undisturbed
    kinds = [event["event"] for event in shared.directory.read_events()]
    assert kinds.count("fault") == 1, (kinds, [process.text for process in processes])
    assert not {"node lost", "takeover", "paused"} & set(kinds), kinds


@pytest.mark.slow
def test_a_slow_file_system_removes_no_node(shared: SharedRun, undisturbed: str) -> None:
    """Each operation on a name takes longer than on NFS across a continent; a silent node is lost after two seconds."""
    for mount in shared.mounts.values():
        mount.set(slow_s=0.05)
    meet = ("--rdzv-endpoint", f"{shared.lab.nodes[0].address}:29500", "--nodes", "2", "--node-rank")
    words = ("train", "small.py:Small", *OPTIONS, "--run-dir", "run", "--nproc", "1", *meet)
    processes = [shared.paceline(node, *words, node.name[-1]) for node in shared.lab.nodes]
    codes = [process.wait(400) for process in processes]
    texts = [process.text for process in processes]
    assert codes == [0, 0], texts
    assert shared.result()["model_sha256"] == undisturbed
    assert not {"node lost", "takeover", "paused", "fault"} & {
        event["event"] for event in shared.directory.read_events()
    }
    assert not any("same token file" in text for text in texts), texts
