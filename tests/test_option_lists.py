"""The derived sets are those that were kept by hand, but for what was wrong in these."""

from __future__ import annotations

from paceline.cli.join import _OF_A_MACHINE
from paceline.config.communication import _NOT_WHILE_APART
from paceline.config.option_sets import select
from paceline.config.parallelism import STRATEGIES

_KEPT = (
    *("on", "nproc", "nodes", "rdzv_id", "backend", "interface", "threads", "device", "workers"),
    *("strategy", "mesh", "dp_devices", "sequence_parallel", "pp_schedule", "pp_split", "zero_stage"),
    *("fsdp_wrap", "fsdp_reshard", "fsdp_offload", "fsdp_mixed_precision", "precision"),
    *("checkpoint_activations", "checkpoint_blocks"),
    *("ps_mode", "staleness", "servers"),
    *("checkpoint_every", "keep", "backup_to", "log_every", "log_to"),
    *("recover", "max_restarts", "heartbeat", "hang_timeout", "walltime", "verify_every"),
)
CHANGEABLE = frozenset(
    {
        *("on", "nproc", "nodes", "node_rank", "rdzv_endpoint", "rdzv_id", "token_file", "interface"),
        *("backend", "spares"),
        *("init_timeout", "comm_debug", "threads", "device", "strategy", "mesh", "sequence_parallel"),
        *("pp_schedule", "pp_split", "zero_stage"),
        *("fsdp_wrap", "fsdp_reshard", "fsdp_offload", "fsdp_mixed_precision"),
        *("checkpoint_activations", "checkpoint_blocks"),
        *("ps_mode", "staleness", "servers"),
        *("workers", "run", "resume"),
        *("recover", "max_restarts", "heartbeat", "hang_timeout"),
        *("walltime", "verify_every"),
        *(
            "checkpoint_every",
            "keep",
            "backup_to",
            "log_every",
            "log_to",
            "profile",
            "set",
            "task",
            "accumulate",
        ),
        *("balance", "dp_devices"),
    }
)
_ADJUSTABLE = frozenset(
    {"sync_every", "outer_optimizer", "outer_lr", "outer_momentum", "comm_hook", "powersgd_rank"}
)
_NOT_TRACKED = ("token_file", "rdzv_endpoint", "rdzv_id", "interface", "node_rank", "run", "resume")
_ELSEWHERE = (*_NOT_TRACKED, "task", "set")
_NOT_PASSED_ON = (
    *("task", "on", "run", "nproc", "nodes", "node_rank", "rdzv_endpoint", "rdzv_id", "threads", "interface"),
)
_OF_THE_PLACE = ("nproc", "threads")
_SHOWN_OPTIONS = (
    *("task", "set", "strategy", "mesh", "reduction", "shards", "global_batch_size", "epochs", "max_steps"),
    *("seed", "precision", "compile", "device", "threads", "eval_every", "best", "early_stop", "recover"),
)
_DECIDE_IT = (
    *("seed", "global_batch_size", "shards", "precision", "threads"),
    *("val_fraction", "epochs", "max_steps", "best", "eval_every"),
)
_PINS = ("threads", "global_batch_size", "shards", "precision", "reduction", "compile")
_NOT_HERE = (
    *("on", "nodes", "node_rank", "rdzv_endpoint", "rdzv_id", "token_file", "recover", "max_restarts"),
    *("spares", "resume", "checkpoint_every", "keep", "backup_to", "eval_every", "early_stop", "best"),
    *("walltime", "profile", "verify_every", "balance"),
)


def test_derived_sets() -> None:
    kept = set(select(lambda its: its.resume == "kept"))
    place = set(select(lambda its: its.scope == "place"))
    fresh = set(select(lambda its: its.resume == "fresh"))
    assert kept | fresh | {"threads", "accumulate"} == CHANGEABLE
    assert set(select(lambda its: its.resume == "adjustable")) == _ADJUSTABLE | {"threads"}
    assert kept == (set(_KEPT) - {"precision", "threads"}) | {"balance", "spares", "init_timeout"}
    assert place == set(_NOT_TRACKED)
    assert place | {"task", "set"} == set(_ELSEWHERE)
    assert select(lambda its: its.scope == "task") == ("task", "set")
    assert set(select(lambda its: its.from_launcher)) == set(_NOT_PASSED_ON)
    assert set(select(lambda its: its.from_launcher and its.scope in ("start", "process"))) == {
        *_OF_THE_PLACE,
        *("on", "nodes"),
    }
    assert set(select(lambda its: its.summary)) == set(_SHOWN_OPTIONS)
    assert set(select(lambda its: its.evaluation)) == set(_DECIDE_IT)
    assert set(select(lambda its: its.fingerprint)) == set(_PINS)
    of_other_runs = set(
        select(lambda its: its.scope in ("place", "start", "recovery", "evaluation", "records"))
    )
    assert of_other_runs - {"nproc"} == set(_NOT_HERE) | {"interface", "run", "log_every", "log_to"}


ALL = {"corruption", "spares", "compile", "ema", "recompute", "lockstep"}
SUPPORTS = {
    "single": ALL,
    "ddp": ALL,
    "horovod": ALL - {"spares"},
    "zero1": ALL - {"spares"},
    "dp": {"ema", "lockstep"},
    "deepspeed": {"ema", "lockstep"},
    "fsdp": {"ema", "lockstep", "recompute"},
    "tp": {"lockstep", "recompute"},
    "pp": {"lockstep"},
    "mp": {"lockstep"},
    "ps": {"compile", "recompute"},
    "hogwild": {"compile", "recompute"},
}


def test_what_a_joining_machine_resets() -> None:
    assert {*_OF_A_MACHINE, "on"} == {"interface", "token_file", "node_rank", "rdzv_endpoint", "on"}


def test_what_strategies_support() -> None:
    assert {name: traits.supports for name, traits in STRATEGIES.items()} == SUPPORTS
    assert set(_NOT_WHILE_APART) == {"ema", "corruption", "spares"}
