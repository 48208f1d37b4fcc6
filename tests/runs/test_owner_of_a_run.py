"""A run has one owner on network file systems whose locks hold within a node, and on those without locks."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.lab.network_file_system import Mount, network_file_system
from tests.processes import Processes

from paceline.core.ownership import SILENT_S, claims
from paceline.data.audit import audit
from paceline.runs.checkpoint_store import scan
from paceline.runs.directory import RunDirectory

pytestmark = [pytest.mark.system, pytest.mark.cold]

TASK = """
from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


@dataclass
class Small(paceline.Task):
    lr: float = 0.1
    defaults = paceline.Defaults(global_batch_size=24, microbatches=4)

    def build_model(self):
        return nn.Linear(8, 3)

    def build_dataset(self, split):
        data = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(240, 8, generator=data), torch.randint(0, 3, (240,), generator=data))

    def build_optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def loss(self, model, batch):
        time.sleep(float(os.environ.get("SLOW_S", "0")))
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels)
"""

# A machine of its own: no process of another one can be seen, and it was booted on its own.
AS_MACHINE = """
mount --bind "$1" /proc/sys/kernel/random/boot_id && hostname "$2" && shift 2 && exec "$@"
"""
STEPS = ("--max-steps", "400", "--checkpoint-every", "5steps", "--keep-checkpoints", "9", "--threads", "1")


class Machine:
    """A node that starts commands.

    Attributes:
        path: where the file system is mounted.
    """

    def __init__(self, name: str, mount: Mount, processes: Processes, directory: Path) -> None:
        self.path = mount.path
        self.set = mount.set
        self._processes = processes
        boot = directory / f"{name}.boot"
        boot.write_text(f"{name * 8}-0000-0000-0000-000000000000\n")
        namespaces = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
        self._enter = (*namespaces, "sh", "-c", AS_MACHINE, "sh", str(boot), f"node-{name}")
        self._env = {name: str(self.path / name.lower()) for name in ("PACELINE_REGISTRY", "XDG_CONFIG_HOME")}

    def start(self, *words: str | Path, slow_s: float = 0.0) -> subprocess.Popen[str]:
        command = [*self._enter, sys.executable, "-m", "paceline", *map(str, words)]
        return self._processes.start(command, cwd=self.path, env={**self._env, "SLOW_S": str(slow_s)})

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return self._processes.finish(self.start(*words), timeout_s=SILENT_S + 120)

    def succeed(self, *words: str | Path) -> str:
        done = self.run(*words)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout


@pytest.fixture
def machines(tmp_path: Path, run_processes: Processes) -> Iterator[list[Machine]]:
    """Two machines with one file system."""
    if subprocess.run(["unshare", "--mount", "--pid", "--uts", "--fork", "true"], capture_output=True).returncode:
        pytest.skip("namespaces are not allowed here")
    with network_file_system(tmp_path, locks="node") as mounts:
        (mounts["a"].path / "task.py").write_text(TASK)
        yield [Machine(name, mount, run_processes, tmp_path) for name, mount in mounts.items()]


def wait_for_checkpoint(directory: RunDirectory, trains: subprocess.Popen[str]) -> None:
    while not directory.checkpoints.is_dir() or not scan(directory.checkpoints):
        assert trains.poll() is None
        time.sleep(0.1)


@pytest.mark.slow
def test_where_locks_hold_within_a_node(machines: Sequence[Machine]) -> None:
    a, b = machines
    directory = RunDirectory(b.path / "run")
    trains = a.start("train", "task.py:Small", *STEPS, "--run-dir", "run", "--quiet", slow_s=0.05)
    wait_for_checkpoint(directory, trains)
    for refused in (("resume", "run", "--quiet"), ("checkpoint", "prune", "run", "--keep", "1")):
        done = b.run(*refused)
        assert done.returncode == 2
        (sentence,) = done.stderr.strip().splitlines()[-1:]
        assert "run is in use by a process of node-a, seen" in sentence
        assert sentence.endswith("Wait for it to end, or choose another --run-dir DIR.")
        assert trains.poll() is None
    assert " running " in b.succeed("runs", ".")
    before = len(scan(directory.checkpoints))
    trains.send_signal(signal.SIGKILL)  # unshare, and with it the machine
    trains.wait()
    assert before > 1
    began = time.monotonic()
    resumed = b.run("resume", "run", "--quiet")
    assert resumed.returncode == 0, resumed.stderr
    assert "is in use by a process of node-a" in resumed.stderr, "it says for what it waits"
    assert time.monotonic() - began > SILENT_S - 1
    assert audit(directory).clean
    assert list(claims(directory.lock)) == []


@pytest.mark.parametrize("nproc", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_without_locks(tmp_path: Path, run_processes: Processes, nproc: str) -> None:
    with network_file_system(tmp_path, nodes="a") as mounts:
        path = mounts["a"].path
        (path / "task.py").write_text(TASK)
        np.save(path / "rows.npy", np.zeros((50, 8), np.float32))
        mounts["a"].set(lock_error=errno.ENOSYS if nproc == "1" else errno.ENOLCK)
        env = {"PACELINE_REGISTRY": str(path / "registry"), "XDG_CONFIG_HOME": str(path / "config")}

        def start(*words: str, slow_s: float = 0.0) -> subprocess.Popen[str]:
            command = (sys.executable, "-m", "paceline", *words)
            return run_processes.start(command, cwd=path, env={**env, "SLOW_S": str(slow_s)})

        def succeed(*words: str) -> str:
            done = run_processes.finish(start(*words))
            assert done.returncode == 0, done.stderr
            assert done.stderr.count("Traceback") == 0
            return done.stdout

        directory = RunDirectory(path / "run")
        train = ("train", "task.py:Small", *STEPS, "--nproc", nproc, "--run-dir", "run", "--quiet")
        trains = start(*train, slow_s=0.05)
        wait_for_checkpoint(directory, trains)
        second = run_processes.finish(start("resume", "run", "--quiet"))
        assert second.returncode == 2
        assert second.stderr.strip().endswith(
            "run is in use by another process. Wait for it to end, or choose another --run-dir DIR."
        )
        assert " running " in succeed("runs", ".")
        trains.kill()
        trains.wait()
        began = time.monotonic()
        succeed(*train)
        assert time.monotonic() - began < SILENT_S, "it saw that the process had ended"
        assert audit(directory).clean
        assert list(claims(directory.lock)) == []
        if nproc == "1":
            succeed("export", "run", "--tag", "prod")
            succeed("registry", "tag", "small@prod", "best")
            succeed("predict", "small@best", "rows.npy", "--output", "out.npz")
            assert (path / "out.npz").is_file()
            assert "removed step-" in succeed("checkpoint", "prune", "run", "--keep", "1")
            succeed("tune", "task.py:Small", "--search", "lr=log:1e-3:1", "--trials", "2", "--max-steps", "4")
