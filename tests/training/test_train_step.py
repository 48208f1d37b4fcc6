"""Tasks that compute their steps themselves; the zoo's ``steps.py`` trains more of them on several processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.states import newest
from torch import nn
from torch.nn import functional
from torch.optim import LBFGS, SGD, Optimizer
from torch.utils.data import TensorDataset

import paceline
from paceline.training.reproducibility import build_split


@dataclass
class Points(paceline.Task):
    lr: float = 0.1
    normed: bool = True

    defaults = paceline.Defaults(global_batch_size=24, microbatches=4, epochs=1)

    def build_model(self) -> nn.Module:
        norm: list[nn.Module] = [nn.BatchNorm1d(8), nn.Dropout(0.2)] if self.normed else []
        return nn.Sequential(nn.Linear(3, 8), *norm, nn.Tanh(), nn.Linear(8, 2))

    def build_dataset(self, split: str) -> Any:
        points = torch.randn(66, 3)
        return TensorDataset(points, (points.sum(dim=1) > 0).long()) if split != "test" else None

    def build_optimizer(self, model: nn.Module) -> Any:
        return SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])


class Usual(Points):
    """What the trainer does, by hand."""

    def train_step(self, step: paceline.TrainStep) -> float | None:
        return super().train_step(step)


class TwoUpdates(Points):
    def train_step(self, step: paceline.TrainStep) -> float:
        first = step.backward(self.loss)
        step.update()
        second = step.backward(self.loss)
        step.update()
        step.log(second=second, at=step.step, of=step.progress or 0.0)
        return first


@dataclass
class Parts(Points):
    """Two optimizers, of which one is stepped."""

    names: list[str] = field(default_factory=list)

    def build_optimizer(self, model: nn.Module) -> Any:
        assert isinstance(model, nn.Sequential)
        return {"first": SGD(model[0].parameters(), lr=1.0), "last": SGD(model[-1].parameters(), lr=1.0)}

    def train_step(self, step: paceline.TrainStep) -> None:
        step.backward(self.loss)
        step.update(*self.names)


SEEN: dict[str, Any] = {}
"""What a task has seen, in this process."""


class Contrast(Points):
    """Each sample's embedding against those of the whole batch."""

    def embed(self, model: nn.Module, batch: Any) -> torch.Tensor:
        SEEN["rows"] = SEEN.get("rows", 0) + len(batch[0])
        rows: torch.Tensor = model(batch[0])
        return rows

    def contrast(self, rows: torch.Tensor) -> torch.Tensor:
        SEEN["all"] = len(rows)
        return (rows @ rows.T).logsumexp(dim=1).mean()

    def train_step(self, step: paceline.TrainStep) -> float:
        SEEN["parameters"] = [p.detach().clone() for p in step.module.parameters()]
        loss = step.backward_over_batch(self.embed, self.contrast)
        SEEN["gradients"] = [p.grad.clone() for p in step.module.parameters() if p.grad is not None]
        step.update()
        return loss


class QuasiNewton(Points):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return LBFGS(model.parameters(), lr=0.3, max_iter=2)


class SecondOrder(QuasiNewton):
    def train_step(self, step: paceline.TrainStep) -> None:
        step.update(closure=lambda: step.backward(self.loss))
        if step.step == SEEN.get("stop at"):
            os.kill(os.getpid(), signal.SIGTERM)


MISTAKES: list[tuple[str, Callable[[paceline.TrainStep], object]]] = [
    (r"each step must call step\.backward or step\.backward_over_batch", lambda step: None),
    ("updates 'critic', but the optimizers are main", lambda step: step.update("critic")),
    (
        "a tensor with one row for each of its 6 samples",
        lambda step: step.backward_over_batch(lambda model, batch: model(batch[0]).sum(), torch.sum),
    ),
    (
        "must be a scalar tensor that depends on the embeddings",
        lambda step: step.backward_over_batch(lambda model, batch: model(batch[0]), torch.Tensor.detach),
    ),
    (
        "mean loss of the batch as a scalar",
        lambda step: step.backward(lambda model, batch: model(batch[0])),
    ),
]


@dataclass
class Mistaken(Points):
    mistake: int = 0

    def train_step(self, step: paceline.TrainStep) -> None:
        MISTAKES[self.mistake][1](step)


class Diverging(Points):
    def train_step(self, step: paceline.TrainStep) -> None:
        step.backward(self.loss)
        step.update()
        step.backward(lambda model, batch: self.loss(model, batch) * (float("nan") if step.step == 2 else 1.0))


class Counting(Points):
    calls = 0

    def second(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        return self.loss(model, batch) * self.calls

    def train_step(self, step: paceline.TrainStep) -> None:
        step.backward(self.loss)
        step.backward(self.second)
        step.update()


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    yield
    SEEN.clear()


def fit(task: paceline.Task, run: Path, **options: Any) -> dict[str, Any]:
    result = paceline.fit(task, quiet=True, threads=1, num_workers=0, run_dir=str(run), **options)
    return dict(result.record)


def records(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "train"]


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1, "ema": 0.9}, {"precision": "bf16", "seed": 4}], ids=str)
def test_a_step_by_hand_has_the_bits_of_the_trainers(tmp_path: Path, options: dict[str, Any]) -> None:
    trainers, own = fit(Points(), tmp_path / "a", **options), fit(Usual(), tmp_path / "b", **options)
    for key in ("model_sha256", "steps", "samples", "metrics", "state_version"):
        assert trainers[key] == own[key], key
    assert [r["loss"] for r in records(tmp_path / "a")] == [r["loss"] for r in records(tmp_path / "b")]


def test_each_step_is_one_of_the_run_however_many_updates_it_makes(tmp_path: Path) -> None:
    result = fit(TwoUpdates(), tmp_path / "run", log_every=1)
    assert (result["steps"], result["samples"]) == (3, 66)
    logged = [record["logged"] for record in records(tmp_path / "run")]
    assert [(row["at"], row["of"]) for row in logged] == [(0, 0.0), (1, 1 / 3), (2, 2 / 3)]
    assert [record["lr"] for record in records(tmp_path / "run")] == [0.1, 0.05, 0.025]
    assert all(row["second"] != record["loss"] for row, record in zip(logged, records(tmp_path / "run"), strict=True))


def test_only_the_named_optimizers_are_stepped_and_their_gradients_clipped(tmp_path: Path) -> None:
    models = {}
    for clip_norm in (0.01, 1e-12):  # a gradient clipped to nothing moves nothing
        run = tmp_path / str(clip_norm)
        fit(Parts(names=["last"], normed=False), run, clip_norm=clip_norm, max_steps=1)
        models[clip_norm] = newest(run)["model"]
    after, start = models[0.01], models[1e-12]
    assert torch.equal(after["0.weight"], start["0.weight"])
    moved = torch.cat([(after[name] - start[name]).flatten() for name in ("2.weight", "2.bias")])
    torch.testing.assert_close(moved.norm(), torch.tensor(0.01), rtol=1e-3, atol=0)


def test_the_norm_that_clipping_computes_is_logged(tmp_path: Path) -> None:
    models = {}
    for clip_norm in (1e-12, 1e9):  # nothing moves; nothing is clipped
        run = tmp_path / str(clip_norm)
        fit(Points(normed=False), run, clip_norm=clip_norm, max_steps=1, log_every=1)
        models[clip_norm] = newest(run)["model"]
    moved = torch.cat([(models[1e9][name] - start).flatten() for name, start in models[1e-12].items()])
    [record] = records(run)
    assert record["logged"]["grad_norm"] == pytest.approx(float(moved.norm()) / 0.1, rel=1e-5)


def test_a_loss_over_the_batch_has_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    """Beside plain PyTorch on all samples at once, without micro-batches."""
    fit(Contrast(normed=False), tmp_path / "run", max_steps=1, global_batch_size=66, purity="off")
    assert (SEEN["rows"], SEEN["all"]) == (2 * 66, 66)
    model = Points(normed=False).build_model()
    for parameter, value in zip(model.parameters(), SEEN["parameters"], strict=True):
        parameter.data = value
    rows = model(build_split(Points(), 0, "train").tensors[0])
    loss = (rows @ rows.T).logsumexp(dim=1).mean()  # the order of the rows changes it by rounding only
    assert records(tmp_path / "run")[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for found, expected in zip(SEEN["gradients"], torch.autograd.grad(loss, list(model.parameters())), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_lbfgs_needs_a_closure_and_continues_from_its_history(tmp_path: Path) -> None:
    with pytest.raises(paceline.TaskError, match=r"step\.update\(closure="):
        fit(QuasiNewton(), tmp_path / "plain")
    straight = fit(SecondOrder(), tmp_path / "straight", epochs=2)
    SEEN["stop at"] = 1
    with pytest.raises(paceline.StopRequested):
        fit(SecondOrder(), tmp_path / "stopped", epochs=2)
    (history,) = newest(tmp_path / "stopped")["optimizers"]["main"]["state"].values()
    assert history["old_dirs"]
    del SEEN["stop at"]
    resumed = fit(SecondOrder(), tmp_path / "stopped", epochs=2)
    assert resumed["model_sha256"] == straight["model_sha256"]


@pytest.mark.parametrize("mistake", range(len(MISTAKES)))
def test_mistakes_are_named(tmp_path: Path, mistake: int) -> None:
    with pytest.raises(paceline.TaskError, match=MISTAKES[mistake][0]):
        fit(Mistaken(mistake=mistake), tmp_path / "run")


@pytest.mark.parametrize(
    "options",
    [{"strategy": "dp"}, {"precision": "fp16"}, {"sdc_check_every": 1}, {"local_sgd_steps": 2}],
    ids=str,
)
def test_options_that_need_the_usual_step_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(paceline.ConfigError, match="Usual defines train_step"):
        fit(Usual(), tmp_path / "run", **options)


def test_a_pass_that_is_not_finite_ends_the_run_and_the_update_before_it_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(paceline.NonFiniteLossError, match="step 3"):
        fit(Diverging(), tmp_path / "run", checkpoint_every="1steps")
    assert newest(tmp_path / "run")["progress"]["step"] == 2


def test_the_purity_guard_checks_each_pass(tmp_path: Path) -> None:
    with pytest.raises(paceline.PurityError, match=r"task\.calls"):
        fit(Counting(), tmp_path / "run")
