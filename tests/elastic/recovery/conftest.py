"""A small task that hurts itself at a given step, once; and runs of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.processes import Processes

from paceline.data.audit import AuditReport, audit
from paceline.runs.directory import RunDirectory

TASK = """
from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

# "ACTION STEP RANK; ...": what befalls this rank, once, in the first step of at least that number since its
# process began; then the next.
FAULTS = [fault.split() for fault in os.environ.get("FAULT", "none 0 0").split(";")]
calls = 0


@dataclass
class Small(paceline.Task):
    lr: float = 0.1
    defaults = paceline.Defaults(global_batch_size=24, microbatches=4)

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3))

    def build_dataset(self, split):
        if split != "train":
            return None
        data = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(250, 8, generator=data), torch.randint(0, 3, (250,), generator=data))

    def build_optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def loss(self, model, batch):
        hurt()
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels)


def hurt():
    global calls
    calls += 1
    grouped = torch.distributed.is_initialized()
    mine = torch.distributed.get_rank() if grouped else 0
    microbatches = 4 // (torch.distributed.get_world_size() if grouped else 1)
    happened = Path("happened")
    done = len(happened.read_text()) if happened.exists() else 0
    action, step, rank = FAULTS[done] if done < len(FAULTS) else ("none", 0, 0)
    if action == "none" or mine != int(rank) or calls <= int(step) * microbatches:
        return
    with happened.open("a") as file:
        file.write("" if action == "slow" else "x")
    if action == "slow":
        time.sleep(0.1)
        return
    if action == "sigkill-once-saved":  # the others wait for this rank, but for the one that writes
        while not list(Path("run/checkpoints").glob("step-*")):
            time.sleep(0.01)
        action = "sigkill"
    if action == "kill-parent":
        os.kill(os.getppid(), signal.SIGKILL)
    if action in ("hang", "kill-parent"):
        time.sleep(600)
    os.kill(os.getpid(), signal.Signals[action.upper()])


if __name__ == "__main__":
    paceline.fit(Small(), **json.loads(sys.argv[1]))
"""
# The task counts its losses, to be hurt at one of them; the purity guard would compute some of them twice.
OPTIONS = (
    *("--max-steps", "30", "--seed", "5", "--threads", "1", "--checkpoint-every", "4steps"),
    *("--purity", "off"),
)


@dataclass
class Small:
    """Starts ``paceline`` on the small task, in a directory of its own."""

    processes: Any
    wait_until: Callable[..., None]
    path: Path

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.path / "run")

    def start(
        self, *arguments: str, fault: str = "none 0 0", front: tuple[str, ...] = ("-m", "paceline")
    ) -> subprocess.Popen[str]:
        """Start ``paceline ARGUMENTS``, or what ``front`` names, in the background."""
        started: subprocess.Popen[str] = self.processes.start(
            [sys.executable, *front, *arguments], env={"FAULT": fault}
        )
        return started

    def train(self, *arguments: str, fault: str = "none 0 0") -> subprocess.Popen[str]:
        return self.start("train", "small.py:Small", *OPTIONS, "--run-dir", "run", *arguments, fault=fault)

    def finish(self, popen: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = self.processes.finish(popen, timeout_s=180)
        return done

    def wait_for_the_fault(self, popen: subprocess.Popen[str]) -> None:
        def there() -> bool:
            assert popen.poll() is None, popen.communicate()
            return (self.path / "happened").exists()

        self.wait_until(there, "the fault", timeout_s=60)

    def resume(self, *arguments: str) -> dict[str, Any]:
        """Resume to the end; return the result."""
        done = self.finish(self.start("resume", "run", "--json", "--quiet", *arguments))
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def audit(self, run: RunDirectory | None = None) -> AuditReport:
        return audit(run or self.run)

    def step(self) -> int:
        """The last step that an event names."""
        return max(event.get("step", 0) for event in self.run.read_events())


@pytest.fixture
def small(run_processes: Any, wait_until: Callable[..., None], tmp_path: Path) -> Small:
    (tmp_path / "small.py").write_text(TASK)
    return Small(run_processes, wait_until, tmp_path)


@pytest.fixture(scope="package")
def undisturbed(session_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of the same run, of one process that nobody disturbed."""
    path = tmp_path_factory.mktemp("undisturbed")
    (path / "small.py").write_text(TASK)
    done = session_processes.run(
        [sys.executable, "-m", "paceline", "train", "small.py:Small", *OPTIONS, "--run-dir", "run", "--json"],
        cwd=path,
        timeout_s=90,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
