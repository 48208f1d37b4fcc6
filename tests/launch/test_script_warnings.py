"""What ``paceline launch`` says about a script before it starts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.launch import script_warnings
from paceline.launch.launcher import LaunchSpec

LIGHTNING = "import lightning.pytorch as pl\ntrainer = pl.Trainer({})\n"
KERAS = "import tensorflow as tf\nwith tf.distribute.MultiWorkerMirroredStrategy().scope():\n    model.fit(x)\n"


def warnings(path: Path, text: str, **fields: Any) -> list[str]:
    (path / "train.py").write_text(text)
    spec = LaunchSpec(command=("python", str(path / "train.py")), **{"nproc": (2,), **fields})
    return list(script_warnings.script_warnings(spec))


def test_lightning_s_trainer_needs_its_devices(tmp_path: Path) -> None:
    [warning] = warnings(tmp_path, LIGHTNING.format("max_epochs=1"), nodes=(3, 3))
    assert "each of the 6 processes may train a copy by itself" in warning
    assert "Trainer(devices=2, num_nodes=3)" in warning
    assert not warnings(tmp_path, LIGHTNING.format("max_epochs=1"), nproc=(1,))
    assert not warnings(tmp_path, LIGHTNING.format("devices=2"))
    assert not warnings(tmp_path, LIGHTNING.format("**options"))
    assert not warnings(tmp_path, "from transformers import Trainer\nTrainer()\n")


def test_fabric_needs_its_devices(tmp_path: Path) -> None:
    fabric = "from lightning.fabric import Fabric\nfabric = Fabric({})\n"
    [warning] = warnings(tmp_path, fabric.format("accelerator='cpu'"))
    assert "each of the 2 processes may train a copy by itself" in warning
    assert "Fabric(devices=2, num_nodes=1); or, as fabric run does, --env LT_CLI_USED=1 --env LT_DEVICES=2." in warning
    [warning] = warnings(tmp_path, fabric.format(""), nodes=(3, 3))
    assert "--env LT_DEVICES=2 --env LT_NUM_NODES=3." in warning
    assert not warnings(tmp_path, fabric.format(""), env={"LT_DEVICES": "2"})
    assert not warnings(tmp_path, fabric.format("devices=2"))
    assert not warnings(tmp_path, fabric.format("*options"))


def test_horovod_needs_its_own_launcher(tmp_path: Path) -> None:
    script = "import horovod.torch as hvd\nhvd.init()\n"
    [warning] = warnings(tmp_path, script, rank_launcher="spawn")
    assert "does not find the ranks that spawn starts: each of the 2 processes may train a copy" in warning
    assert "Use --on horovod, or --rank-launcher horovod." in warning
    assert not warnings(tmp_path, script, rank_launcher="spawn", nproc=(1,))
    for rank_launcher in ("horovod", "mpi", "srun"):
        assert not warnings(tmp_path, script, rank_launcher=rank_launcher)


def test_a_script_without_ray_needs_its_ranks(tmp_path: Path) -> None:
    script = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    [warning] = warnings(tmp_path, script, rank_launcher="ray", nproc=(1,))
    assert "does not use Ray, and is started once" in warning
    assert "Use --rank-launcher torchrun" in warning
    assert not warnings(tmp_path, script, rank_launcher="torchrun")
    assert not warnings(tmp_path, f"import ray\n{script}", rank_launcher="ray", nproc=(1,))


def test_fit_on_several_workers_needs_keras_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_warnings.metadata, "version", lambda name: "3.12.0")
    [warning] = warnings(tmp_path, KERAS, env_style="tensorflow")
    assert "fails with Keras 3.12.0. Install tf_keras and give --env TF_USE_LEGACY_KERAS=1." in warning
    assert not warnings(tmp_path, KERAS, env_style="tensorflow", env={"TF_USE_LEGACY_KERAS": "1"})
    assert not warnings(tmp_path, f"import tf_keras\n{KERAS}", env_style="tensorflow")
    monkeypatch.setattr(script_warnings.metadata, "version", lambda name: "2.15.0")
    assert not warnings(tmp_path, KERAS, env_style="tensorflow")


def test_a_script_that_cannot_be_read_is_not_judged(tmp_path: Path) -> None:
    assert not warnings(tmp_path, "def broken(:\n")
    assert not list(script_warnings.script_warnings(LaunchSpec(command=("python", "/nowhere/train.py"))))
