"""A run whose standard output is closed, or whose terminal or reader goes away, trains to its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.integration

TASK = """
from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import paceline


@dataclass
class Waits(paceline.Task):
    defaults = paceline.Defaults(global_batch_size=8, microbatches=2)

    def build_model(self):
        return torch.nn.Linear(2, 1)

    def build_dataset(self, split):
        return TensorDataset(torch.ones(80, 2)) if split == "train" else None

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        print("computing")
        Path("begun").touch()
        while not Path("go").exists():
            time.sleep(0.01)
        return model(batch[0]).mean()
"""
TRAIN = (sys.executable, "-m", "paceline", "train", "waits.py:Waits", "--max-steps", "4", "--threads", "1")


@pytest.fixture(autouse=True)
def task(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(TASK)


def result(tmp_path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((tmp_path / "run/result.json").read_text())
    return content


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_closed_streams(run_processes: Any, tmp_path: Path, nproc: str) -> None:
    (tmp_path / "go").touch()
    command = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *TRAIN, "--run-dir", "run", "--nproc", nproc)
    assert run_processes.run(command).returncode == 0
    assert result(tmp_path)["steps"] == 4
    assert (tmp_path / "run/logs/rank-0.log").read_text().count("computing") >= 4


def test_a_script_with_closed_streams(run_processes: Any, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    script = TASK + "\nif __name__ == '__main__':\n    print(paceline.fit(Waits(), max_steps=4, run_dir='run'))\n"
    (tmp_path / "script.py").write_text(script)
    done = run_processes.run(("sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "script.py"))
    assert (done.returncode, result(tmp_path)["steps"]) == (0, 4), done.stderr


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_a_terminal_that_closes(tmp_path: Path, wait_until: Callable[..., None], nproc: str) -> None:
    terminal, end = os.openpty()
    # As after `disown`: no signal tells it, but the terminal takes nothing (EIO).
    command = (*TRAIN, "--run-dir", "run", "--nproc", nproc)
    with subprocess.Popen(command, cwd=tmp_path, stdout=end, stderr=end, start_new_session=True) as popen:
        try:
            os.close(end)
            wait_until((tmp_path / "begun").exists, "the first step")
            os.close(terminal)
            (tmp_path / "go").touch()
            assert popen.wait(120) == 0
        finally:
            popen.kill()
    assert result(tmp_path)["steps"] == 4


def test_nohup(run_processes: Any, tmp_path: Path, wait_until: Callable[..., None]) -> None:
    popen = run_processes.start(("nohup", *TRAIN, "--run-dir", "run", "--nproc", "2"))
    wait_until((tmp_path / "begun").exists, "the first step")
    for process in [psutil.Process(popen.pid), *psutil.Process(popen.pid).children(recursive=True)]:
        process.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    done = run_processes.finish(popen)
    assert (done.returncode, result(tmp_path)["steps"]) == (0, 4), done.stderr


def test_without_nohup_a_hangup_saves(run_processes: Any, tmp_path: Path, wait_until: Callable[..., None]) -> None:
    popen = run_processes.start((*TRAIN, "--run-dir", "run"))
    wait_until((tmp_path / "begun").exists, "the first step")
    popen.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    done = run_processes.finish(popen)
    assert done.returncode == 75, done.stderr
    assert "everything is saved" in done.stderr
