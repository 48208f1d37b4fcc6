"""What a task has called while it is trained: when, how often, and from where on when a run goes on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

import paceline
from paceline.core.task import BatchInfo, Callback, RankInfo, RunSchedule


class Diary(Callback):
    """Keeps what was called, as a part of the run's state."""

    def __init__(self, schedule: RunSchedule, stop_in: str, enough: int) -> None:
        self.schedule, self._stop_in, self._enough = schedule, stop_in, enough
        self.calls: list[str] = []

    def attach(self, group: RankInfo, *, step: int, epoch: int) -> None:
        assert (group.rank, group.world_size, group.gather("x")) == (0, 1, ["x"])

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self._stop_in:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_epoch_begin(self, epoch: int) -> None:
        self._note(f"epoch {epoch} begins")

    def on_before_optimizer_step(self) -> None:
        self._note("gradients")

    def on_gradients_reduced(self, *, due: bool) -> Mapping[str, float]:
        return {"calls": float(len(self.calls))}

    def on_step_end(self, step: int, loss: float) -> None:
        self._note(f"step {step}")

    def on_eval_end(self, split: str, metrics: Mapping[str, float]) -> Mapping[str, float]:
        self._note(f"{split} evaluated")
        return {**metrics, "doubled": 2 * metrics["loss"]}

    def on_epoch_end(self, epoch: int) -> None:
        self._note(f"epoch {epoch} ends")
        self.should_stop = epoch + 1 == self._enough

    def on_fit_end(self) -> None:
        self._note("end")

    def state_dict(self) -> dict[str, Any]:
        return {"calls": list(self.calls)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls = list(state["calls"])


@dataclass
class Watched(paceline.Task):
    """Six samples in two steps an epoch, and what its loss was told of them."""

    stop_in: str = ""
    enough: int = 9

    def build_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def build_dataset(self, split: str) -> Any:
        x = torch.arange(6.0)[:, None]
        return None if split == "test" else TensorDataset(x, x)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.01)

    def build_callback(self, model: nn.Module, schedule: RunSchedule) -> Callback:
        self.diary = Diary(schedule, self.stop_in, self.enough)
        self.places: list[BatchInfo] = []
        return self.diary

    def on_batch_begin(self, place: BatchInfo) -> None:
        self.places.append(place)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch[0]) - batch[1]).square().mean()


def fit(task: Watched, run: Path, **options: Any) -> paceline.Result:
    values = {"microbatches": 2, "global_batch_size": 4, "epochs": 2, "log_every": 1, **options}
    return paceline.fit(task, run_dir=str(run), quiet=True, threads=1, **values)


EPOCH_0 = ["epoch 0 begins", "gradients", "step 1", "gradients", "step 2", "val evaluated", "epoch 0 ends"]
EPOCH_1 = ["epoch 1 begins", "gradients", "step 3", "gradients", "step 4", "val evaluated", "epoch 1 ends"]


def test_it_is_called_at_each_point_and_may_add_numbers(tmp_path: Path) -> None:
    task = Watched()
    result = fit(task, tmp_path / "run")
    assert task.diary.calls == [*EPOCH_0, *EPOCH_1, "end"]
    assert task.diary.schedule == RunSchedule(total_steps=4, steps_per_epoch=2, epochs=2)
    assert result.metrics["val"]["doubled"] == 2 * result.metrics["val"]["loss"]
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [record["logged"]["calls"] for record in records if record["kind"] == "train"] == [1, 3, 8, 10]
    train = [(place.step, place.number, place.samples) for place in task.places if place.split == "train"]
    # The second step has samples for one micro-batch alone.
    assert train == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (2, 0, 2), (2, 1, 2), (3, 0, 2)]


def test_a_batch_has_its_epoch_and_its_place_in_the_run(tmp_path: Path) -> None:
    task = Watched()
    fit(task, tmp_path / "run")
    train = [(place.step, place.epoch, place.progress) for place in task.places if place.split == "train"]
    assert train == [(0, 0, 0.0), (0, 0, 0.0), (1, 0, 0.25), (2, 1, 0.5), (2, 1, 0.5), (3, 1, 0.75)]
    assert {(place.epoch, place.progress) for place in task.places if place.split == "val"} == {(None, None)}


class Raises(Callback):
    """Raises a number of its task after each step, and stops the process once."""

    def __init__(self, task: Weighted) -> None:
        self.task = task

    def on_step_end(self, step: int, loss: float) -> None:
        self.task.weight *= 1.5
        if step == self.task.stop_after:
            os.kill(os.getpid(), signal.SIGTERM)


@dataclass
class Weighted(Watched):
    """Its loss has a weight that is the task's own state."""

    stop_after: int = 0

    def build_callback(self, model: nn.Module, schedule: RunSchedule) -> Callback:
        self.weight, self.places, self.loaded = 1.0, [], 0
        return Raises(self)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * self.weight

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weight = state["weight"]
        self.loaded += 1


def test_a_resumed_run_has_the_state_of_its_task(tmp_path: Path) -> None:
    with pytest.raises(paceline.StopRequested):
        fit(Weighted(stop_after=2), tmp_path / "run")
    task = Weighted(stop_after=2)
    result = fit(task, tmp_path / "run")
    assert (task.weight, task.loaded) == (1.5**4, 1)
    assert result.model_sha256 == fit(Weighted(), tmp_path / "undisturbed").model_sha256
    assert result.model_sha256 != fit(Watched(), tmp_path / "unweighted").model_sha256


@pytest.mark.parametrize("stop_in", ["step 1", "step 2", "val evaluated", "epoch 0 ends"])
def test_a_run_that_goes_on_owes_each_call_once(tmp_path: Path, stop_in: str) -> None:
    with pytest.raises(paceline.StopRequested):
        fit(Watched(stop_in=stop_in), tmp_path / "run")
    task = Watched(stop_in=stop_in)
    task.build_callback = lambda model, schedule: _diary(task, schedule)  # type: ignore[method-assign]
    result = fit(task, tmp_path / "run")
    assert task.diary.calls == [*EPOCH_0, *EPOCH_1, "end"]
    assert result.model_sha256 == fit(Watched(), tmp_path / "undisturbed").model_sha256


def _diary(task: Watched, schedule: RunSchedule) -> Diary:
    """One that stops nobody, for a task whose fields are those of the run."""
    task.diary, task.places = Diary(schedule, "", 9), []
    return task.diary


@pytest.mark.parametrize("eval_every", ["1epoch", "never"])
def test_its_wish_to_stop_ends_the_run_after_the_epoch(tmp_path: Path, eval_every: str) -> None:
    task = Watched(enough=2)
    result = fit(task, tmp_path / "run", epochs=9, eval_every=eval_every)
    assert (result.epochs, task.diary.calls[-2:]) == (2, ["epoch 1 ends", "end"])
