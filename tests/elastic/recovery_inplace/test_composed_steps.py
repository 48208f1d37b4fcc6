"""A rank that is lost in a step of a task's own: the others undo what they did of it, in memory, and go on."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, Optimizer
from torch.utils.data import TensorDataset

import paceline
from paceline.core.task import BatchInfo

pytestmark = pytest.mark.chaos

AT = 5  # steps done; the checkpoint is older


@dataclass
class Autoencoder(paceline.Task):
    """Encoder and decoder learn in turn."""

    killed: str = ""  # a file that tells that a rank has been killed

    defaults = paceline.Defaults(global_batch_size=32, microbatches=4, epochs=1)

    def build_model(self) -> nn.Module:
        return nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), "decoder": nn.Linear(3, 6)})

    def build_dataset(self, split: str) -> Any:
        return TensorDataset(torch.randn(256, 6)) if split == "train" else None

    def build_optimizer(self, model: nn.Module) -> Mapping[str, Optimizer]:
        assert isinstance(model, nn.ModuleDict)
        return {name: Adam(part.parameters(), lr=0.01) for name, part in model.items()}

    def on_batch_begin(self, info: BatchInfo) -> None:
        self.info = info

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        assert isinstance(model, nn.ModuleDict)
        return (model["decoder"](model["encoder"](batch[0])) - batch[0]).square().mean()

    def last_loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        if self.killed and (self.info.step, self.info.number) == (AT, 2) and not os.path.exists(self.killed):
            Path(self.killed).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.loss(model, batch)

    def train_step(self, step: paceline.TrainStep) -> float:
        step.backward(self.loss)
        step.update("encoder")
        loss = step.backward(self.last_loss)
        step.update("decoder")
        return loss


class OnePass(Autoencoder):
    """Nothing changes before the pass in which the rank is lost, so nothing has to be undone."""

    def train_step(self, step: paceline.TrainStep) -> float:
        loss = step.backward(self.last_loss)
        step.update()
        return loss


class Sharpness(Autoencoder):
    """The task changes the parameters itself before the pass in which the rank is lost (SAM)."""

    def train_step(self, step: paceline.TrainStep) -> float:
        step.backward(self.loss)
        parameters = list(step.module.parameters())
        away = [0.1 * parameter.grad for parameter in parameters if parameter.grad is not None]
        with torch.no_grad():
            torch._foreach_add_(parameters, away)
        loss = step.backward(self.last_loss)
        with torch.no_grad():
            torch._foreach_sub_(parameters, away)
        step.update()
        return loss


@pytest.mark.parametrize("task", ["Autoencoder", "OnePass", "Sharpness"])
def test_the_others_continue_from_memory(run_processes: Any, tmp_path: Path, task: str) -> None:
    def train(run: str, *options: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        words = [f"{__file__}:{task}", "--threads", "1", "--run-dir", run, "--checkpoint-every", "2steps"]
        done = run_processes.run([sys.executable, "-m", "paceline", "train", *words, "--json", "--quiet", *options])
        assert done.returncode == 0, done.stderr
        events = (tmp_path / run / "events.jsonl").read_text().splitlines()
        return json.loads(done.stdout.splitlines()[-1]), [json.loads(event) for event in events]

    undisturbed, _ = train("undisturbed")
    disturbed, events = train("disturbed", "--nproc", "2", "--set", f"killed={tmp_path / 'killed'}")
    assert (disturbed["recoveries"], disturbed["restarts"]) == (1, 0)
    assert [event["step"] for event in events if event["event"] == "joined"][:1] == [AT]
    assert disturbed["model_sha256"] == undisturbed["model_sha256"]
    assert disturbed["metrics"] == undisturbed["metrics"]
