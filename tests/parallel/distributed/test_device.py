"""Which device a process takes, and that what launcher and worker find must agree."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.core.environment import Environment
from paceline.core.errors import ConfigError
from paceline.parallel import world as worlds
from paceline.parallel.world import choose_device, open_world, why_idle

CPU = torch.device("cpu")
SeenGpus = Callable[[int], list[torch.device]]


@pytest.fixture
def torch_sees(monkeypatch: pytest.MonkeyPatch) -> SeenGpus:
    """Pretend a number of GPUs; returns what becomes the current device."""
    current: list[torch.device] = []

    def see(count: int) -> list[torch.device]:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        return current

    return see


def test_without_gpus(torch_sees: SeenGpus) -> None:
    torch_sees(0)
    assert choose_device().device == CPU
    assert choose_device(expected="cpu").backend == "gloo"
    with pytest.raises(ConfigError, match=r"--device cuda: torch \S+ sees no GPU on this node.*--device cpu"):
        choose_device("cuda")
    with pytest.raises(ConfigError, match=r"--device auto: .* sees no GPU .* but the launcher has counted"):
        choose_device(expected="cuda")
    with (
        pytest.raises(ConfigError, match="--backend nccl needs GPUs, but the device is cpu"),
        open_world(Environment(), device="cpu", backend="nccl"),
    ):
        pass


@pytest.mark.parametrize(
    ("gpus", "local_rank", "index"),
    [
        (1, 0, 0),
        (1, 3, 0),  # one of its own, as with Slurm's --gpus-per-task=1
        (8, 5, 5),
        (2, 3, 1),  # two of its own; or two processes would share one, which forming the group finds
    ],
)
def test_a_process_takes_the_gpu_of_its_local_rank(
    gpus: int, local_rank: int, index: int, torch_sees: SeenGpus
) -> None:
    current = torch_sees(gpus)
    local = choose_device(local_rank=local_rank, expected="cuda")
    assert (local.device, local.backend) == (torch.device("cuda", index), "nccl")
    assert current == [local.device]
    assert choose_device("cuda", "gloo", local_rank=local_rank).backend == "gloo"
    assert choose_device("cpu", local_rank=local_rank).device == CPU


def test_gpus_that_the_launcher_has_not_found_are_no_silent_choice(torch_sees: SeenGpus) -> None:
    torch_sees(2)
    with pytest.raises(ConfigError, match=r"torch sees 2 GPUs that the launcher has not found.*--device cuda or"):
        choose_device(expected="cpu")


def test_two_ranks_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    world: Any = SimpleNamespace(device=CPU, all_gather_object=lambda value: ["a", "b", "a"])
    monkeypatch.setattr(worlds, "gpu_identity", lambda device: "a")
    with pytest.raises(ConfigError, match=r"ranks 0 and 2 would share one GPU \(a\).*--nproc"):
        worlds._check_one_gpu_a_rank(world)
    world.all_gather_object = lambda value: ["a", "b", "c"]
    worlds._check_one_gpu_a_rank(world)


def test_idle_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "visible_gpus", lambda: 8)
    assert why_idle(torch.device("cuda", 0), 1) == "7 GPUs are idle: --nproc auto uses all"
    assert why_idle(torch.device("cuda", 0), 7) == "1 GPU is idle: --nproc auto uses all"
    assert why_idle(torch.device("cuda", 0), 8) is None
    idle = why_idle(CPU, 8)
    assert idle is not None
    assert idle.startswith("8 GPUs are idle")
    monkeypatch.setattr(worlds, "visible_gpus", lambda: 0)
    assert why_idle(CPU, 8) is None


@pytest.mark.integration
@pytest.mark.cold
def test_nothing_calls_into_cuda_before_the_fork() -> None:
    # What the agent's fork server imports; a fork of a process that has initialised CUDA cannot use it.
    code = """
import torch

def forbidden(name):
    def called(*arguments, **options):
        raise SystemExit(f"torch.cuda.{name} was called before the fork")
    return called

# Each asks the driver, which then fails in a forked process.
for name in ("_lazy_init", "init", "is_available", "device_count", "current_device", "set_device", "manual_seed",
             "get_device_properties", "get_device_name", "mem_get_info", "synchronize"):
    setattr(torch.cuda, name, forbidden(name))

from paceline.training.worker import preload
preload()
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
