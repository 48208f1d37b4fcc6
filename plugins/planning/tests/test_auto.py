"""What ``--strategy auto`` comes to mean for a model that is large against the memory."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from tests.training.test_automatic import CONFIG, MIB, Counted, settled

from paceline.core.errors import ConfigError
from paceline.parallel.strategy_selection import choose_strategy
from paceline_planning import auto


@pytest.mark.integration
def test_what_does_not_fit_ddp_is_split_and_said() -> None:
    config, note = settled(130 * MIB)
    assert config.strategies != ("ddp",)
    assert note is not None
    assert note.startswith(f"strategy: {config.values['mesh'] or config.parallel.strategy}. ddp needs 0.1")
    # Nothing else is decided: the bits are the same.
    assert config.replace(strategy="auto", mesh=None) == CONFIG


@pytest.mark.integration
def test_on_a_gpu_the_measurement_is_in_no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    # Autograd's threads would call CUDA there, and end the process.
    pids: list[int] = []
    real = auto.make_plan
    monkeypatch.setattr(auto, "make_plan", lambda *a, **k: pids.append(os.getpid()) or real(*a, **k))
    task = Counted()
    config, note = choose_strategy(CONFIG, task, world_size=2, memory=130 * MIB, device="cuda")
    assert (pids, task.built) == ([os.getpid()], 0)
    assert note is not None
    assert config.strategies != ("ddp",)


@pytest.mark.integration
def test_what_fits_after_all_is_ddp() -> None:
    assert settled(300 * MIB) == (CONFIG, None)


@pytest.mark.integration
def test_where_nothing_fits_it_is_ddp_and_said() -> None:
    config, note = settled(MIB)
    assert config == CONFIG
    assert note is not None
    assert note.endswith("paceline plan finds no other that fits")


@pytest.mark.integration
def test_fsdp_on_cpus_is_refused_where_not_even_the_state_fits() -> None:
    fsdp = CONFIG.replace(strategy="fsdp")
    # 38 MiB of parameters, as much of gradients, and AdamW's two moments.
    with pytest.raises(ConfigError, match=r"parameters, gradients and optimizer need 0\.1 GiB.*together is 0\.1 GiB"):
        settled(70 * MIB, fsdp)
    assert settled(80 * MIB, fsdp) == (fsdp, None)
    assert settled(MIB, fsdp, device="cuda") == (fsdp, None)
    adapters = fsdp.replace(lora="rank=4")
    assert settled(70 * MIB, adapters) == (adapters, None)


@pytest.mark.integration
def test_fsdp_of_a_task_that_needs_values_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    build_optimizer = Counted.build_optimizer

    def build(self: Counted, model: torch.nn.Module) -> Any:
        if float(next(model.parameters()).flatten()[0]) > 0:
            raise AssertionError
        return build_optimizer(self, model)

    monkeypatch.setattr(Counted, "build_optimizer", build)
    fsdp = CONFIG.replace(strategy="fsdp")
    assert settled(MIB, fsdp) == (fsdp, None)
