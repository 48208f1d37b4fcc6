"""The disk of the run's directory fails for seconds while a worker dies: the run waits for it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.data.audit import audit
from paceline.runs.directory import RunDirectory

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(240),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C compiler"),
]

TASK = """
from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import paceline


@dataclass
class Slow(paceline.Task):
    defaults = paceline.Defaults(global_batch_size=8, microbatches=4)

    def build_model(self):
        torch.manual_seed(1)
        return torch.nn.Linear(4, 1)

    def build_dataset(self, split):
        rows = torch.arange(320.0).reshape(80, 4).sin()
        return TensorDataset(rows) if split == "train" else None

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        Path(f"worker-{os.getpid()}").touch()
        if Path("slowly").exists():
            time.sleep(0.02)
        return model(batch[0]).square().mean()
"""
TRAIN = ("-m", "paceline", "train", "slow.py:Slow", "--threads", "1", "--checkpoint-every", "10steps", "--max-steps")


@pytest.fixture(scope="module")
def failing_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("library") / "failing_disk.so"
    source = Path(__file__).with_name("failing_disk.c")
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def step(run: Path) -> int:
    try:
        return max(json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines())
    except (OSError, ValueError):
        return -1


@pytest.mark.parametrize("number", [errno.EROFS, errno.ESTALE, errno.EACCES], ids=errno.errorcode.get)
def test_a_disk_that_fails_for_seconds(
    run_processes: Any, tmp_path: Path, wait_until: Callable[..., None], failing_disk: Path, number: int
) -> None:
    (tmp_path / "slow.py").write_text(TASK)
    (tmp_path / "slowly").touch()
    run, fails = tmp_path / "run", tmp_path / "fails"
    env = {"LD_PRELOAD": str(failing_disk), "FAULT_FLAG": str(fails), "FAULT_PATH": f"{run}/"}
    words = (sys.executable, *TRAIN, "200", "--nproc", "2", "--run-dir", str(run))
    popen = run_processes.start(words, env={**env, "FAULT_ERRNO": str(number)})
    wait_until(lambda: step(run) >= 12 or popen.poll() is not None, "some steps")
    workers = {int(path.name.partition("-")[2]) for path in tmp_path.glob("worker-*")}
    fails.touch()
    os.kill(max(workers), signal.SIGKILL)
    if number == errno.EROFS:
        scaled = run_processes.paceline("scale", str(run), "--nproc", "3")
        assert scaled.returncode == 0, scaled.stderr
        wait_until(lambda: len(list(tmp_path.glob("worker-*"))) == 4, "the replacement, and one more worker")
    else:
        time.sleep(3)
    fails.unlink()
    (tmp_path / "slowly").unlink()
    done = run_processes.finish(popen)
    assert done.returncode == 0, done.stderr
    assert audit(RunDirectory(run)).clean
    result = json.loads((run / "result.json").read_text())
    alone = run_processes.run((sys.executable, *TRAIN, "200", "--run-dir", "alone", "--quiet"))
    assert alone.returncode == 0, alone.stderr
    assert result["model_sha256"] == json.loads((tmp_path / "alone/result.json").read_text())["model_sha256"]
    assert result["recoveries"] == 1, "the fault was recorded once the disk worked"
