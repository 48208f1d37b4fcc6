"""``--init-from`` with weights that other tools wrote: ``torch.distributed.checkpoint``, safetensors."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint

from paceline.core.errors import CheckpointError, ConfigError
from paceline_fine_tuning.pretrained import PretrainedWeights

SHARDED = """
import sys, torch
from torch import distributed as dist, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 7), nn.ReLU(), nn.Linear(7, 3))
for unit in (*model, model):
    fully_shard(unit)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
model(torch.ones(4, 2)).sum().backward()
optimizer.step()
weights, state = get_state_dict(model, optimizer)
checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id="nested")
checkpoint.save({**weights, "optimizer": state, "lr_scheduler": {"last_epoch": 3}}, checkpoint_id="flat")
dist.destroy_process_group()
"""


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer that has a state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model(torch.ones(4, 2, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(path: Path, state: Mapping[str, Any]) -> Path:
    """Write a checkpoint as torch does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        checkpoint.save(dict(state), checkpoint_id=path)
    return path


def check(path: Path, expected: Mapping[str, Tensor]) -> None:
    weights = PretrainedWeights.find(str(path)).weights
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert weights[name].dtype == tensor.dtype
        assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize(
    "layout",
    [
        lambda weights, optimizer: {"model": weights, "optimizer": optimizer, "step": torch.tensor(3)},
        lambda weights, optimizer: {"app": {"model": weights, "optim": optimizer}},
        lambda weights, optimizer: {**weights, "optimizer": optimizer, "train_state": {"step": torch.tensor(3)}},
        lambda weights, optimizer: {"state_dict": weights, "epoch": 2},
        lambda weights, optimizer: weights,
    ],
)
def test_the_model_is_found(layout: Callable[[Any, Any], dict[str, Any]], tmp_path: Path) -> None:
    model, optimizer = build()
    state = layout(model.state_dict(), optimizer.state_dict())
    check(save(tmp_path / "saved", state), model.state_dict())


@pytest.mark.integration
def test_shards_of_several_processes_are_put_together(tmp_path: Path) -> None:
    (tmp_path / "sharded.py").write_text(SHARDED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "sharded.py"]
    subprocess.run(torchrun, cwd=tmp_path, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 7), nn.ReLU(), nn.Linear(7, 3))
    check(tmp_path / "nested", model.state_dict())
    check(tmp_path / "flat", model.state_dict())


def test_a_file_of_safetensors(tmp_path: Path) -> None:
    model, _ = build()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    check(tmp_path / "model.safetensors", model.state_dict())
    found = PretrainedWeights.find(str(tmp_path / "model.safetensors"))
    assert str(found.file) in Path("/proc/self/maps").read_text()  # read as it is used
    with pytest.raises(ConfigError, match="neither a run"):
        PretrainedWeights.find(str(tmp_path / "other.safetensors"))


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._mark}",)


def _hostile(saved: Path) -> None:
    (saved / ".metadata").write_bytes(pickle.dumps(Hostile(saved / "ran")))


def _hostile_tensor(saved: Path) -> None:
    (saved / "__0_0.distcp").write_bytes(pickle.dumps(Hostile(saved / "ran")) * 100)


def _outside(saved: Path) -> None:
    content = (saved / ".metadata").read_bytes()
    (saved / ".metadata").write_bytes(content.replace(b"__0_0.distcp", b"../../secret"))


def _cut(saved: Path) -> None:
    (saved / ".metadata").write_bytes((saved / ".metadata").read_bytes()[:300])


def _gone(saved: Path) -> None:
    (saved / "__0_0.distcp").unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_hostile, "names posix.system, which a checkpoint does not need"),
        (_hostile_tensor, "."),
        (_outside, r"it names ../../secret, which is not a file of the directory"),
        (_cut, "."),
        (_gone, "No such file or directory"),
    ],
)
def test_what_is_damaged_is_refused_and_runs_nothing(damage: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    model, optimizer = build()
    saved = save(tmp_path / "saved", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    damage(saved)
    with pytest.raises(CheckpointError, match=f"cannot be read as a checkpoint of torch.distributed: .*{said}"):
        PretrainedWeights.find(str(saved))
    assert not (saved / "ran").exists()


@pytest.mark.parametrize("state", [{"gen": {"x": torch.ones(2)}, "disc": {"x": torch.ones(2)}}, {"step": 3}])
def test_a_state_without_one_model_is_refused(state: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no single entry of its state is the model's"):
        PretrainedWeights.find(str(save(tmp_path / "saved", state)))
