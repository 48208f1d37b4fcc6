"""The order of a set of strings, from which tasks number their classes, is that of every other process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cold

TASK = '''
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

WORDS = ("north", "east", "south", "west", "up", "down", "left", "right")


@dataclass
class Words(paceline.Task):
    """Classes are numbered in the order of a set."""

    def build_model(self):
        return nn.Linear(4, len(WORDS))

    def build_dataset(self, split):
        if split != "train":
            return None
        number = {word: n for n, word in enumerate(set(WORDS))}
        labels = [number[WORDS[i % len(WORDS)]] for i in range(48)]
        return TensorDataset(torch.randn(48, 4), torch.tensor(labels))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
'''


@pytest.mark.system
def test_processes_number_classes_of_a_set_alike(run_processes: Any, tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(TASK)
    options = ("--max-steps", "3", "--microbatches", "4", "--threads", "1", "--global-batch-size", "12", "--quiet")
    own = ("env", "-u", "PYTHONHASHSEED", sys.executable)
    worker = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m")
    started = {
        "one": run_processes.start([*own, "-m", "paceline", "train", "words.py:Words", *options, "--run-dir", "one"]),
        "two": run_processes.start(
            [*own, "-m", "paceline", "train", "words.py:Words", *options, "--nproc", "2", "--run-dir", "two"]
        ),
        "ranks": run_processes.start(
            [*own, *worker, "paceline", "train", "words.py:Words", *options, "--run-dir", "ranks"],
            env={"OMP_NUM_THREADS": "1"},
        ),
    }
    models = {}
    for name, process in started.items():
        done = run_processes.finish(process)
        assert done.returncode == 0, done.stderr
        models[name] = json.loads((tmp_path / name / "result.json").read_text())["model_sha256"]
    assert len(set(models.values())) == 1, models


def test_a_seed_of_the_user_is_kept(run_processes: Any) -> None:
    code = "from paceline.core.environment import restart_with_hash_seed as restart\n"
    code += "restart(); import os; print(os.environ['PYTHONHASHSEED'], hash('a'))"
    printed = [
        run_processes.run(
            ["env", "-u", "PYTHONHASHSEED", *variable, sys.executable, "-c", code], env=dict(os.environ)
        ).stdout.split()
        for variable in ([], ["PYTHONHASHSEED=0"], ["PYTHONHASHSEED=5"], ["PYTHONHASHSEED=random"])
    ]
    assert [words[0] for words in printed] == ["0", "0", "5", "random"]
    assert printed[0] == printed[1]
