"""Nodes whose files are on a network file system, and a run and a package to begin with."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess, Popen
from typing import Any

import pytest
from tests.lab.network_file_system import Mount
from tests.processes import Processes

from paceline.runs.checkpoint_manifest import verify
from paceline.runs.checkpoint_store import scan

TASK = f"{Path(__file__).with_name('tasks.py')}:Dots"
STEPS = 24


@dataclass
class Node:
    """What runs on a node: commands whose run and registry are in a folder that the nodes share."""

    path: Path
    processes: Processes

    @property
    def run(self) -> Path:
        return self.path / "run"

    @property
    def env(self) -> dict[str, str]:
        # What a user trusts is at home, on this machine's own disk.
        return {"PACELINE_REGISTRY": str(self.path / "registry"), "XDG_CONFIG_HOME": str(self.path.parent / "home")}

    def start(self, *words: str | Path) -> Popen[str]:
        return self.processes.start([sys.executable, "-m", "paceline", *words], env=self.env)

    def finish(self, command: Popen[str]) -> CompletedProcess[str]:
        done = self.processes.finish(command)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def paceline(self, *words: str | Path) -> str:
        """Run a command that succeeds; return what it prints."""
        done = self.finish(self.start(*words))
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def train(self, *, pause_s: float = 0.0, nproc: int = 1) -> Popen[str]:
        """Start the training that :func:`trained` has done."""
        return self.start(
            *("train", TASK, "--max-steps", str(STEPS), "--checkpoint-every", "6steps", "--keep-checkpoints", "2"),
            *("--set", f"pause_s={pause_s}", "--nproc", str(nproc), "--threads", "1", "--run-dir", self.run, "--quiet"),
        )

    def require_trained(self, trained: Path) -> None:
        """The run has the bits of an undisturbed one, and its ledger has no hole."""
        assert sha256_of(self.run) == sha256_of(trained)
        assert json.loads(self.paceline("audit", self.run, "--json"))["clean"]
        for path in scan(self.run / "checkpoints"):
            verify(path)


@pytest.fixture
def node(run_processes: Processes) -> Callable[[Mount], Node]:
    """Have commands run on a mount."""
    return lambda mount: Node(mount.path, run_processes)


@pytest.fixture(scope="session")
def trained(session_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on this machine's own disk."""
    here = Node(tmp_path_factory.mktemp("local"), session_processes)
    done = here.finish(here.train())
    assert done.returncode == 0, done.stderr
    return here.run


@pytest.fixture(scope="session")
def packed(trained: Path, session_processes: Processes) -> Path:
    """A registry on this machine's own disk, with the package of that run."""
    here = Node(trained.parent, session_processes)
    here.paceline("export", here.run)
    return here.path / "registry"


def sha256_of(run: Path) -> Any:
    return json.loads((run / "result.json").read_text())["model_sha256"]
