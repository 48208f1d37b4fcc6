"""What ``paceline launch`` says about a script before it starts it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.launcher import LaunchSpec
from paceline_frameworks import script_warnings

LIGHTNING = "import lightning.pytorch as pl\ntrainer = pl.Trainer({})\n"
KERAS = "import tensorflow as tf\nwith tf.distribute.MultiWorkerMirroredStrategy().scope():\n    model.fit(x)\n"


def warnings(path: Path, text: str, *words: str, is_local: bool = False, **fields: Any) -> list[str]:
    (path / "train.py").write_text(text)
    spec = LaunchSpec(command=("python", str(path / "train.py"), *words), **{"nproc": (2,), **fields})
    return list(script_warnings.script_warnings(spec, "spawn" if is_local else "slurm"))


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


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ("from accelerate import Accelerator\na = Accelerator({})\n", "cpu"),
        ("import accelerate\na = accelerate.Accelerator(mixed_precision='no', {})\n", "cpu"),
        ("from transformers import TrainingArguments\na = TrainingArguments('out', {})\n", "use_cpu"),
        ("from trl import SFTConfig\na = SFTConfig({})\n", "use_cpu"),
    ],
)
def test_accelerate_needs_a_gpu_or_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, argument: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for without in ("", f"{argument}=False", f"{argument}=args.cpu"):
        [warning] = warnings(tmp_path, text.format(without), "--lr", "0.1", is_local=True)
        assert f"() without {argument}=True, and there is no GPU here: each of the 2 processes may train" in warning
        assert "Give --env ACCELERATE_USE_CPU=true." in warning
    assert not warnings(tmp_path, text.format(""), is_local=True, nproc=(1,))
    assert not warnings(tmp_path, text.format(""), is_local=True, env={"ACCELERATE_USE_CPU": "1"})
    assert not warnings(tmp_path, text.format(f"{argument}=True"), is_local=True)
    assert not warnings(tmp_path, text.format(f"{argument}=not has_gpu()"), is_local=True)
    assert not warnings(tmp_path, text.format("**options"), is_local=True)
    assert not warnings(tmp_path, text.format(f"{argument}=args.cpu"), "--cpu", is_local=True)
    # Nodes elsewhere may have GPUs, and these here need no word.
    assert not warnings(tmp_path, text.format(""))
    monkeypatch.setattr("paceline.core.environment._installed_gpus", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert not warnings(tmp_path, text.format(""), is_local=True)


@pytest.mark.parametrize("name", ["accelerate", pytest.param("transformers", marks=pytest.mark.slow)])
def test_accelerate_s_copies_are_those_that_are_warned_of(run_processes: Any, tmp_path: Path, name: str) -> None:
    if name == "accelerate":
        begins = "from accelerate import Accelerator\nsize = Accelerator().num_processes\n"
    else:
        begins = "from transformers import TrainingArguments\nsize = TrainingArguments('out').world_size\n"
    (tmp_path / "train.py").write_text(f"import os\n{begins}os.write(1, f'one of {{size}}\\n'.encode())\n")
    start = [*(sys.executable, "-m", "paceline", "launch", "--on", "spawn", "--nproc", "2", "--threads", "1")]
    no_gpu = {"CUDA_VISIBLE_DEVICES": "", "XDG_STATE_HOME": str(tmp_path / "state")}
    for option, size in ((), 1), (("--env", "ACCELERATE_USE_CPU=true"), 2):
        done = run_processes.run([*start, *option, "--", "train.py"], env=no_gpu)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split("\n") == [*[f"one of {size}"] * 2, ""]
        assert ("may train a copy by itself" in done.stderr) == (size == 1)


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
    assert not list(script_warnings.script_warnings(LaunchSpec(command=("python", "/nowhere/train.py")), "spawn"))
