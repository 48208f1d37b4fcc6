"""Files that only report what happened may be damaged: the run continues, and the damaged lines do not count."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import RunDirectoryError
from paceline.runs.directory import RunDirectory, starts
from paceline.runs.metric_writers import keep_until, scalars

TASK = """
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


@dataclass
class Small(paceline.Task):
    def build_model(self):
        return nn.Linear(4, 2)

    def build_dataset(self, split):
        return TensorDataset(torch.randn(24, 4), torch.arange(24) % 2) if split != "test" else None

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
_OPTIONS = ("--microbatches", "2", "--global-batch-size", "12", "--threads", "1", "--log-every", "1", "--quiet")


@pytest.fixture(scope="module")
def finished(module_processes: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("small")
    (directory / "small.py").write_text(TASK)
    run = directory / "run"
    done = module_processes.paceline(
        "train", f"{directory}/small.py:Small", "--epochs", "2", *_OPTIONS, "--run-dir", run
    )
    assert done.returncode == 0, done.stderr
    return run


def flip(path: Path, content: bytes, bit: int) -> None:
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    path.write_bytes(damaged)


def test_one_flipped_bit_stops_neither_resuming_nor_concluding(finished: Path, tmp_path: Path) -> None:
    directory = RunDirectory(finished)
    metrics, events = directory.metrics.read_bytes(), directory.events.read_bytes()
    chosen = random.Random(0)
    copied = RunDirectory(tmp_path)
    for bit in chosen.sample(range(8 * len(metrics)), 400):
        flip(copied.metrics, metrics, bit)
        kept = keep_until(copied.metrics, 4)
        assert len(kept) >= metrics.count(b"\n") - 2  # a damaged line break joins two lines
        assert [list(scalars(record)) for record in kept]
    for bit in chosen.sample(range(8 * len(events)), 400):
        flip(copied.events, events, bit)
        assert starts(copied.read_events()).keys() == {"restarts", "recoveries"}


def test_a_run_with_damaged_reports_is_resumed_to_its_end(finished: Path, run_processes: Any) -> None:
    directory = RunDirectory(finished)
    before = json.loads(directory.result.read_text())
    for path, key in ((directory.metrics, b'"step"'), (directory.events, b'"generation"')):
        content = path.read_bytes()
        flip(path, content, 8 * (content.index(key) + 2))
    with directory.events.open("ab") as file:
        file.write(b'{"event": "\xff"}\n')
    directory.result.unlink()
    done = run_processes.paceline("resume", finished, "--quiet")
    assert done.returncode == 0, done.stderr
    assert json.loads(directory.result.read_text())["model_sha256"] == before["model_sha256"]


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "run.toml", "result.json", "run.lock"])
def test_a_file_of_another_kind_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    os.mkfifo(tmp_path / name)
    with pytest.raises(RunDirectoryError, match=f"{name} is not a regular file"):
        directory.create()
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(RunDirectoryError, match=f"{name} is not a regular file"):
        directory.create()


def test_commands_of_one_second_take_directories_of_their_own(run_processes: Any, tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(TASK)
    started = [
        run_processes.start(
            [sys.executable, "-m", "paceline", "train", "small.py:Small", "--max-steps", "1", *_OPTIONS]
        )
        for _ in range(4)
    ]
    for process in started:
        done = run_processes.finish(process)
        assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "runs").glob("*/result.json"))) == 4
