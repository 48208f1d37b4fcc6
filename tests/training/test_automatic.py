"""What ``--strategy auto`` comes to mean."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.config import ResolvedConfig
from paceline.core.errors import ConfigError
from paceline.parallel import strategy_selection
from paceline.parallel.strategy_selection import choose_strategy, require_replaceable
from paceline_tasks.transformer import Transformer

MIB = 2**20
CONFIG = ResolvedConfig(task="transformer", reduction="allreduce", microbatches=2, global_batch_size=2)


@dataclass
class Counted(Transformer):
    """A transformer of 38 MiB of parameters, which counts how often it is built."""

    layers: int = 8
    width: int = 320
    context: int = 16
    built: int = 0

    def build_model(self) -> nn.Module:
        self.built += 1
        return super().build_model()


def settled(memory: int, config: ResolvedConfig = CONFIG, **changes: Any) -> tuple[ResolvedConfig, str | None]:
    arguments = {"world_size": 2, "memory": memory, "device": "cpu", **changes}
    return choose_strategy(config, Counted(), **arguments)


@pytest.mark.integration
def test_what_clearly_fits_is_ddp_and_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy_selection, "import_object", lambda place: pytest.fail("measured"))
    before = torch.get_rng_state()
    assert settled(1024 * MIB) == (CONFIG, None)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.integration
def test_a_core_without_the_plan_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str, *_: object) -> None:
        if name == "paceline_planning":
            raise ModuleNotFoundError(name=name)

    for name in [name for name in sys.modules if name.startswith("paceline_planning")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])
    with pytest.raises(ConfigError, match=r"needs paceline_planning.* pip install \."):
        settled(130 * MIB)


@pytest.mark.parametrize(
    ("options", "world"),
    [({"strategy": "ddp"}, 2), ({"mesh": "dp=2"}, 2), ({"reduction": "ddp"}, 2), ({}, 1)],
)
def test_what_was_asked_for_stays(options: dict[str, Any], world: int) -> None:
    config = CONFIG.replace(**options)
    assert settled(MIB, config, world_size=world) == (config, None)


@pytest.mark.integration
def test_a_model_that_cannot_be_built_without_content_is_left_to_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "build_model", lambda self: torch.zeros(1).item())
    assert settled(MIB) == (CONFIG, None)


kept: dict[str, torch.Tensor] = {}


def kept_weights() -> torch.Tensor:
    return kept.setdefault("weights", torch.ones(3))


@pytest.mark.integration
def test_what_a_task_keeps_of_the_count_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_model(self: Counted) -> nn.Module:
        torch.set_default_dtype(torch.float64)
        self.built += 1
        return nn.ParameterList([kept_weights()])

    monkeypatch.setattr(Counted, "build_model", build_model)
    task = Counted()
    assert choose_strategy(CONFIG, task, world_size=2, memory=1024 * MIB, device="cpu") == (CONFIG, None)
    assert (task.built, kept, torch.get_default_dtype()) == (0, {}, torch.float32)


@pytest.mark.integration
def test_a_count_that_dies_names_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "build_model", lambda self: os._exit(7))
    with pytest.raises(ConfigError, match=r"ended with exit code 7\. Give a strategy, such as --strategy ddp"):
        settled(1024 * MIB)


@pytest.fixture
def deaf_forks(tmp_path: Path) -> Iterator[Path]:
    """A directory; while it has a file, a forked process removes one and stops before any of its own code runs."""
    _deaf.append(tmp_path)
    yield tmp_path
    _deaf.clear()


_deaf: list[Path] = []


@functools.cache
def _register_deafness() -> None:
    def stop() -> None:
        for file in (file for directory in _deaf for file in directory.iterdir()):
            file.unlink()
            signal.pause()

    os.register_at_fork(after_in_child=stop)


@pytest.mark.integration
def test_a_fork_that_does_not_begin_is_replaced(deaf_forks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _register_deafness()
    monkeypatch.setattr(strategy_selection, "_BEGIN_S", (0.5, 30.0, 60.0))
    (deaf_forks / "one").touch()
    assert settled(1024 * MIB) == (CONFIG, None)
    assert not list(deaf_forks.iterdir())


@pytest.mark.integration
def test_where_no_fork_begins_it_names_what_to_give(deaf_forks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _register_deafness()
    monkeypatch.setattr(strategy_selection, "_BEGIN_S", (0.2, 0.2))
    for name in ("first", "second", "third"):
        (deaf_forks / name).touch()
    with pytest.raises(ConfigError, match=r"no forked process begins .* Give a strategy, such as --strategy ddp"):
        settled(1024 * MIB)


class Group:
    """Garbage, like a group of ranks that was left, whose end would wait for a thread that a fork does not have."""

    def __init__(self, ended: Path) -> None:
        self.ended, self.itself = ended, self

    def __del__(self) -> None:
        (self.ended / str(os.getpid())).touch()


@dataclass
class Collecting(Counted):
    def build_model(self) -> nn.Module:
        gc.collect()
        return super().build_model()


@pytest.mark.integration
def test_garbage_of_before_is_not_collected_in_the_fork(tmp_path: Path) -> None:
    gc.disable()
    try:
        Group(tmp_path)
        choose_strategy(CONFIG, Collecting(), world_size=2, memory=1024 * MIB, device="cpu")
        assert not list(tmp_path.iterdir())
    finally:
        gc.enable()
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]


def test_in_place_recovery_names_what_to_give() -> None:
    chosen = CONFIG.replace(strategy="fsdp")
    with pytest.raises(ConfigError, match=r"only ddp can replace .* Give --strategy fsdp"):
        require_replaceable(chosen, CONFIG)
    require_replaceable(CONFIG, CONFIG)
    require_replaceable(chosen, chosen)
    restarted = CONFIG.replace(recover="restart")
    require_replaceable(restarted.replace(strategy="fsdp"), restarted)


@pytest.mark.parametrize("limits", [(), (2**30, 2**40)])
def test_processes_share_the_machine(monkeypatch: pytest.MonkeyPatch, limits: tuple[int, ...]) -> None:
    monkeypatch.setattr(strategy_selection, "cgroup_limits", lambda: limits)
    cpu = torch.device("cpu")
    one = strategy_selection.memory_per_process(cpu, 1)
    assert strategy_selection.memory_per_process(cpu, 4) == one // 4
    assert (one == 2**30) is bool(limits)


def test_the_memory_is_that_of_the_tightest_control_group(tmp_path: Path) -> None:
    for group, limit in {"": "max", "slurm": "9000", "slurm/job": "max", "other": "1"}.items():
        (tmp_path / group).mkdir(exist_ok=True)
        (tmp_path / group / "memory.max").write_text(f"{limit}\n")
    groups = tmp_path / "groups"
    assert list(strategy_selection.cgroup_limits(groups, tmp_path)) == []
    groups.write_text("0::/slurm/job\n")
    assert list(strategy_selection.cgroup_limits(groups, tmp_path)) == [9000]
    (tmp_path / "memory" / "job").mkdir(parents=True)
    (tmp_path / "memory" / "job" / "memory.limit_in_bytes").write_text("5000\n")
    groups.write_text("4:memory:/job/step\n3:cpuset:/job\n0::/\n")
    assert list(strategy_selection.cgroup_limits(groups, tmp_path)) == [5000]
