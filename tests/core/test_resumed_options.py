"""What options say of themselves, and the sets that follow from it."""

from __future__ import annotations

import typing

import pytest

from paceline.core.built_in import TRAITS
from paceline.core.config import (
    RunConfig,
    all_options,
    merge_resumed_options,
    require_unchanged,
    select,
)
from paceline.core.errors import ConfigError
from paceline.core.option_groups import STRATEGIES
from paceline.core.options import Bits, Capability, Resume, Scope, flag, option


def test_an_option_that_is_not_classified_is_an_error_at_import() -> None:
    with pytest.raises(TypeError, match="'resume', 'bits', and 'scope'"):
        option(0, "It does something.", group="Data")  # type: ignore[call-arg]


def test_every_option_is_classified() -> None:
    for name, its in all_options().items():
        assert its.resume in typing.get_args(Resume), name
        assert its.bits in typing.get_args(Bits), name
        assert its.scope in typing.get_args(Scope), name
        assert its.needs in (None, *typing.get_args(Capability)), name
        assert set(its.strategies) <= STRATEGIES.keys() | TRAITS.keys(), name
        assert its.requires is None or its.requires.option in all_options(), name
        assert its.replaces is None or all_options()[its.replaces].replaces == name, name


def test_a_run_keeps_what_decides_its_bits() -> None:
    lost = select(lambda its: its.bits == "always" and its.resume in ("kept", "fresh"))
    assert lost == ("task", "set"), "these two are compared with the record of the task"
    assert not select(lambda its: its.bits == "never" and its.resume == "fixed")
    assert not select(lambda its: its.scope in ("training", "data", "evaluation") and its.resume == "kept")


def test_a_place_says_nothing_of_what_a_run_computes() -> None:
    assert not select(lambda its: its.scope in ("place", "start", "recovery", "records") and its.bits == "always")


SAMPLES: dict[str, dict[str, object]] = {
    "task": {"task": "fashion-mnist"},
    "set": {"set": ("lr=1",)},
    "on": {"on": "slurm"},
    "nproc": {"nproc": 2},
    "nodes": {"nodes": 2},
    "node_rank": {"node_rank": 1, "nodes": 2},
    "rdzv_endpoint": {"rdzv_endpoint": "a:1"},
    "token_file": {"token_file": "secret"},
    "rdzv_id": {"rdzv_id": "mine"},
    "backend": {"backend": "gloo"},
    "interface": {"interface": "eth0"},
    "init_timeout": {"init_timeout": "9min"},
    "comm_debug": {"comm_debug": True},
    "threads": {"threads": 3},
    "device": {"device": "cpu"},
    "recover": {"recover": "restart"},
    "hot_spares": {"hot_spares": 1},
    "max_restarts": {"max_restarts": 3},
    "coordinator": {"coordinator": "etcd://a:2379"},
    "walltime": {"walltime": "2h"},
    "sdc_check_every": {"sdc_check_every": 7},
    "purity": {"purity": "warn"},
    "heartbeat": {"heartbeat": 3.0},
    "hang_timeout": {"hang_timeout": "9min"},
    "local_sgd_steps": {"local_sgd_steps": 5},
    "outer_optimizer": {"outer_optimizer": "nesterov", "local_sgd_steps": 5},
    "outer_lr": {"outer_lr": 0.5, "outer_optimizer": "nesterov", "local_sgd_steps": 5},
    "outer_momentum": {"outer_momentum": 0.5, "outer_optimizer": "nesterov", "local_sgd_steps": 5},
    "comm_hook": {"comm_hook": "bf16"},
    "powersgd_rank": {"powersgd_rank": 2, "comm_hook": "powersgd"},
    "fsdp_wrap": {"fsdp_wrap": "Block", "strategy": "fsdp"},
    "fsdp_reshard": {"fsdp_reshard": "never", "strategy": "fsdp"},
    "fsdp_offload": {"fsdp_offload": True, "strategy": "fsdp"},
    "fsdp_mixed_precision": {"fsdp_mixed_precision": True, "strategy": "fsdp", "precision": "bf16"},
    "zero_stage": {"zero_stage": 2, "strategy": "deepspeed"},
    "checkpoint_activations": {"checkpoint_activations": "block"},
    "checkpoint_blocks": {"checkpoint_blocks": "Block", "checkpoint_activations": "block"},
    "ps_mode": {"ps_mode": "async", "strategy": "ps"},
    "ps_staleness": {"ps_staleness": 0, "ps_mode": "ssp", "strategy": "ps"},
    "ps_servers": {"ps_servers": 2, "strategy": "ps"},
    "strategy": {"strategy": "zero1"},
    "dp_devices": {"dp_devices": 2, "strategy": "dp"},
    "mesh": {"mesh": "dp=2,fsdp=2"},
    "sequence_parallel": {"sequence_parallel": True, "strategy": "tp"},
    "pp_schedule": {"pp_schedule": "gpipe", "strategy": "pp"},
    "pp_split": {"pp_split": "equal", "strategy": "pp"},
    "reduction": {"reduction": "allreduce"},
    "load_balance": {"load_balance": "equal"},
    "microbatches": {"microbatches": 6},
    "grad_accumulation": {"grad_accumulation": 2},
    "init_from": {"init_from": "runs/a"},
    "reset_head": {"reset_head": True, "init_from": "runs/a"},
    "reset": {"reset": ("head",), "init_from": "runs/a"},
    "freeze": {"freeze": ("layer1.*",)},
    "lr_scale": {"lr_scale": ("head=2",)},
    "lora": {"lora": "rank=4"},
    "global_batch_size": {"global_batch_size": 96},
    "epochs": {"epochs": 3},
    "max_steps": {"max_steps": 9},
    "seed": {"seed": 4},
    "precision": {"precision": "bf16"},
    "clip_norm": {"clip_norm": 1.0},
    "ema": {"ema": 0.9},
    "compile": {"compile": True},
    "shuffle": {"shuffle": "none"},
    "num_workers": {"num_workers": 2},
    "val_fraction": {"val_fraction": 0.1},
    "eval_every": {"eval_every": "5steps"},
    "early_stop": {"early_stop": "loss:3"},
    "best_metric": {"best_metric": "loss:min"},
    "run_dir": {"run_dir": "runs/b"},
    "resume": {"resume": "never"},
    "checkpoint_every": {"checkpoint_every": ("5min",)},
    "keep_checkpoints": {"keep_checkpoints": 5},
    "backup_to": {"backup_to": "/copies"},
    "log_every": {"log_every": 5},
    "log_format": {"log_format": "json"},
    "log_to": {"log_to": ("wandb",)},
    "profile": {"profile": 3},
    "metrics_port": {"metrics_port": 9400},
    "metrics_host": {"metrics_host": "localhost", "metrics_port": 9400},
    "metrics_token_file": {"metrics_token_file": "token", "metrics_port": 9400},
}
"""Of each option a value other than its default, and what it needs beside it."""


def test_a_resumed_run_has_all_options_of_its_creation_but_the_fresh_ones() -> None:
    assert SAMPLES.keys() == all_options().keys(), "an option has no sample"
    for name, sample in SAMPLES.items():
        recorded = RunConfig(**sample)
        assert recorded.values[name] != all_options()[name].default
        asked = {"run_dir": "runs/a", "resume": "must"}
        resumed = RunConfig(**merge_resumed_options(asked, asked, recorded))
        if name in asked:
            assert resumed.values[name] == asked[name]
        elif all_options()[name].resume == "fresh":
            assert resumed.values[name] == all_options()[name].default, name
        else:
            assert resumed.values[name] == recorded.values[name], name


def test_a_resumed_run_takes_another_value_of_all_but_the_fixed_options() -> None:
    for name, sample in SAMPLES.items():
        before: dict[str, object] = {"ps_staleness": 5} if name == "ps_staleness" else {}  # it has no default there
        beside = {key: value for key, value in sample.items() if key != name} | before
        recorded = RunConfig(**beside)
        needed = {key: value for key, value in beside.items() if all_options()[key].resume == "fresh"}
        asked = {"run_dir": "runs/a", "resume": "must", **needed, name: sample[name]}
        if all_options()[name].resume == "fixed":
            with pytest.raises(ConfigError, match=f"{flag(name)}: .* when the run was created"):
                require_unchanged(asked, asked, recorded)
            continue
        require_unchanged(asked, asked, recorded)
        assert RunConfig(**merge_resumed_options(asked, asked, recorded)).values[name] == sample[name]


def test_the_same_command_takes_the_present_value_of_what_decides_no_bit() -> None:
    recorded = RunConfig(keep_checkpoints=5, num_workers=2, seed=4, threads=3, local_sgd_steps=5)
    config = RunConfig(run_dir="runs/a", keep_checkpoints=7)
    merged = RunConfig(**merge_resumed_options(config.values, {"keep_checkpoints"}, recorded))
    assert merged == RunConfig(run_dir="runs/a", keep_checkpoints=7, seed=4, threads=3, local_sgd_steps=5)


@pytest.mark.parametrize(
    ("created", "asked"),
    [
        ({"strategy": "ps", "ps_mode": "ssp", "ps_staleness": 1}, {"ps_mode": "sync"}),
        ({"local_sgd_steps": 5, "outer_optimizer": "nesterov", "outer_lr": 0.5}, {"local_sgd_steps": 0}),
        ({"comm_hook": "powersgd", "powersgd_rank": 2}, {"comm_hook": "none"}),
        (
            {"checkpoint_activations": "block", "checkpoint_blocks": "Block"},
            {"checkpoint_activations": "none"},
        ),
    ],
)
def test_an_option_is_dropped_with_the_one_that_it_requires(
    created: dict[str, object], asked: dict[str, object]
) -> None:
    recorded = RunConfig(**created)
    resumed = RunConfig(**merge_resumed_options({**asked, "run": "runs/a"}, asked, recorded))
    for name in created.keys() - {"strategy"}:
        assert resumed.values[name] == all_options()[name].default, name


@pytest.mark.parametrize("name", select(lambda its: its.requires is not None))
def test_an_option_has_no_meaning_without_the_one_that_it_requires(name: str) -> None:
    requires = all_options()[name].requires
    assert requires is not None
    without = {**SAMPLES[name], requires.option: requires.other_than or all_options()[requires.option].default}
    for other in all_options():
        its = all_options()[other]
        if its.requires is not None and its.requires.option == requires.option and other != name:
            without.pop(other, None)
    if name in ("outer_lr", "outer_momentum"):
        without.pop("local_sgd_steps")
    with pytest.raises(ConfigError, match=flag(requires.option)):
        RunConfig(**without)


@pytest.mark.parametrize("name", select(lambda its: its.minimum is not None))
def test_a_number_out_of_its_bounds_is_refused(name: str) -> None:
    its = all_options()[name]
    beside = {key: value for key, value in SAMPLES[name].items() if key != name}
    low, high = its.minimum, its.maximum
    assert low is not None
    wrong = [low if its.exclusive else low - 1]
    if high is not None:
        wrong.append(high if its.exclusive else high + 1)
    for value in wrong:
        with pytest.raises(ConfigError, match=f"{flag(name)} must be .*, but is "):
            RunConfig(**beside, **{name: value})
