"""What ``--strategy auto`` comes to mean for a model that is large against the memory."""

from __future__ import annotations

import os

import pytest
from tests.training.test_automatic import CONFIG, MIB, Counted, settled

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
