"""``--init-from`` from the command line: what it takes, what it leaves, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch

import paceline
from paceline import cli
from paceline.core.config import config_from_mapping
from paceline.core.inference import TensorSpec
from paceline.runs.checkpoint_manifest import FileRecord
from paceline.runs.checkpoint_selection import select_checkpoint
from paceline.runs.checkpointer import load
from paceline.runs.directory import RunDirectory
from paceline.runs.package_manifest import PackageManifest, Provenance
from paceline.training import state_manager
from paceline_fine_tuning.options import FineTuningOptions
from paceline_fine_tuning.pretrained import PretrainedWeights

TASKS = """
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


@dataclass
class Points(paceline.Task):
    classes: int = 3
    defaults = paceline.Defaults(global_batch_size=12, microbatches=4, best_metric="accuracy:max")

    def build_model(self):
        first = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 8), nn.ReLU())
        return first.append(nn.Linear(8, self.classes))

    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(len(split))
        labels = torch.arange(36) % self.classes
        return TensorDataset(torch.randn(36, 4, generator=generator) + labels.unsqueeze(1), labels)

    def build_optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=0.02)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model, batch):
        return {"accuracy": (model(batch[0]).argmax(dim=1) == batch[1]).float()}

    def inference_signature(self, model):
        spec = paceline.TensorSpec
        return paceline.InferenceSignature(
            module=Labelled(model),
            inputs={"points": spec(dtype="float32", shape=(4,))},
            outputs={"label": spec(dtype="int64")},
            label="label",
        )

    def inference_batch(self, batch):
        return [batch[0]], batch[1]


class Labelled(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, points):
        return {"label": self.model(points).argmax(dim=1)}
"""
STEPS = ("--max-steps", "4", "--eval-every", "2steps", "--checkpoint-every", "1steps", "--keep-checkpoints", "9")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, numerics: None) -> Path:
    """A folder with the task and a trained run, ``parent``."""
    directory = tmp_path_factory.mktemp("fine-tuning")
    (directory / "task.py").write_text(TASKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert _paceline([*_train("parent"), *STEPS]) == 0
    return directory


@pytest.fixture
def here(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own, with the task and the parent."""
    shutil.copy(place / "task.py", tmp_path)
    shutil.copytree(place / "parent", tmp_path / "parent")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path


def _paceline(arguments: list[str]) -> int:
    with mock.patch.object(sys, "argv", ["paceline", *arguments]):
        return cli.main()


def _train(run: str, *options: str) -> list[str]:
    fixed = ("--nproc", "1", "--threads", "1", "--quiet")
    return ["train", "task.py:Points", "--run-dir", run, *fixed, *options]


def _result(run: str) -> dict[str, Any]:
    result = RunDirectory(Path(run)).read_result()
    assert result is not None
    return result


def _copy(run: str) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(f"{run}/initial.safetensors")


@pytest.mark.parametrize("which", ["best", "last", "3"])
def test_which_checkpoint_is_begun_with(here: Path, which: str) -> None:
    assert _paceline([*_train("child", "--init-from", f"parent@{which}"), "--max-steps", "2"]) == 0
    saved = load(select_checkpoint(Path("parent/checkpoints"), which))
    assert RunDirectory(Path("child")).read_manifest()["parent"]["step"] == saved.manifest.info.step
    model = saved.state["model"]
    assert all(torch.equal(value, model[name]) for name, value in _copy("child").items())


def test_the_model_is_built_once(here: Path) -> None:
    with mock.patch.object(state_manager, "build_task_model", wraps=state_manager.build_task_model) as built:
        assert _paceline([*_train("child"), "--init-from", "parent", "--max-steps", "1"]) == 0
    assert built.call_count == 1


def test_a_checkpoints_directory_will_do(here: Path) -> None:
    path = select_checkpoint(here / "parent" / "checkpoints", "last")
    assert PretrainedWeights.find(str(path)).record["step"] == 4


@pytest.mark.integration
def test_the_parent_may_go_once_the_child_is_there(here: Path) -> None:
    """The child is stopped before it has a checkpoint, and begins again without its parent."""
    options = ("--init-from", "parent", "--freeze", "0", "--lr-scale", "2=0.5", "--max-steps", "3")
    assert _paceline(_train("straight", *options)) == 0
    assert _paceline(_train("child", *options)) == 0
    for name in ("checkpoints", "ledger"):
        shutil.rmtree(f"child/{name}")
    Path("child/result.json").unlink()
    shutil.rmtree("parent")
    assert _paceline(["resume", "child", "--nproc", "1", "--quiet"]) == 0
    assert _result("child")["model_sha256"] == _result("straight")["model_sha256"]
    assert _result("child")["drift"] == _result("straight")["drift"]


def test_a_changed_copy_is_not_begun_with(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _paceline(_train("child", "--init-from", "parent", "--max-steps", "1")) == 0
    shutil.rmtree("child/checkpoints")
    Path("child/result.json").unlink()
    content = bytearray(Path("child/initial.safetensors").read_bytes())
    content[-1] ^= 1
    Path("child/initial.safetensors").write_bytes(content)
    assert _paceline(["resume", "child", "--nproc", "1", "--quiet"]) == 2
    assert "initial.safetensors is not what the run began with" in capfd.readouterr().err


def test_a_child_keeps_its_parent(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _paceline(_train("child", "--init-from", "parent", "--max-steps", "1")) == 0
    assert _paceline(_train("child", "--init-from", "parent@last")) == 2
    assert "--init-from: parent when the run was created, parent@last now" in capfd.readouterr().err


def test_adapters_are_merged_for_a_child_and_in_a_package(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lora = "rank=2,target=0|2"
    assert _paceline(_train("adapted", "--init-from", "parent@last", "--lora", lora, "--max-steps", "3")) == 0
    assert _paceline(_train("grandchild", "--init-from", "adapted@last", "--max-steps", "1")) == 0
    state = load(select_checkpoint(Path("adapted/checkpoints"), "last")).state["model"]
    a, b = (state[f"0.lora_{letter}.default.weight"] for letter in "AB")
    adapters = config_from_mapping({"lora": lora}, "here")[FineTuningOptions].lora
    assert adapters is not None
    expected = state["0.base_layer.weight"] + adapters.scaling * (b @ a)
    torch.testing.assert_close(_copy("grandchild")["0.weight"], expected)
    assert not torch.equal(_copy("grandchild")["0.weight"], state["0.base_layer.weight"])
    capfd.readouterr()
    assert _paceline(["export", "adapted", "--checkpoint", "last", "--format", "safetensors", "--json"]) == 0
    package = Path(json.loads(capfd.readouterr().out)["package"])
    exported = safetensors.torch.load_file(package / "weights.safetensors")
    assert exported.keys() == _copy("grandchild").keys()
    assert all(torch.equal(value, _copy("grandchild")[name]) for name, value in exported.items())
    alone = str(select_checkpoint(Path("adapted/checkpoints"), "last").rename(here / "step-00000003-v00000003"))
    assert _paceline(_train("other", "--init-from", alone)) == 2


def test_the_average_is_what_a_child_of_it_begins_with(here: Path) -> None:
    assert _paceline([*_train("averaged", "--ema", "0.5"), *STEPS]) == 0
    state = load(select_checkpoint(Path("averaged/checkpoints"), "last")).state
    weights = PretrainedWeights.find("averaged@last").weights
    assert all(torch.equal(value, state["ema"][f"module.{name}"]) for name, value in weights.items())
    assert not torch.equal(weights["0.weight"], state["model"]["0.weight"])


def test_runs_show_tells_of_the_drift(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _paceline(_train("child", "--init-from", "parent", "--freeze", "0", "--max-steps", "3")) == 0
    capfd.readouterr()
    assert _paceline(["runs", "show", "child"]) == 0
    said = capfd.readouterr().out
    assert "Initialised from parent (run " in said
    assert "test samples" in said
    assert "1 did not move" in said
    assert _paceline(["runs", "show", "child", "--json"]) == 0
    drift = json.loads(capfd.readouterr().out)["drift"]
    assert drift == _result("child")["drift"]
    assert drift["modules"]["0"] == 0 < drift["modules"]["2"]
    assert 0 <= drift["agreement"] <= 1
    assert drift["samples"] == 36


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--init-from", "nowhere"), ("--init-from nowhere", "this is neither a run")),
        (
            ("--init-from", __file__),
            ("a file of weights is one of safetensors", "torch.load(FILE, weights_only=True)"),
        ),
        (("--init-from", ""), ("--init-from is empty", "leave it out")),
        (("--init-from", "parent@77"), ("no checkpoint of step 77", "2, 3, 4")),
        (("--init-from", "parent@first"), ("best, last or a number of steps such as 500, but is 'first'",)),
        (
            ("--init-from", "parent", "--set", "classes=5"),
            ("4.weight is (3, 8) there and (5, 8) here", "Use --reset-head"),
        ),
        (("--init-from", "parent", "--freeze", "laier"), ("--freeze laier: nothing in the model",)),
        (("--init-from", "parent", "--lr-scale", "9=0.1"), ("--lr-scale 9: nothing in the model",)),
        (("--freeze", "*"), ("leaves nothing to train",)),
        (("--lora", "rank=2,target=query"), ("target=query: no linear layer of the model", "Those there are: 0, 2, 4")),
    ],
)
def test_what_cannot_work_creates_no_run(
    here: Path, capfd: pytest.CaptureFixture[str], options: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    assert _paceline(_train("child", *options)) == 2
    said = capfd.readouterr().err
    assert all(part in said for part in parts), said
    assert not RunDirectory(Path("child")).exists()
    assert not Path("child/initial.safetensors").exists()


def test_another_number_of_classes_needs_a_new_head(here: Path) -> None:
    options = ("--init-from", "parent", "--set", "classes=5", "--reset-head", "--max-steps", "1")
    assert _paceline(_train("child", *options)) == 0
    assert _result("child")["drift"]["new"] == ["4.bias", "4.weight"]
    assert _result("child")["drift"]["agreement"] is None


def test_a_loop_of_the_scripts_own_has_no_options_that_change_the_model(here: Path) -> None:
    model = torch.nn.Linear(4, 1)
    data = torch.utils.data.TensorDataset(torch.ones(8, 4))
    with pytest.raises(paceline.UserError, match="has no options that change the model"):
        paceline.Run(
            here / "own", model, torch.optim.SGD(model.parameters(), 0.1), data, global_batch_size=4, lora="rank=2"
        )
    assert not (here / "own").exists()


def test_a_damaged_parent_is_refused(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = select_checkpoint(Path("parent/checkpoints"), "3") / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert _paceline(_train("child", "--init-from", "parent@3")) == 2
    assert "model.safetensors" in capfd.readouterr().err


def test_a_package_gives_its_weights(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved = load(select_checkpoint(Path("parent/checkpoints"), "last"))
    path = _package(here / "package", saved.state["model"])
    assert _paceline(_train("child", "--init-from", str(path), "--max-steps", "1")) == 0
    assert all(torch.equal(value, saved.state["model"][name]) for name, value in _copy("child").items())
    assert RunDirectory(Path("child")).read_manifest()["parent"]["run"] == "0123"
    whole = _package(here / "whole", saved.state["model"], quantization="int8")
    assert _paceline(_train("other", "--init-from", str(whole))) == 2
    assert "int8, which cannot be trained" in capfd.readouterr().err
    (path / "weights.safetensors").write_bytes(b"x")
    assert _paceline(_train("other", "--init-from", str(path))) == 2
    assert "weights.safetensors" in capfd.readouterr().err


def _package(path: Path, weights: dict[str, torch.Tensor], quantization: str | None = None) -> Path:
    content = safetensors.torch.save(weights)
    made_by = Provenance(
        run="0123",
        task="task.py:Points",
        fields={},
        step=4,
        state_version=4,
        model_sha256="0" * 64,
        data={},
        versions={},
    )
    manifest = PackageManifest(
        name="points",
        created="2026-01-01T00:00:00+00:00",
        inputs={"points": TensorSpec(dtype="float32", shape=(4,))},
        outputs={"label": TensorSpec(dtype="int64")},
        label="label",
        provenance=made_by,
        quantization=quantization,
        files={"weights.safetensors": FileRecord(len(content), hashlib.sha256(content).hexdigest())},
    )
    path.mkdir()
    (path / "weights.safetensors").write_bytes(content)
    (path / "manifest.json").write_bytes(manifest.to_bytes())
    return path
