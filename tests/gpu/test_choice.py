"""Which device the workers of an agent take, what they say of it, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.gpu.conftest import ONE_UNDER_AN_AGENT, TWO_ON_ONE_GPU, Trainer
from tests.processes import Processes

from benchmarks.gpu.rows import report

pytestmark = [pytest.mark.gpu, pytest.mark.integration]

HUGE = 10**14
"""Bytes that no GPU has."""


@pytest.mark.parametrize("options", [ONE_UNDER_AN_AGENT, TWO_ON_ONE_GPU], ids=["one", "two"])
def test_an_agents_worker_takes_the_gpu_and_says_so(trainer: Trainer, options: tuple[str, ...]) -> None:
    training = trainer.start("run", *options)
    ended = training.finish()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads((training.directory / "result.json").read_text())["device"] == "cuda"
    said = ended.stdout + ended.stderr
    assert torch.cuda.get_device_name(0).removeprefix("NVIDIA ") in said, said


def test_two_ranks_of_nccl_do_not_share_a_gpu(trainer: Trainer) -> None:
    ended = trainer.start("run", "--nproc", "2", "--backend", "nccl", env={"CUDA_VISIBLE_DEVICES": "0"}).finish()
    said = ended.stdout + ended.stderr
    assert ended.returncode not in (0, None), said
    assert "GPU" in said, said
    assert "--nproc 1" in said or "--backend gloo" in said or "fewer" in said, said
    report(next(line.strip() for line in said.splitlines() if "GPU" in line)[:200])


def test_a_hidden_gpu_is_not_replaced_by_the_cpu(trainer: Trainer) -> None:
    training = trainer.start("run", *TWO_ON_ONE_GPU, env={"CUDA_VISIBLE_DEVICES": "-1"})
    ended = training.finish()
    said = ended.stdout + ended.stderr
    assert ended.returncode not in (0, None), said
    assert "no GPU" in said, said
    assert not (training.directory / "result.json").exists()


@pytest.mark.gpu(real=True)
@pytest.mark.parametrize("options", [(), TWO_ON_ONE_GPU], ids=["one", "two"])
def test_out_of_memory_says_so_and_what_to_do(trainer: Trainer, options: tuple[str, ...]) -> None:
    ended = trainer.start("run", *options, hog_bytes=HUGE).finish()
    said = ended.stdout + ended.stderr
    assert ended.returncode not in (0, None), said
    assert "out of memory" in said, said
    assert "rank is gone" not in said, said
    report(next(line.strip() for line in said.splitlines() if "out of memory" in line)[:200])
    assert "--microbatches" in said or "--global-batch-size" in said, said


def test_a_model_exported_on_the_cpu_predicts_on_the_gpu(
    trainer: Trainer, run_processes: Processes, tmp_path: Path
) -> None:
    training = trainer.start("run")
    training.result()
    hidden = {"CUDA_VISIBLE_DEVICES": "-1", "PACELINE_REGISTRY": str(tmp_path / "registry")}
    exported = run_processes.paceline("export", training.directory, "--json", env=hidden)
    assert exported.returncode == 0, exported.stdout + exported.stderr
    package = json.loads(exported.stdout.splitlines()[-1])["package"]
    rows = tmp_path / "rows.npz"
    np.savez(rows, x=np.random.default_rng(0).standard_normal((7, 32, 16), dtype=np.float32))
    scores = {}
    for device in ("cpu", "cuda:0"):
        output = tmp_path / f"{device[:3]}.npz"
        ended = run_processes.paceline("predict", package, rows, "--devices", device, "--output", output)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        scores[device] = np.load(output)["scores"]
    difference = float(np.abs(scores["cpu"] - scores["cuda:0"]).max())
    report(f"largest difference of a score: {difference:.1e}")
    assert difference < 1e-3 * float(np.abs(scores["cpu"]).max())
