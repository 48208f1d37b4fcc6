from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core.config import RunConfig, all_options, config_from_mapping, read_config_file
from paceline.core.errors import ConfigError
from paceline.core.options import (
    Interval,
    Shuffle,
    flag,
    parse_best,
    parse_duration_s,
    parse_early_stop,
    parse_interval,
    parse_shuffle,
    parse_walltime_s,
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nproc": 0}, "--nproc must be at least 1, but is 0"),
        ({"nproc": "all"}, "--nproc must be a whole number, auto, or a list such as 8,4, but is 'all'"),
        ({"nodes": 0}, "--nodes must be at least 1, or MIN:MAX such as 1:4, but is 0"),
        ({"microbatches": -1}, "--microbatches must be at least 1, but is -1"),
        ({"microbatches": 1.5}, "--microbatches must be a whole number or auto, but is 1.5"),
        ({"grad_accumulation": 0}, "--grad-accumulation must be at least 1, but is 0"),
        ({"global_batch_size": 0}, "--global-batch-size must be at least 1, but is 0"),
        ({"global_batch_size": "96"}, "--global-batch-size must be a whole number, but is '96'"),
        ({"epochs": 0}, "--epochs must be at least 1, but is 0"),
        ({"max_steps": True}, "--max-steps must be a whole number, but is True"),
        ({"threads": 0}, "--threads must be at least 1, but is 0"),
        ({"num_workers": -1}, "--num-workers must be at least 0, but is -1"),
        ({"keep_checkpoints": 0}, "--keep-checkpoints must be at least 1, but is 0"),
        ({"log_every": 0}, "--log-every must be at least 1, but is 0"),
        ({"profile": -2}, "--profile must be at least 0, but is -2"),
        ({"seed": -1}, "--seed must be between 0 and 2**63 - 1, but is -1"),
        ({"seed": 2**63}, "--seed must be between 0 and 2**63 - 1"),
        ({"precision": "fp8"}, "--precision must be fp32, bf16 or fp16, but is 'fp8'"),
        (
            {"strategy": "fsdp9"},
            "fsdp, tp, pp, deepspeed, horovod, ps or hogwild, but is 'fsdp9'",
        ),
        ({"reduction": "slow"}, "--reduction must be exact, allreduce or ddp, but is 'slow'"),
        ({"device": "tpu"}, "--device must be auto, cpu or cuda, but is 'tpu'"),
        ({"clip_norm": 0.0}, "--clip-norm must be positive, but is 0.0"),
        ({"clip_norm": float("nan")}, "--clip-norm must be positive, but is nan"),
        ({"clip_norm": "1"}, "--clip-norm must be a number, but is '1'"),
        ({"compile": 1}, "--compile must be true or false, but is 1"),
        ({"ema": 1.0}, "--ema must be between 0 and 1, but is 1.0"),
        ({"val_fraction": 0.0}, "--val-fraction must be between 0 and 1, but is 0.0"),
        ({"val_fraction": 1}, "--val-fraction must be between 0 and 1, but is 1"),
        ({"epochs": 1, "max_steps": 2}, "give --epochs or --max-steps, not both"),
        ({"reduction": "ddp", "strategy": "single"}, "needs --strategy ddp"),
        ({"hot_spares": 1, "reduction": "ddp"}, "--hot-spares needs --reduction exact or allreduce: DistributedData"),
        ({"hot_spares": 1, "comm_hook": "bf16"}, "--hot-spares needs --reduction exact or allreduce: DistributedData"),
        ({"hot_spares": 1, "strategy": "horovod"}, "--hot-spares does not work with --strategy horovod"),
        (
            {"pp_schedule": "gpipe"},
            "--pp-schedule needs --strategy pp, or pp among the axes of --mesh. Leave it out.",
        ),
        ({"pp_schedule": "gpipe", "strategy": "fsdp"}, "--pp-schedule needs --strategy pp"),
        (
            {"pp_split": "equal", "mesh": "dp=2,tp=2"},
            "--pp-split needs --strategy pp, or pp among the axes of --mesh. Leave it out.",
        ),
        ({"ps_mode": "async"}, "--ps-mode needs --strategy ps. Leave it out."),
        ({"nodes": 2, "on": "spawn"}, "--nodes above 1 needs --rdzv-endpoint HOST:PORT"),
        (
            {"nodes": 2, "node_rank": 2, "rdzv_endpoint": "a:1"},
            "--node-rank must be between 0 and 1, but is 2",
        ),
        (
            {"hang_timeout": "5"},
            "--hang-timeout must be auto, never or a duration such as 90s, 5min or 2h, but is '5'",
        ),
        ({"init_timeout": "5"}, "--init-timeout must be a duration such as 90s, 5min or 2h, but is '5'"),
        ({"shuffle": "window:0"}, "--shuffle must be sample, window:N or none, but is 'window:0'"),
        ({"eval_every": "5min"}, "--eval-every must be such as 50steps, 1epoch or never, but is '5min'"),
        (
            {"checkpoint_every": ("1epoch", "often")},
            "--checkpoint-every must be such as 50steps, 1epoch, 5min or",
        ),
        ({"early_stop": "loss"}, "or METRIC:min:PATIENCE, but is 'loss'"),
        ({"early_stop": "loss:0"}, "--early-stop must be METRIC:PATIENCE"),
        (
            {"early_stop": "loss:1", "eval_every": "never"},
            "--early-stop needs evaluations, but --eval-every is never",
        ),
        (
            {"best_metric": "accuracy"},
            "--best-metric must be METRIC:min or METRIC:max, such as accuracy:max, but is 'accuracy'",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_option_value_and_rule(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig(**options)
    assert message in str(caught.value)


def test_whole_numbers_are_numbers() -> None:
    assert RunConfig(clip_norm=1, ema=0.5).training.clip_norm == 1


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"run\.toml: there is no option 'epoch'\. Did you mean epochs"):
        config_from_mapping({"epoch": 3}, "run.toml")
    with pytest.raises(ConfigError, match="The options are: task, set, on, nproc"):
        config_from_mapping({"zzzzzz": 3}, "run.toml")


def test_lists_and_a_lone_text_become_tuples() -> None:
    assert config_from_mapping({"checkpoint_every": ["5steps", "1epoch"]}, "").records.checkpoint_every == (
        Interval(steps=5),
        Interval(epochs=1),
    )
    assert config_from_mapping({"checkpoint_every": "5steps"}, "").records.checkpoint_every == (Interval(steps=5),)


def test_every_option_explains_itself_and_its_default_is_valid() -> None:
    RunConfig()
    for option in all_options().values():
        assert option.help.endswith("."), option.name
        assert option.group, option.name
        assert flag(option.name) == "--" + option.name.replace("_", "-")


def test_non_defaults_are_what_was_changed() -> None:
    config = RunConfig(seed=3, epochs=2)
    assert config.non_defaults() == {"epochs": 2, "seed": 3}
    assert RunConfig(**config.non_defaults()) == config


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("50steps", Interval(steps=50)),
        ("1 step", Interval(steps=1)),
        ("2epochs", Interval(epochs=2)),
        ("90s", Interval(seconds=90)),
        ("5min", Interval(seconds=300)),
        ("0.5h", Interval(seconds=1800)),
        ("never", Interval()),
    ],
)
def test_intervals(text: str, interval: Interval) -> None:
    assert parse_interval(text, "checkpoint_every") == interval


@pytest.mark.parametrize("text", ["", "0steps", "-1steps", "steps", "5", "1.5epochs", "0s", "3 weeks"])
def test_no_intervals(text: str) -> None:
    with pytest.raises(ConfigError, match="--checkpoint-every must be such as 50steps, 1epoch, 5min or never"):
        parse_interval(text, "checkpoint_every")


def test_small_languages() -> None:
    assert parse_duration_s("1.5min", "init_timeout") == 90
    assert [parse_shuffle(text) for text in ("sample", "none", "window:64")] == [
        Shuffle(1),
        Shuffle(0),
        Shuffle(64),
    ]
    assert parse_early_stop("val:loss:3") == ("val:loss", None, 3)
    assert parse_early_stop("val:mae:min:3") == ("val:mae", "min", 3)
    assert parse_best("accuracy:max") == ("accuracy", "max")


def test_a_file_has_a_config_table_or_options_at_its_top(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("seed = 4\n")
    assert read_config_file(path) == {"seed": 4}
    path.write_text('[config]\nseed = 5\ncheckpoint_every = ["1epoch"]\n[pins]\nthreads = 2\n')
    assert read_config_file(path) == {"seed": 5, "checkpoint_every": ("1epoch",)}


@pytest.mark.parametrize(
    ("text", "message"), [("seed = ", "Invalid value"), ("sed = 1", "no option 'sed'. Did you mean seed")]
)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config_file(path)
    assert "a.toml" in str(caught.value)
    assert message in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        read_config_file(tmp_path / "b.toml")


def test_a_mesh_lays_out_the_processes() -> None:
    config = RunConfig(mesh="fsdp=2, dp=3")
    assert list(config.parallel.axes(6).items()) == [("dp", 3), ("fsdp", 2)]
    assert config.strategies == ("ddp", "fsdp")
    assert config.data_ranks(6) == 6
    assert RunConfig().parallel.axes(4) == {"dp": 4}
    assert RunConfig(strategy="fsdp").parallel.axes(4) == {"fsdp": 4}


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("dp2", "--mesh must be such as pp=2,tp=2, but is 'dp2'"),
        ("dp=0", "--mesh must be such as"),
        ("dp=2,dp=2", "--mesh must be such as"),
        ("dp=2,rows=2", "--mesh dp=2,rows=2: there is no axis 'rows'. The axes are: pp, dp, fsdp, tp"),
        ("dp=2,fsdp=2", "needs 4 processes, but there are 6. Use --mesh dp=2,fsdp=3, or 4 processes"),
    ],
)
def test_a_mesh_that_cannot_be(mesh: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig(mesh=mesh).parallel.axes(6)


def test_a_mesh_of_other_strategies_than_the_one_asked_for() -> None:
    with pytest.raises(ConfigError, match="--mesh dp=4 uses ddp, not --strategy fsdp"):
        RunConfig(mesh="dp=4", strategy="fsdp")
    assert RunConfig(mesh="dp=2,fsdp=2", strategy="fsdp").strategies == ("ddp", "fsdp")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2h", 7200),
        ("90", 5400),
        ("10:30", 630),
        ("12:00:00", 43200),
        ("1-6", 108000),
        ("2-12:30", 217800),
        ("1-00:00:01", 86401),
    ],
)
def test_a_walltime_may_be_written_as_slurm_does(text: str, seconds: float) -> None:
    assert parse_walltime_s(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "00:00:00", "1:2:3:4", "1-", "-5", "12:00h"])
def test_what_is_no_walltime(text: str) -> None:
    with pytest.raises(ConfigError, match="--walltime must be"):
        parse_walltime_s(text)
