"""``paceline.load`` and ``Result.model``: the model of a run, back in a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.tasks import Points
from torch import nn
from torch.optim import SGD

import paceline
from paceline.runs.checkpoint_state import model_sha256

OPTIONS: dict[str, Any] = {"epochs": 3, "global_batch_size": 24, "microbatches": 4, "threads": 1, "device": "cpu"}


def fit(run: Path, **options: Any) -> paceline.Result:
    return paceline.fit(Points(num_val=8), run_dir=str(run), quiet=True, **{**OPTIONS, **options})


def test_each_checkpoint_comes_back(tmp_path: Path) -> None:
    result = fit(tmp_path / "run", best_metric="loss:max", keep_checkpoints=20, checkpoint_every="1steps")
    last = paceline.load(tmp_path / "run", "last")
    assert model_sha256(last.state_dict()) == result.model_sha256
    assert not last.training
    first = paceline.load(str(tmp_path / "run"), 1)
    assert not torch.equal(first.state_dict()["0.weight"], last.state_dict()["0.weight"])
    best_step = result.record["best_step"]
    assert best_step < result.steps
    for best in (result.model(), result.model("best"), paceline.load(tmp_path / "run", best_step)):
        assert model_sha256(best.state_dict()) == model_sha256(paceline.load(tmp_path / "run").state_dict())
    with pytest.raises(paceline.UserError, match="step 99"):
        paceline.load(tmp_path / "run", 99)


@pytest.mark.integration
def test_sharded_runs_and_averages_come_back_whole(tmp_path: Path) -> None:
    sharded = fit(tmp_path / "sharded", nproc=2, strategy="fsdp")
    assert model_sha256(sharded.model("last").state_dict()) == sharded.model_sha256
    averaged = fit(tmp_path / "averaged", ema=0.5)
    assert model_sha256(averaged.model("last").state_dict()) != averaged.model_sha256


def test_a_script_with_its_own_loop_gives_the_model(tmp_path: Path) -> None:
    task = Points()
    model = task.build_model()
    optimizer, data = SGD(model.parameters(), 0.1), task.build_dataset("train")
    with paceline.Run(tmp_path / "run", model, optimizer, data, global_batch_size=24, quiet=True) as run:
        for step in run.steps(max_steps=3):
            step.backward(lambda batch: task.loss(model, batch))
            step.update()
    loaded = paceline.load(tmp_path / "run", model=task.build_model())
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    with pytest.raises(paceline.TaskError, match=r"paceline.load\(RUN, model=...\)"):
        paceline.load(tmp_path / "run")
    with pytest.raises(paceline.CheckpointError, match="does not fit"):
        paceline.load(tmp_path / "run", model=nn.Linear(1, 1))
