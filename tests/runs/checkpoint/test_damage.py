"""Damage is noticed whenever a checkpoint is read, whichever byte it hit and on whichever rank."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.errors import CheckpointError
from paceline.runs.checkpoint_manifest import CheckpointInfo, problems, verify
from paceline.runs.checkpointer import Checkpointer, load

TASK = Path(__file__).with_name("disk_task.py")
FAULTS = 1000


@pytest.mark.integration
def test_a_thousand_truncations_and_flipped_bits_are_noticed(
    tmp_path: Path, make_info: Callable[..., CheckpointInfo]
) -> None:
    generator = torch.Generator().manual_seed(1)
    state = {
        "model": {"weight": torch.randn(24, 8, generator=generator), "seen": torch.tensor(7)},
        "optimizers": {"default": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]}},
        "progress": {"step": 1, "best": None},
    }
    with closing(Checkpointer(tmp_path, keep=1)) as checkpointer:
        checkpointer.save(state, make_info(1))
        checkpointer.wait()
    path = tmp_path / "step-00000001-v00000002"
    contents = {file: file.read_bytes() for file in sorted(path.iterdir())}
    assert {file.name for file in contents} >= {"manifest.json", "state.json", "model.safetensors"}
    chosen = random.Random(20)
    noticed = 0
    for _ in range(FAULTS):
        # By file first: else the manifest, the smallest, would hardly ever be hit.
        file = chosen.choice(list(contents))
        content = bytearray(contents[file])
        if chosen.random() < 0.5:
            del content[chosen.randrange(len(content)) :]
        else:
            content[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
        file.write_bytes(content)
        for read in (load, verify):
            with pytest.raises(CheckpointError, match=file.name.replace(".", r"\.")):
                read(path)
        noticed += bool(problems(path))
        file.write_bytes(contents[file])
    assert noticed == FAULTS
    load(path)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors"])
def test_a_missing_file_is_noticed(tmp_path: Path, make_info: Callable[..., CheckpointInfo], name: str) -> None:
    with closing(Checkpointer(tmp_path, keep=1)) as checkpointer:
        checkpointer.save({"model": {"weight": torch.zeros(3)}}, make_info(1))
        checkpointer.wait()
    path = tmp_path / "step-00000001-v00000002"
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        load(path)
    assert problems(path) == [f"{name} is missing"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_ranks_that_see_different_damage_fall_back_together(tmp_path: Path, run_processes: Any) -> None:
    """Two machines, each with its own copy of the run: each copy is damaged in another place."""
    options = ["--max-steps", "40", "--threads", "1", "--checkpoint-every", "10steps", "--keep-checkpoints", "9"]
    first = tmp_path / "0"
    first.mkdir()
    train = [sys.executable, "-m", "paceline", "train", f"{TASK}:Small", "--run-dir", "run", "--quiet", *options]
    done = run_processes.run(train, cwd=first)
    assert done.returncode == 0, done.stderr
    sha256 = json.loads((first / "run" / "result.json").read_bytes())["model_sha256"]
    (first / "run" / "result.json").unlink()
    second = tmp_path / "1"
    shutil.copytree(first, second, symlinks=True)

    def checkpoint(machine: Path, step: int) -> Path:
        (path,) = (machine / "run" / "checkpoints").glob(f"step-{step:08d}-*")
        return path

    flip(checkpoint(first, 40) / "model.safetensors")
    flip(checkpoint(second, 30) / "optimizers.safetensors")
    (checkpoint(second, 40) / "manifest.json").unlink()
    resume = [sys.executable, "-m", "paceline", "resume", "run", "--quiet", "--nproc", "2"]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(run_processes.free_port())}
    ranks = [
        run_processes.start(resume, cwd=machine, env={**os.environ, **shared, "RANK": str(rank)})
        for rank, machine in enumerate((first, second))
    ]
    ended = [run_processes.finish(rank, timeout_s=100) for rank in ranks]
    assert [rank.returncode for rank in ended] == [0, 0], [rank.stderr for rank in ended]
    said = ended[0].stderr
    assert "step-00000040-" in said
    assert "model.safetensors is damaged" in said
    assert "does not verify on every rank" in said
    assert "optimizers.safetensors is damaged" in said
    assert f"continuing from {checkpoint(first, 20).name} instead, after step 20" in said
    assert json.loads((first / "run" / "result.json").read_bytes())["model_sha256"] == sha256
