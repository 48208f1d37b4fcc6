"""A run on several machines, which stands still wherever a test needs it to."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.lab.etcd import EtcdCluster
from tests.lab.machines import Lab, Node, NodeProcess

from paceline.data.audit import audit
from paceline.elastic.agent import AgentConnection, RunStatus
from paceline.runs.directory import RunDirectory

TASK = '''
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
import os
import signal
import socket
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.core.errors import ConfigError


@dataclass
class Small(paceline.Task):
    """Trains up to the step that the file `hold` names; `kill-HOST` kills a process that stands there."""

    defaults = paceline.Defaults(global_batch_size=24, microbatches=12)
    optimizer = None  # an export calls loss() without one

    def build_model(self):
        refused = Path(__file__).with_name(f"refuse-{socket.gethostname()}")
        if refused.exists():
            raise ConfigError("no data here") if refused.read_text() == "user" else OSError("no disk here")
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3))

    def build_dataset(self, split):
        if split == "val":
            return None
        data = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(250, 8, generator=data), torch.randint(0, 3, (250,), generator=data))

    def build_optimizer(self, model):
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return self.optimizer

    def loss(self, model, batch):
        steps = [int(state["step"]) for state in self.optimizer.state.values()] if self.optimizer else []
        hold, death = (Path(__file__).with_name(name) for name in ("hold", f"kill-{socket.gethostname()}"))
        while steps and hold.exists() and max(steps) >= int(hold.read_text()):
            hold.with_name(f"held-{max(steps)}").touch()
            with suppress(FileNotFoundError):
                death.unlink()  # by one process of that machine alone
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels)
'''
OPTIONS = ("--max-steps", "40", "--seed", "5", "--threads", "1", "--checkpoint-every", "10steps")
# A run that stands still for a test does not hang; who is kept from the processor for a while is not lost.
PATIENT = ("--hang-timeout", "never", "--heartbeat", "8")
BOTH = pytest.mark.parametrize("coordinator", ["embedded", "etcd"], indirect=True)
"""For tests of what holds in whichever way the leader and the nodes are decided on."""

EMBEDDED_FIRST = pytest.mark.parametrize(
    "coordinator", ["embedded", pytest.param("etcd", marks=pytest.mark.slow)], indirect=True
)
"""The same, where etcd decides as it does in other tests."""


class Run:
    """A run on the machines of a lab; it stands still at the step that :meth:`hold` names.

    Args:
        lab: the machines.
        wait_until: the fixture.
        etcd: what the nodes are decided on with, if not by them.
        path: where the run is, if not in the lab's directory.
    """

    def __init__(
        self,
        lab: Lab,
        wait_until: Callable[..., None],
        etcd: EtcdCluster | None = None,
        path: Path | None = None,
    ) -> None:
        self.lab = lab
        self.etcd = etcd
        self.path = path or lab.directory
        self.directory = RunDirectory(self.path / "run")
        self._wait_until = wait_until
        (self.path / "small.py").write_text(TASK)

    def train(self, node: Node, nodes: str, nproc: str, *more: str) -> NodeProcess:
        meet = ("--rdzv-endpoint", f"{self.lab.nodes[0].address}:29500", "--nodes", nodes)
        options = (*OPTIONS, *PATIENT, "--run-dir", "run", "--nproc", nproc)
        if self.etcd is not None:
            options += ("--coordinator", self.etcd.url)
        command = ("train", "small.py:Small", *options, *meet, *more)
        return self.paceline(node, *command)

    def paceline(self, node: Node, *arguments: str) -> NodeProcess:
        return node.start([sys.executable, "-m", "paceline", *arguments], env={"TORCH_CPP_LOG_LEVEL": "ERROR"})

    def begin(self, *more: str, nproc: str = "2", nodes: str = "2") -> list[NodeProcess]:
        """All machines, standing still after step 12."""
        self.hold(12)
        processes = [
            self.train(node, nodes, nproc, "--node-rank", str(rank), *more) for rank, node in enumerate(self.lab.nodes)
        ]
        self.wait_for("checkpoint", lambda event: event["step"] == 10, *processes)
        return processes

    def kill_worker(self, node: Node) -> None:
        """Kill one process of this machine, which stands still."""
        (self.path / f"kill-{node.name}").touch()

    def hold(self, step: int) -> None:
        new = self.path / "hold.new"
        new.write_text(str(step))
        new.rename(self.path / "hold")

    def step_until(self, what: str, matching: Callable[[dict[str, Any]], bool], *processes: NodeProcess) -> None:
        """Go on step by step, and stand still again once this event is there."""

        def there() -> bool:
            held = int((self.path / "hold").read_text())
            if self._happened(what, matching, processes):
                return True
            if (self.path / f"held-{held}").exists():
                self.hold(held + 1)
            return False

        self._wait_until(there, what, timeout_s=120)

    def generation(self) -> int:
        """The last group's that was told."""
        return max(event["generation"] for event in self.directory.read_events() if event["event"] == "group")

    def wait_for_joiners(self, number: int, *processes: NodeProcess, leader: Node | None = None) -> None:
        """Wait until so many workers wait to take part, as the leading machine knows: the first, or this."""

        def there() -> bool:
            assert all(process.poll() is None for process in processes), processes[-1].text
            workers = self.status(leader or self.lab.nodes[0]).workers
            waiting = [w for w in workers if w.rank is None and w.phase == "waiting for a group"]
            return len(waiting) >= number

        self._wait_until(there, "workers that wait", timeout_s=120)

    def wait_for_the_stop(self) -> None:
        """Wait until the first machine, which leads, has told its workers to stop after their step."""
        self._wait_until(lambda: self.status(self.lab.nodes[0]).stopping, "the stop", timeout_s=90)

    def status(self, leader: Node) -> RunStatus:
        """What the agent of this machine, which leads, knows."""
        seen = RunDirectory(self.path / "seen")
        seen.path.mkdir(exist_ok=True)
        note = json.loads(self.directory.agent.read_text())
        # The socket is in the machine's own /dev/shm.
        note["socket"] = f"/proc/{leader.pid}/root{note['socket']}"
        seen.agent.write_text(json.dumps(note))
        with AgentConnection(seen) as agent:
            return agent.status()

    def go_on(self) -> None:
        (self.path / "hold").unlink()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        self._wait_until(condition, what, timeout_s=90)

    def wait_for(self, what: str, matching: Callable[[dict[str, Any]], bool], *processes: NodeProcess) -> None:
        self._wait_until(lambda: self._happened(what, matching, processes), what, timeout_s=120)

    def _happened(
        self, what: str, matching: Callable[[dict[str, Any]], bool], processes: Sequence[NodeProcess]
    ) -> bool:
        for process in processes:
            assert process.poll() is None, process.text
        events = self.directory.read_events() if self.directory.events.exists() else []
        return any(event["event"] == what and matching(event) for event in events)

    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.directory.result.read_text())
        report = audit(self.directory)
        assert report.clean, report.verdict
        assert report.steps == 40
        return result
