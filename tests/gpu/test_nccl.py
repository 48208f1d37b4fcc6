"""NCCL: a group of one rank, which any GPU has, and runs on as many GPUs as there are."""

from __future__ import annotations

import time

import pytest
import torch
from tests.gpu.conftest import TASK, Trainer
from tests.processes import Processes
from torch import distributed as dist

from benchmarks.gpu.rows import report
from paceline.parallel.world import World, form_group

pytestmark = [pytest.mark.gpu, pytest.mark.integration]


@pytest.mark.gpu(real=True)
def test_a_group_of_one_rank_is_formed_and_aborted() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    clock, times = time.perf_counter(), {}

    def took(what: str) -> None:
        nonlocal clock
        torch.cuda.synchronize()
        times[what], clock = time.perf_counter() - clock, time.perf_counter()

    # A rank that is lost has the group aborted, not destroyed.
    world = World(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        device=device,
        backend="nccl",
        generation=0,
        one_host=True,
        is_broken=lambda: True,
    )
    with form_group(world, dist.HashStore(), init_timeout_s=30):
        took("forming")
        for group in (dist.group.WORLD, dist.new_group([0])):
            warmup = torch.ones(1, device=device)
            dist.all_reduce(warmup, group=group)
            assert warmup.item() == 1
        took("warm-up of two groups")
        for tensor in (torch.arange(5.0), torch.arange(1 << 22, device=device)):  # by gloo, by NCCL
            wanted = tensor.clone()
            dist.broadcast(tensor, 0)
            assert torch.equal(tensor, wanted)
        took("broadcasts")
        del group
    took("abort of both")
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
