"""Tasks with faults, and what commands say of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

TASKS = """
from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import paceline


class Items(Dataset):
    def __init__(self, fault):
        self.fault = fault

    def __len__(self):
        return 96

    def __getitem__(self, i):
        if i == 77 and self.fault == "raise":
            raise OSError("no such picture")
        if i == 77 and self.fault == "die":
            os._exit(3)
        return torch.full((9 if i == 77 and self.fault == "shape" else 8,), i / 96), i % 3


@dataclass
class Good(paceline.Task):
    lr: float = 0.1
    fault: str = "none"
    defaults = paceline.Defaults(global_batch_size=24, microbatches=4)

    def build_model(self):
        if self.fault == "no model":
            return "a model"
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 3))
        return nn.Flatten() if self.fault == "no parameters" else model

    def build_dataset(self, split):
        if split != "train":
            return None
        if self.fault == "no data":
            return None
        if self.fault == "empty":
            return TensorDataset(torch.zeros(0, 8))
        if self.fault == "number":
            return 17
        if self.fault in ("raise", "die", "shape"):
            return Items(self.fault)
        data = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(240, 8, generator=data), torch.randint(0, 3, (240,), generator=data))

    def build_optimizer(self, model):
        return None if self.fault == "no optimizer" else torch.optim.AdamW(model.parameters(), lr=self.lr)

    def build_callback(self, model, schedule):
        return [paceline.Callback()] if self.fault == "callbacks" else None

    def on_batch_begin(self, info):
        self.info = info

    def loss(self, model, batch):
        inputs, labels = batch
        losses = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
        if self.fault == "vector":
            return losses
        if self.fault == "float":
            return 1.0
        if self.fault == "detached":
            return losses.mean().detach()
        if self.fault == "bug":
            return nn.functional.cross_entropy(model(inputs[:, :4]), labels)
        if self.fault == "nan" and not Path("mended").exists():
            return losses.mean() * (float("nan") if (self.info.step, self.info.number) >= (11, 1) else 1)
        return losses.mean()


@dataclass
class Other(Good):
    pass


@dataclass
class NoMethods(paceline.Task):
    pass


class Bare(Good):
    width: int = 3


@dataclass
class Needs(Good):
    width: int = None

    def __init__(self, width):
        self.width = width
"""
STEPS = ("--max-steps", "20", "--threads", "1", "--checkpoint-every", "5steps", "--quiet")


class Said(NamedTuple):
    code: int
    out: str
    err: str


Paceline = Callable[..., Said]


def train(paceline: Paceline, *arguments: str, task: str = "tasks.py:Good", run: str = "run") -> Said:
    return paceline("train", task, *STEPS, "--run-dir", run, *arguments)


def assert_refused(said: Said, *parts: str, code: int = 2) -> None:
    assert said.code == code, said
    assert said.out == ""
    assert said.err.startswith("paceline: ")
    for part in parts:
        assert part in said.err
    assert said.err.count(parts[0]) == 1


def sha256(run: Path) -> str:
    return str(json.loads((run / "result.json").read_text())["model_sha256"])
