"""--sdc-check-every: who computes or reads something else than the others is named, and nothing of it counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.data.audit import audit
from paceline.runs.directory import RunDirectory
from paceline.training.reproducibility import verification_key

pytestmark = pytest.mark.chaos

TASK = """
from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed, nn

import paceline

# "WHAT STEP RANK TIMES": what of this rank is wrong, from which step on and how often at most.
WHAT, STEP, RANK, TIMES = os.environ.get("CORRUPT", "none 0 0 0").split()
optimizer = None


def is_wrong(what):
    state = next(iter(optimizer.state.values()), None)
    done = 0 if state is None else int(state["step"])
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    if what != WHAT or done < int(STEP) or rank != int(RANK):
        return False
    times = Path("times")
    made = int(times.read_text()) if times.exists() else 0
    times.write_text(str(made + 1))
    return made < int(TIMES)


class Samples(torch.utils.data.Dataset):
    def __init__(self):
        data = torch.Generator().manual_seed(1)
        self.inputs, self.labels = torch.randn(250, 8, generator=data), torch.arange(250) % 3

    def __len__(self):
        return 250

    def __getitem__(self, index):
        inputs = self.inputs[index]
        return inputs + 1e-3 if optimizer is not None and is_wrong("fetch") else inputs, self.labels[index]


@dataclass
class Small(paceline.Task):
    defaults = paceline.Defaults(global_batch_size=24, microbatches=4)

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 3))

    def build_dataset(self, split):
        return Samples() if split == "train" else None

    def build_optimizer(self, model):
        global optimizer
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return optimizer

    def loss(self, model, batch):
        inputs, labels = batch
        logits = model(inputs)
        if is_wrong("forward"):
            logits = logits + torch.eye(*logits.shape) * 1e-4
        return nn.functional.cross_entropy(logits, labels)
"""
SEED, MICROBATCHES, EVERY, STEPS = 5, 4, 3, 18
ALWAYS = 10**6


def train(path: Path, *arguments: str, corrupt: str = "none 0 0 0") -> subprocess.CompletedProcess[str]:
    (path / "small.py").write_text(TASK)
    command = [sys.executable, "-m", "paceline", "train", "small.py:Small", "--run-dir", "run", "--threads", "1"]
    command += [
        "--max-steps",
        str(STEPS),
        "--seed",
        str(SEED),
        "--sdc-check-every",
        str(EVERY),
        "--num-workers",
        "0",
    ]
    return subprocess.run(
        [*command, *arguments],
        cwd=path,
        env={**os.environ, "CORRUPT": corrupt},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def parts(step: int, world_size: int) -> tuple[int, int, int]:
    """The micro-batch that is verified in the step after so many, who has it, and who computes it too."""
    key = verification_key(SEED, step)
    microbatch = key % MICROBATCHES
    shares = [range(r * MICROBATCHES // world_size, (r + 1) * MICROBATCHES // world_size) for r in range(world_size)]
    owner = next(rank for rank, shares_of in enumerate(shares) if microbatch in shares_of)
    return microbatch, owner, (owner + 1 + (key >> 32) % max(1, world_size - 1)) % world_size


def step_with(role: int, rank: int, world_size: int) -> int:
    """The first verified step, as the number of steps before it, in which a rank has (1) or checks (2) it."""
    candidates = range(EVERY - 1, STEPS, EVERY)
    return next(step for step in candidates if parts(step, world_size)[role] == rank)


def result_of(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((path / "run" / "result.json").read_text())
    report = audit(RunDirectory(path / "run"))
    assert report.clean, report.verdict
    return result


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("undisturbed")
    done = train(path, "--nproc", "1")
    assert done.returncode == 0, done.stderr
    return str(result_of(path)["model_sha256"])


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(("rank", "role", "what"), [(0, 1, "forward"), slow(1, 2, "fetch"), slow(2, 1, "forward")])
def test_the_wrong_rank_of_three_is_named(tmp_path: Path, undisturbed: str, rank: int, role: int, what: str) -> None:
    step = step_with(role, rank, 3)
    options = ("--nproc", "3", "--recover", "none")
    done = train(tmp_path, *options, corrupt=f"{what} {step} {rank} {ALWAYS}")
    others = " and ".join(str(r) for r in range(3) if r != rank)
    sentence = (
        f"rank {rank} computed another gradient for micro-batch {parts(step, 3)[0]} of step {step + 1} "
        f"than ranks {others}: its machine ("
    )
    assert done.returncode == 1
    assert f"paceline: {sentence}" in done.stderr
    assert "The step was not applied." in done.stderr
    assert "Traceback" not in done.stderr
    events = RunDirectory(tmp_path / "run").read_events()
    (event,) = (e for e in events if e["event"] == "corruption")
    assert (event["ranks"], event["step"]) == ([rank], step + 1)
    done = train(tmp_path, *options)
    assert done.returncode == 0, done.stderr
    assert result_of(tmp_path)["model_sha256"] == undisturbed


def test_in_place_the_wrong_worker_is_replaced(tmp_path: Path, undisturbed: str) -> None:
    corrupt = f"forward {step_with(1, 1, 3)} 1 2"
    done = train(tmp_path, "--nproc", "3", "--recover", "inplace", corrupt=corrupt)
    assert done.returncode == 0, done.stderr
    assert "rank 1 computed another gradient" in done.stderr
    result = result_of(tmp_path)
    assert result["model_sha256"] == undisturbed
    assert (result["restarts"], result["recoveries"]) == (0, 1)


def test_two_ranks_that_insist_cannot_be_told_apart(tmp_path: Path) -> None:
    corrupt = f"forward {step_with(1, 0, 2)} 0 {ALWAYS}"
    done = train(tmp_path, "--nproc", "2", "--recover", "inplace", corrupt=corrupt)
    assert done.returncode == 1
    assert "the ranks computed 2 different gradients" in done.stderr
    assert "three processes or more" in done.stderr


def test_a_rank_alone_finds_that_it_contradicts_itself(tmp_path: Path) -> None:
    done = train(tmp_path, "--nproc", "1", corrupt=f"forward {EVERY - 1} 0 1")
    assert done.returncode == 1
    assert (
        f"rank 0 computed different gradients for micro-batch {parts(EVERY - 1, 1)[0]} of step {EVERY}" in done.stderr
    )
