"""A run on several machines that die, are cut off, come and go: the model is the undisturbed run's."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
from tests.lab.machines import Lab, Machines, Node, NodeProcess

from paceline.data.audit import audit
from paceline.run_directory import RunDirectory

pytestmark = pytest.mark.timeout(240)

TASK = '''
from dataclasses import dataclass
from pathlib import Path
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


@dataclass
class Small(paceline.Task):
    """Trains on until the file `hold` names a step; so what happens to machines happens within the run."""

    defaults = paceline.Defaults(global_batch_size=24, shards=12)

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3))

    def build_dataset(self, split):
        if split != "train":
            return None
        data = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(250, 8, generator=data), torch.randint(0, 3, (250,), generator=data))

    def build_optimizer(self, model):
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return self.optimizer

    def loss(self, model, batch):
        steps = [int(state["step"]) for state in self.optimizer.state.values()]
        hold = Path(__file__).with_name("hold")
        while steps and hold.exists() and max(steps) >= int(hold.read_text() or "0"):
            time.sleep(0.01)
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels)
'''
OPTIONS = ("--max-steps", "40", "--seed", "5", "--threads", "1", "--checkpoint-every", "10steps")


class Run:
    """A run on the machines of a lab; it stands still at the step that :meth:`hold` names."""

    def __init__(self, lab: Lab, wait_until: Callable[..., None]) -> None:
        self.lab = lab
        self.path = lab.directory
        self.directory = RunDirectory(self.path / "run")
        self._wait_until = wait_until
        (self.path / "small.py").write_text(TASK)

    def train(self, node: Node, nodes: str, nproc: str, *more: str) -> NodeProcess:
        meet = ("--rdzv-endpoint", f"{self.lab.nodes[0].address}:29500", "--nodes", nodes)
        command = ("train", "small.py:Small", *OPTIONS, "--run", "run", "--nproc", nproc, *meet, *more)
        return self.paceline(node, *command)

    def paceline(self, node: Node, *arguments: str) -> NodeProcess:
        return node.start(
            [sys.executable, "-m", "paceline", *arguments], env={"TORCH_CPP_LOG_LEVEL": "ERROR"}
        )

    def hold(self, step: int) -> None:
        new = self.path / "hold.new"
        new.write_text(str(step))
        new.rename(self.path / "hold")

    def go_on(self) -> None:
        (self.path / "hold").unlink()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        self._wait_until(condition, what, timeout_s=90)

    def wait_for(
        self, what: str, matching: Callable[[dict[str, Any]], bool], *processes: NodeProcess
    ) -> None:
        def there() -> bool:
            for process in processes:
                assert process.poll() is None, process.text
            events = self.directory.read_events() if self.directory.events.exists() else []
            return any(event["event"] == what and matching(event) for event in events)

        self._wait_until(there, what, timeout_s=120)

    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.directory.result.read_text())
        report = audit(self.directory)
        assert report.clean, report.verdict
        assert report.steps == 40
        return result


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, module_processes: Any) -> str:
    path = tmp_path_factory.mktemp("undisturbed")
    (path / "small.py").write_text(TASK)
    command = [sys.executable, "-m", "paceline", "train", "small.py:Small", *OPTIONS, "--run", "run"]
    done = module_processes.run(command, cwd=path, timeout_s=120)
    assert done.returncode == 0, done.stderr
    sha256: str = json.loads((path / "run/result.json").read_text())["model_sha256"]
    return sha256


@pytest.fixture(params=[2])
def run(request: pytest.FixtureRequest, machines: Machines, wait_until: Callable[..., None]) -> Run:
    return Run(machines(request.param)[0].lab, wait_until)


def begin(run: Run, *more: str) -> list[NodeProcess]:
    """Two machines of two processes each, standing still after step 12."""
    run.hold(12)
    processes = [
        run.train(node, "2", "2", "--node-rank", str(rank), *more) for rank, node in enumerate(run.lab.nodes)
    ]
    run.wait_for("checkpoint", lambda event: event["step"] == 10, *processes)
    return processes


@pytest.mark.parametrize("victim", [0, 1])
def test_a_machine_is_killed(run: Run, undisturbed: str, victim: int) -> None:
    """The first one, which leads, or the other: all of it at once, its agent too."""
    processes = begin(run)
    survivor = processes[1 - victim]
    run.lab.nodes[victim].kill()
    run.wait_for("joined", lambda event: True, survivor)
    run.go_on()
    assert survivor.wait(120) == 0, survivor.text
    result = run.result()
    assert result["model_sha256"] == undisturbed
    assert result["world_size"] == 2
    lost = [event for event in run.directory.read_events() if event["event"] in ("node lost", "takeover")]
    assert [event["event"] for event in lost] == (["takeover"] if victim == 0 else ["node lost"])


def test_of_two_sides_only_one_goes_on(run: Run, undisturbed: str) -> None:
    processes = begin(run)
    run.lab.nodes[1].cut()
    run.wait_for("paused", lambda event: True, *processes)
    run.wait_for("joined", lambda event: True, *processes)
    run.go_on()
    run.wait_until(run.directory.result.exists, "the result")
    # The other side sees in the directory that all is done.
    codes = [process.wait(60) for process in processes]
    assert codes == [0, 0], [process.text for process in processes]
    assert sum("the run pauses" in process.text for process in processes) == 1
    result = run.result()
    assert (result["model_sha256"], result["world_size"]) == (undisturbed, 2)


@pytest.mark.parametrize("run", [3], indirect=True)
def test_machines_come_and_go(run: Run, undisturbed: str) -> None:
    """One begins; two join by the directory alone; one is seen off, and one is asked to leave by a signal."""
    first, second, third = run.lab.nodes
    run.hold(12)
    leading = run.train(first, "1:3", "1")
    run.wait_for("checkpoint", lambda event: event["step"] == 10, leading)
    joining = run.paceline(second, "join", "run")
    run.hold(14)
    run.wait_for("view", lambda event: event["nodes"] == 2, leading, joining)
    last = run.paceline(third, "join", "run", "--nproc", "2")
    run.hold(16)
    run.wait_for(
        "view", lambda event: event["nodes"] == 3 and event["world_size"] == 4, leading, joining, last
    )
    run.hold(18)
    scale = run.paceline(first, "scale", "run", "--nodes", "2")
    run.hold(20)
    assert scale.wait(90) == 0, scale.text
    assert last.wait(60) == 0, last.text
    joining.send_signal(signal.SIGTERM)
    run.hold(24)
    assert joining.wait(60) == 75, joining.text
    run.go_on()
    assert leading.wait(90) == 0, leading.text
    assert run.result()["model_sha256"] == undisturbed


def test_whoever_computes_something_else_is_sent_home(run: Run, undisturbed: str) -> None:
    first, second = run.lab.nodes
    run.hold(12)
    leading = run.train(first, "1:2", "1")
    run.wait_for("checkpoint", lambda event: event["step"] == 10, leading)
    source = (run.path / "small.py").read_text()
    (run.path / "small.py").write_text(source.replace("lr=0.05", "lr=0.06"))
    joining = run.paceline(second, "join", "run")
    assert joining.wait(90) == 2
    assert "task is" in joining.text
    (run.path / "small.py").write_text(source)
    run.go_on()
    assert leading.wait(90) == 0, leading.text
    assert run.result()["model_sha256"] == undisturbed


def test_whoever_does_not_hold_the_token_is_not_let_in(run: Run, undisturbed: str) -> None:
    first, second = run.lab.nodes
    run.hold(12)
    leading = run.train(first, "1:2", "1")
    run.wait_for("checkpoint", lambda event: event["step"] == 10, leading)
    forged = run.path / "forged"
    forged.touch(mode=0o600)
    forged.write_text("0" * 64 + "\n")
    joining = run.paceline(second, "join", "run", "--token-file", str(forged))
    run.wait_until(lambda: "a connection was refused" in leading.text, "the refusal")
    joining.send_signal(signal.SIGTERM)
    assert joining.wait(60) != 0
    run.go_on()
    assert leading.wait(90) == 0, leading.text
    assert run.result()["model_sha256"] == undisturbed
