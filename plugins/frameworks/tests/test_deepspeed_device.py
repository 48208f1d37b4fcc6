"""DeepSpeed takes the GPU that Paceline has chosen, whatever number the launcher gave the rank."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.parallel.world import World
from paceline_frameworks import deepspeed


@pytest.mark.parametrize(("device", "number"), [("cuda:0", "0"), ("cuda:3", "3"), ("cpu", "3")])
def test_the_number_of_its_gpu(device: str, number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str | None] = {}

    def initialize(**options: Any) -> tuple[Any]:
        seen.update({name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")})
        return (SimpleNamespace(),)

    monkeypatch.setattr(deepspeed, "import_deepspeed", lambda device: SimpleNamespace(initialize=initialize))
    monkeypatch.setattr(deepspeed, "reset_deepspeed_comm", lambda: None)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "3")
    world = World(
        rank=11,
        world_size=16,
        local_rank=3,
        local_world_size=8,
        device=torch.device(device),
        backend="nccl",
        generation=0,
        one_host=False,
    )
    module = nn.Linear(1, 1)
    deepspeed.engine_of(module, torch.optim.SGD(module.parameters()), world, stage=2, autocast=None)
    deepspeed._world_cleanup.close()
    # Its engine requires that both are equal.
    assert seen == {"RANK": "11", "LOCAL_RANK": number, "OMPI_COMM_WORLD_LOCAL_RANK": number}
