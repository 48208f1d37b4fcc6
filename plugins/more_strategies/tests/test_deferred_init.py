"""Deferred initialisation: the bits and the random numbers of a model that is built at once."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.processes import Processes
from torch import nn

from paceline_more_strategies import deferred_init
from paceline_more_strategies.deferred_init import build_deferred


class Mixed(nn.Module):
    """Tied weights, temporaries, changes in place through views, a buffer outside of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 16, padding_idx=3)
        self.head = nn.Linear(16, 60, bias=False)
        self.head.weight = self.words.weight
        nn.init.orthogonal_(self.words.weight)
        self.inner = nn.Linear(32, 32)
        nn.init.trunc_normal_(self.inner.weight, std=0.02)
        with torch.no_grad():
            self.inner.weight[:, :5].normal_()
            self.inner.weight[3].zero_()
        self.scale = nn.Parameter(torch.randn(32, 32) * 0.02)
        self.frozen = nn.Parameter(torch.from_numpy(np.random.RandomState(0).randn(30, 30)), requires_grad=False)
        self.register_buffer("mask", torch.tril(torch.ones(40, 40)), persistent=False)


def _by_value() -> nn.Module:
    model = nn.Linear(32, 32)
    model.weight.data = model.weight.data / model.weight.abs().max().item()
    return model


BUILDS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "mixed": (Mixed, 4),
    "copied-layers": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3), 12),
    "another-dtype": (lambda: nn.Sequential(nn.Linear(32, 32), nn.Conv2d(8, 16, 3)).bfloat16(), 2),
    "depends-on-values": (_by_value, 1),
}


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build()


@pytest.mark.parametrize("name", BUILDS)
def test_values_and_later_draws_are_those_of_a_model_built_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, count = BUILDS[name]
    monkeypatch.setattr(deferred_init, "LARGE_BYTES", 1024)
    expected = _seeded(build)
    draws = torch.rand(3)
    model, late = build_deferred(lambda: _seeded(build))
    assert torch.equal(torch.rand(3), draws)
    assert len(late) == count
    there = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wanted = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    assert there.keys() == wanted.keys()
    for entry, tensor in there.items():
        assert tensor.requires_grad == wanted[entry].requires_grad
        value = late[entry].compute() if tensor.is_meta else tensor
        assert torch.equal(value, wanted[entry]), entry
        assert value.dtype == wanted[entry].dtype


def test_a_model_that_keeps_tensors_elsewhere_is_built_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_init, "LARGE_BYTES", 1024)

    def build() -> nn.Module:
        model = nn.Linear(32, 32)
        model.used = [model.weight]  # type: ignore[assignment]
        return model

    model, late = build_deferred(build)
    assert late == {}
    assert not model.weight.is_meta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_a_file_are_read_from_it(dtype: torch.dtype, tmp_path: Path) -> None:
    saved = nn.Linear(1024, 1024).to(dtype).state_dict()
    save_file(saved, tmp_path / "model.safetensors")

    def build() -> nn.Module:
        model = nn.Linear(1024, 1024)
        model.load_state_dict(load_file(tmp_path / "model.safetensors"))
        return model

    _, late = build_deferred(build)
    source = late["weight"].source
    assert source is not None
    assert torch.equal(source, saved["weight"])
    assert torch.equal(late["weight"].compute(), saved["weight"].float())


# Once a tensor of 3 MiB is freed, smaller ones come from the heap, where small ones that stay hold the pages of others.
HELD_MIB = """
import sys
import platform
import sys
from pathlib import Path
import torch
from paceline_more_strategies.deferred_init import return_freed_memory

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

if sys.argv[1] == "returned":
    return_freed_memory()
torch.ones(3 * 2**18)
before = resident_mib()
pairs = [(torch.ones(2**19), torch.ones(2**16)) for _ in range(50)]
stay = [small for _, small in pairs]
del pairs
print(resident_mib() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_memory_of_freed_tensors_is_returned(run_processes: Processes) -> None:
    kept, returned = (
        float(run_processes.finish(run_processes.start([sys.executable, "-c", HELD_MIB, how])).stdout)
        for how in ("kept", "returned")
    )
    assert kept - returned > 50  # of 100 MiB
