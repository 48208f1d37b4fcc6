"""NCCL: a group of one rank, which any GPU has, and runs on as many GPUs as there are."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
from tests.conftest import Processes
from tests.gpu.conftest import TASK, Trainer
from torch import distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from benchmarks.gpu.rows import report

pytestmark = [pytest.mark.gpu, pytest.mark.integration]


@pytest.mark.gpu(real=True)
def test_a_group_of_one_rank_is_formed_and_aborted() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store, timeout = dist.HashStore(), timedelta(seconds=30)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, timeout=timeout)
    times = {}
    try:
        clock = time.perf_counter()
        group = dist.new_group([0], timeout=timeout)
        for each in (dist.group.WORLD, group):
            warmup = torch.ones(1, device=device)
            dist.all_reduce(warmup, group=each)
            assert warmup.item() == 1
        times["warm-up of two groups"] = time.perf_counter() - clock
        for tensor in (torch.arange(5.0), torch.arange(1 << 22, device=device)):  # by gloo, by NCCL
            wanted = tensor.clone()
            dist.broadcast(tensor, 0)
            assert torch.equal(tensor, wanted)
    finally:
        clock = time.perf_counter()
        _abort_process_group()
        times["abort of all"] = time.perf_counter() - clock
    assert not dist.is_initialized()
    assert torch.ones(3, device=device).sum().item() == 3, "the GPU works after the abort"
    report(", ".join(f"{what} {seconds:.2f} s" for what, seconds in times.items()))


STRATEGIES = ("ddp", "zero1", "fsdp", "pp")


def _same_bits(trainer: Trainer, gpus: int, precision: str) -> None:
    options = ("--precision", precision)
    one = trainer.start("one", "--nproc", "1", *options, blocks=6).model()
    problems = []
    for strategy in STRATEGIES:
        several = trainer.start(strategy, "--nproc", str(gpus), "--strategy", strategy, *options, blocks=6)
        try:
            same = several.model() == one
        except AssertionError as error:
            problems.append(f"{strategy}: {error}")
        else:
            report(f"{strategy} {precision} on {gpus} GPUs: {'the bits of one' if same else 'OTHER BITS than one'}")
            if not same:
                problems.append(f"{strategy}: other bits")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.gpu(real=True, gpus=2)
def test_two_gpus_have_the_bits_of_one(trainer: Trainer, precision: str) -> None:
    _same_bits(trainer, 2, precision)


@pytest.mark.gpu(real=True, gpus=4)
def test_four_gpus_have_the_bits_of_one(trainer: Trainer) -> None:
    _same_bits(trainer, 4, "bf16")


@pytest.mark.gpu(real=True, gpus=8)
def test_eight_gpus_have_the_bits_of_one(trainer: Trainer) -> None:
    _same_bits(trainer, 8, "bf16")


@pytest.mark.gpu(real=True, gpus=2)
def test_every_strategy_agrees_with_one_process(run_processes: Processes) -> None:
    ended = run_processes.paceline("verify", TASK, "--device", "cuda", "--nproc", "2", timeout_s=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
