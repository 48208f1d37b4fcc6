"""A table of what network file systems lack, or do wrong: on each, three nodes train one run and lose one node."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.elastic.recovery_nodes.test_network_file_system import SharedRun
from tests.lab.machines import Machines, Node, NodeProcess
from tests.lab.network_file_system import network_file_system

from paceline.core.ownership import SILENT_S

pytestmark = [pytest.mark.system, pytest.mark.cold, pytest.mark.timeout(900)]
NAMES = ("node0", "node1", "node2")
AWAY_S = 15.0  # longer than a node may be silent


@dataclass(frozen=True)
class Row:
    """A file system.

    Attributes:
        mounts: how it is mounted.
        always: switches of all nodes, all the time.
        once: switches of the node that leads after the loss, for some seconds from then on.
        victim: the node that is lost; the first one leads.
    """

    mounts: Mapping[str, Any] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    once: Mapping[str, Any] = field(default_factory=dict)
    victim: int = 0


ROWS = {
    "locks within a node": Row({"locks": "node"}),
    "no locks": Row(always={"lock_error": errno.ENOLCK}, victim=1),
    "no hard links": Row(always={"link_error": errno.EPERM}),
    "lost answers": Row(always={"lost": ("rename", "mkdir", "unlink")}),
    "cached absences": Row({"absence_s": 30.0}),
    "slow": Row(always={"slow_s": 0.05}, victim=1),
    "stale handles": Row(once={"stale": 1}),
    "server away": Row(once={"away": True}),
    "server away with an error": Row(once={"away": True, "away_error": errno.ETIMEDOUT}),
}


class ThreeNodes(SharedRun):
    """Commands on nodes that also share a registry."""

    def paceline(self, node: Node, *arguments: str) -> NodeProcess:
        here = self.at(node)
        return node.start(
            [sys.executable, "-m", "paceline", *(str(here) if word == "run" else word for word in arguments)],
            env={"TORCH_CPP_LOG_LEVEL": "ERROR", "PACELINE_REGISTRY": str(here.with_name("registry"))},
        )

    def succeed(self, node: Node, *arguments: str) -> str:
        done = self.paceline(node, *arguments)
        assert done.wait(SILENT_S + 120) == 0, done.text
        assert "Traceback" not in done.text
        return done.text


@pytest.mark.parametrize("row", [pytest.param(row, id=name, marks=pytest.mark.slow) for name, row in ROWS.items()])
def test_three_nodes(
    row: Row, tmp_path: Path, machines: Machines, wait_until: Callable[..., None], undisturbed: str
) -> None:
    with network_file_system(tmp_path, NAMES, **row.mounts) as mounts:
        for mount in mounts.values():
            mount.set(**row.always)
        nodes = machines(3)
        run = ThreeNodes(nodes[0].lab, wait_until, mounts, tmp_path / "backing")
        run.hold(12)
        for node in nodes:
            assert not run.at(node).exists()  # where absences are cached, each node now believes in this one
        processes = [run.train(node, "3", "1", "--node-rank", node.name[-1]) for node in nodes]
        run.wait_for("checkpoint", lambda event: event["step"] == 10, *processes)

        # Other commands, while the run is active.
        third = nodes[2]
        run.succeed(third, "export", "run", "--name", "small")
        run.succeed(third, "registry", "tag", "small", "small@prod")
        run.succeed(third, "gc", str(mounts["node2"].path), "--keep-last", "1", "--yes")
        assert "running" in run.succeed(third, "runs", str(mounts["node2"].path))
        assert run.directory.exists()

        # The others go on without a node.
        (*_, last_machines) = (e["nodes"] for e in run.directory.read_events() if e["event"] == "machines")
        in_order = [name.partition("-")[0] for name in last_machines]  # the first one leads, and the next one after it
        leader = next(name for name in in_order if name != nodes[row.victim].name)
        if row.once:
            mounts[leader].set(**row.once)
        nodes[row.victim].kill()
        left = [process for process in processes if process is not processes[row.victim]]
        if row.once:
            time.sleep(AWAY_S)
            mounts[leader].set(stale=row.once.get("stale", 0))
        run.hold(24)
        run.wait_for("joined", lambda event: True, *left)
        run.wait_for("checkpoint", lambda event: event["step"] == 20, *left)
        kinds = [event["event"] for event in run.directory.read_events()]
        assert kinds.count("node lost") == (row.victim != 0), kinds
        assert kinds.count("takeover") == (row.victim == 0), kinds
        assert not {"fault", "paused", "fallback", "hang"} & set(kinds), kinds

        # All are lost; another node resumes the run, and one joins it.
        for node in nodes:
            node.kill()
            node.boot()
        run.hold(32)
        resuming = run.paceline(
            third, "resume", "run", "--nodes", "1:2", "--rdzv-endpoint", f"{third.address}:29500", "--nproc", "1"
        )
        wait_until((run.path / "held-32").exists, resuming.text, timeout_s=SILENT_S + 120)
        joining = run.paceline(nodes[0], "join", "run")
        run.wait_for_joiners(1, resuming, joining, leader=third)
        run.go_on()
        assert [resuming.wait(), joining.wait()] == [0, 0], (resuming.text, joining.text)
        assert run.result()["model_sha256"] == undisturbed
        assert json.loads(run.succeed(nodes[1], "audit", "run", "--json").splitlines()[-1])["clean"]
        assert not [name for name in os.listdir(tmp_path / "backing/run") if name.startswith(".run.lock")]
