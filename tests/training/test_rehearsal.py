"""What would fail after the first epoch fails before the first step; what fails later loses no step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.api import fit
from paceline.core.errors import ConfigError, DataError, TaskError
from paceline.runs.directory import RunDirectory

OPTIONS: dict[str, Any] = {"epochs": 2, "threads": 1, "microbatches": 2, "quiet": True, "on": "inprocess"}


class Noting(paceline.Callback):
    def __init__(self, kind: str, folder: str) -> None:
        self._kind, self._folder = kind, folder

    def on_epoch_end(self, epoch: int) -> None:
        if self._folder:
            (Path(self._folder) / "an-epoch-is-over").touch()

    def state_dict(self) -> dict[str, Any]:
        return {"count": np.int64(3)} if self._kind == "numpy" else {}

    def load_state_dict(self, state: Any) -> None:
        pass


class Adding(Noting):
    def on_eval_end(self, split: str, metrics: Any) -> Any:
        return {**metrics, "added": 1.0}


class Quantised(nn.Linear):
    """Its state has more than its parameters, as that of 4-bit weights, and it cannot load that."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.absmax"] = torch.ones(1)


@dataclass
class Evaluated(paceline.Task):
    """With the mistake that a test chooses."""

    mistake: str = ""
    folder: str = ""

    def build_model(self) -> nn.Module:
        model = (Quantised if self.mistake == "quantised" else nn.Linear)(2, 2)
        if self.mistake == "complex128":
            model.register_buffer("wide", torch.zeros(2, dtype=torch.complex128))
        return model

    def build_dataset(self, split: str) -> Any:
        if split == "test":
            return None
        samples = 0 if split == "val" and self.mistake == "empty" else 16
        return TensorDataset(torch.arange(samples * 2.0).view(-1, 2), torch.zeros(samples, dtype=torch.long))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        if self.folder and (Path(self.folder) / "an-epoch-is-over").exists():
            raise ValueError("the second evaluation fails")
        right = (model(batch[0]).argmax(1) == batch[1]).float()
        return {"accuracy": right.mean() if self.mistake == "mean" else right}

    def build_callback(self, model: nn.Module, schedule: Any) -> paceline.Callback:
        return (Adding if self.mistake == "adds" else Noting)(self.mistake, self.folder)


@pytest.mark.parametrize(
    ("mistake", "options", "error", "says"),
    [
        ("empty", {}, DataError, r'build_dataset\("val"\) returned a dataset without samples'),
        ("mean", {}, TaskError, "'accuracy' in a batch of"),
        ("", {"best_metric": "acuracy:max"}, ConfigError, "there is no metric 'acuracy'. The task evaluates: accuracy"),
        ("", {"early_stop": "acuracy:3"}, ConfigError, "--early-stop: there is no metric 'acuracy'"),
        ("numpy", {}, TaskError, "callback: the state cannot be saved: at count it holds a numpy.int64"),
        (
            "complex128",
            {},
            TaskError,
            "model: the state cannot be saved: at wide it holds",
        ),
        (
            "quantised",
            {},
            TaskError,
            "has 'weight.absmax', which is not a parameter or buffer, and the model cannot load",
        ),
    ],
)
def test_a_mistake_is_found_before_the_first_step(
    mistake: str, options: dict[str, Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with pytest.raises(error, match=says):
        fit(Evaluated(mistake), run_dir=str(run), **OPTIONS, **options)
    assert not RunDirectory(run).exists()
    # The same command with the mistake mended.
    assert fit(Evaluated(), run_dir=str(run), **OPTIONS).steps


def test_a_metric_that_a_callback_adds_may_be_named(tmp_path: Path) -> None:
    result = fit(Evaluated("adds"), run_dir=str(tmp_path / "run"), best_metric="added:max", **OPTIONS)
    assert result.metrics["val"]["added"] == 1


def test_steps_before_a_later_evaluation_that_fails_are_saved(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    options = {**OPTIONS, "global_batch_size": 4}
    with pytest.raises(ValueError, match="the second evaluation fails"):
        fit(Evaluated(folder=str(tmp_path)), run_dir=str(run.path), **options)
    assert [path.name[:13] for path in sorted(run.checkpoints.glob("step-*"))] == ["step-00000004", "step-00000008"]
    (tmp_path / "an-epoch-is-over").unlink()
    result = fit(Evaluated(folder=str(tmp_path)), run_dir=str(run.path), **options)
    undisturbed = fit(Evaluated(), run_dir=str(tmp_path / "other"), **options)
    assert result.model_sha256 == undisturbed.model_sha256
    evaluated = [json.loads(line) for line in run.metrics.read_text().splitlines() if '"val' in line]
    assert evaluated
