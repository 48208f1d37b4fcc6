"""The configuration of a run: one flat dataclass, whose fields are the options of every front door.

``paceline train --global-batch-size 96``, ``paceline.fit(task, global_batch_size=96)`` and
``global_batch_size = 96`` in a ``run.toml`` are the same field. The help texts live beside the
fields and feed ``--help``.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.errors import ConfigError


def _option(default: Any, help: str, *, group: str) -> Any:
    return field(default=default, metadata={"help": help, "group": group})


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All options of a training run; ``None`` means "the task's default, else Paceline's"."""

    task: str = _option("", "file.py:Name, package.module:Name or a recipe's name.", group="Task")
    set: tuple[str, ...] = _option((), "A hyperparameter as field=value; may be repeated.", group="Task")

    on: Literal["auto", "inprocess", "spawn", "torchrun"] = _option(
        "auto", "The launcher. auto: inprocess for one process, spawn for several.", group="Processes"
    )
    nproc: int | str = _option(
        1,
        "Processes on this machine; auto: one a GPU, else one a core. 8,4: for machines 0 and 1.",
        group="Processes",
    )
    nodes: int | str = _option(
        1,
        "Machines; the same command is run on each. MIN:MAX: begin with MIN, others join and leave.",
        group="Processes",
    )
    node_rank: int | None = _option(None, "This machine's number, 0 to nodes - 1.", group="Processes")
    rdzv_endpoint: str | None = _option(
        None, "HOST:PORT of machine 0, where several machines meet.", group="Processes"
    )
    token_file: str | None = _option(
        None,
        "Holds the secret by which the machines of a run know each other. Default: in the run's directory.",
        group="Processes",
    )
    rdzv_id: str = _option("paceline", "A name that all machines of one run share.", group="Processes")
    backend: Literal["auto", "gloo", "nccl"] = _option(
        "auto", "The process group's backend.", group="Processes"
    )
    interface: str | None = _option(
        None, "Network interface for gloo and NCCL, e.g. eth0.", group="Processes"
    )
    init_timeout: str = _option("5min", "How long to wait for all processes to appear.", group="Processes")
    comm_debug: bool = _option(False, "Verbose logs of NCCL, gloo and torch.distributed.", group="Processes")
    threads: int | None = _option(
        None,
        "CPU threads a process; a pin. Default: OMP_NUM_THREADS, else cores over processes.",
        group="Processes",
    )
    device: Literal["auto", "cpu", "cuda"] = _option("auto", "Where the model lives.", group="Processes")

    recover: Literal["auto", "none", "inplace", "restart"] = _option(
        "auto",
        "When a process dies. inplace: the others go on and it is replaced; restart: all start again from "
        "the newest checkpoint; none: the job ends, and is resumed by hand. auto: inplace where that works "
        "(--on spawn, CPU, reduction exact or fast), else restart with --on spawn, else none.",
        group="Recovery",
    )
    spares: int = _option(
        0,
        "Processes more, over all machines, that hold the state and compute only once others are lost.",
        group="Recovery",
    )
    max_restarts: int = _option(
        8, "Replaced processes without a step of progress, after which the job ends.", group="Recovery"
    )

    walltime: str | None = _option(
        None, "Stop in time, saved, before so long has passed (s, min, h); exit code 75.", group="Recovery"
    )

    verify_every: int = _option(
        0,
        "Every so many steps, compute one shard's gradient on a second rank too and compare the bits; a "
        "rank that differs is named and leaves. 0: never.",
        group="Recovery",
    )
    heartbeat: float = _option(
        2.0, "Seconds of silence after which a process is taken for hung, and replaced.", group="Recovery"
    )
    hang_timeout: str = _option(
        "auto",
        "How long a step may take before whoever holds it up is named, and treated as dead: such as 10min; "
        "auto: learned, at least 30s; never.",
        group="Recovery",
    )

    strategy: Literal["auto", "single", "ddp"] = _option(
        "auto", "How work is split. auto: single for one process, else ddp.", group="Parallelism"
    )
    reduction: Literal["exact", "fast", "torch"] = _option(
        "exact",
        "How gradients are summed. exact: the same bits for any number of processes; fast: all-reduce; "
        "torch: DistributedDataParallel.",
        group="Parallelism",
    )
    balance: Literal["auto", "equal"] = _option(
        "auto",
        "How processes share the shards. auto: by measured speed, where one is clearly slower (reduction "
        "exact or fast); equal: all the same.",
        group="Parallelism",
    )
    shards: int | Literal["auto"] | None = _option(
        None, "Logical shards of a global batch, fixed for the run.", group="Parallelism"
    )
    accumulate: int = _option(
        1, "Shards a process when --shards is auto (gradient accumulation).", group="Parallelism"
    )

    global_batch_size: int | None = _option(None, "Samples a step, over all processes.", group="Training")
    epochs: int | None = _option(None, "Passes over the training data.", group="Training")
    max_steps: int | None = _option(None, "Stop after this many steps instead.", group="Training")
    seed: int = _option(
        0, "Decides the data's order, the initial weights and all randomness.", group="Training"
    )
    precision: Literal["fp32", "bf16", "fp16"] = _option(
        "fp32", "Mixed precision by torch.amp.", group="Training"
    )
    clip_norm: float | None = _option(None, "Clip the gradient's 2-norm to this.", group="Training")
    ema: float | None = _option(
        None,
        "Keep an exponential moving average of the weights with this decay, and evaluate it.",
        group="Training",
    )
    compile: bool = _option(False, "Compile the model with torch.compile.", group="Training")

    shuffle: str = _option("sample", "sample, block:N (blocks of N neighbours) or none.", group="Data")
    workers: int | Literal["auto"] = _option(
        "auto", "Data-loading processes a rank. auto: 0 for tensors, else up to 4.", group="Data"
    )
    val_fraction: float | None = _option(
        None, "Carve this fraction of train as the validation split.", group="Data"
    )

    eval_every: str = _option("1epoch", "Evaluate every Nsteps or Nepochs, or never.", group="Evaluation")
    early_stop: str | None = _option(
        None, "METRIC:PATIENCE; stop after PATIENCE evaluations without a better METRIC.", group="Evaluation"
    )
    best: str | None = _option(
        None, "METRIC:min or METRIC:max, which decides the best model.", group="Evaluation"
    )

    run: str | None = _option(None, "The run's directory. Default: runs/TASK-TIME.", group="Run directory")
    resume: Literal["auto", "never", "must"] = _option(
        "auto", "auto: continue an existing run; never: refuse one; must: require one.", group="Run directory"
    )
    checkpoint_every: tuple[str, ...] = _option(
        ("1epoch",),
        "Nsteps, Nmin (s, min, h) or Nepochs; may be repeated. never: only at the end.",
        group="Run directory",
    )
    keep: int = _option(3, "Checkpoints to keep, besides the best.", group="Run directory")
    backup_to: str | None = _option(
        None,
        "Copy each checkpoint that verifies to this folder too, in the background; a run whose own are lost "
        "goes on from there.",
        group="Run directory",
    )
    log_every: int = _option(50, "Steps between two log records.", group="Run directory")
    profile: int = _option(0, "Profile this many steps with torch.profiler.", group="Run directory")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            _check_type(f.name, getattr(self, f.name), _hints()[f.name])
        for name in ("accumulate", "keep", "log_every"):
            _at_least(name, getattr(self, name), 1)
        for name in ("shards", "global_batch_size", "epochs", "max_steps", "threads"):
            value = getattr(self, name)
            if isinstance(value, int):
                _at_least(name, value, 1)
        for name in ("profile", "workers", "max_restarts", "spares", "verify_every"):
            value = getattr(self, name)
            if isinstance(value, int):
                _at_least(name, value, 0)
        if not 0.2 <= self.heartbeat <= 3600:
            raise ConfigError(f"--heartbeat must be from 0.2 to 3600 seconds, but is {self.heartbeat:g}.")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"{flag('seed')} must be between 0 and 2**63 - 1, but is {self.seed}.")
        for name, low, high in (("val_fraction", 0.0, 1.0), ("ema", 0.0, 1.0)):
            value = getattr(self, name)
            if value is not None and not low < value < high:
                raise ConfigError(f"{flag(name)} must be between {low:g} and {high:g}, but is {value}.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"--clip-norm must be positive, but is {self.clip_norm}.")
        if self.epochs is not None and self.max_steps is not None:
            raise ConfigError("give --epochs or --max-steps, not both.")
        if self.reduction == "torch" and self.strategy == "single":
            raise ConfigError("--reduction torch is DistributedDataParallel; it needs --strategy ddp.")
        if self.reduction == "torch" and self.verify_every:
            raise ConfigError(
                "--verify-every needs --reduction exact or fast: DistributedDataParallel adds up a rank's "
                "shards before they can be compared."
            )
        most_nodes = parse_nodes(self.nodes)[1]
        if most_nodes > 1 and self.rdzv_endpoint is None and self.on in ("spawn", "torchrun"):
            raise ConfigError("--nodes above 1 needs --rdzv-endpoint HOST:PORT, the address of machine 0.")
        if self.node_rank is not None and not 0 <= self.node_rank < most_nodes:
            raise ConfigError(f"--node-rank must be between 0 and {most_nodes - 1}, but is {self.node_rank}.")
        parse_nproc(self.nproc)
        parse_duration_s(self.init_timeout, "init_timeout")
        if self.walltime is not None:
            parse_duration_s(self.walltime, "walltime")
        parse_hang_timeout(self.hang_timeout)
        parse_shuffle(self.shuffle)
        parse_interval(self.eval_every, "eval_every", allow_time=False)
        for text in self.checkpoint_every:
            parse_interval(text, "checkpoint_every")
        if self.early_stop is not None:
            parse_early_stop(self.early_stop)
            if parse_interval(self.eval_every, "eval_every") == Interval():
                raise ConfigError("--early-stop needs evaluations, but --eval-every is never.")
        if self.best is not None:
            parse_best(self.best)


def flag(name: str) -> str:
    """The command-line spelling of a field."""
    return "--" + name.replace("_", "-")


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{flag(name)} must be at least {low}, but is {value}.")


_HINTS: dict[str, Any] = {}
_IN_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _hints() -> dict[str, Any]:
    if not _HINTS:
        _HINTS.update(typing.get_type_hints(RunConfig))
    return _HINTS


def _check_type(name: str, value: Any, hint: Any) -> None:
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for option in options:
        if typing.get_origin(option) is Literal:
            if value in typing.get_args(option):
                return
        elif typing.get_origin(option) is tuple:
            if isinstance(value, tuple) and all(isinstance(v, str) for v in value):
                return
        elif isinstance(value, bool):
            if option is bool:
                return
        elif isinstance(value, int | float if option is float else option):
            return
    wanted: list[str] = []
    for option in options:
        if typing.get_origin(option) is Literal:
            wanted += [str(choice) for choice in typing.get_args(option)]
        elif option is not type(None):
            wanted.append(_IN_WORDS.get(option, str(option)))
    choices = " or ".join([", ".join(wanted[:-1]), wanted[-1]] if wanted[:-1] else wanted)
    raise ConfigError(f"{flag(name)} must be {choices}, but is {value!r}.")


def config_from_mapping(values: Mapping[str, Any], source: str) -> RunConfig:
    """Build a configuration from TOML or keyword values.

    Raises:
        ConfigError: an unknown key (with the nearest ones) or a value that cannot work.
    """
    return RunConfig(**checked_keys(values, source))


def checked_keys(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Refuse keys that are no option, and turn lists, and lone texts where a list is meant, into tuples."""
    import difflib

    known = [f.name for f in dataclasses.fields(RunConfig)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=3)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"The options: {', '.join(known)}."
            raise ConfigError(f"{source}: there is no option {key!r}. {hint}")
    several = {f.name for f in dataclasses.fields(RunConfig) if isinstance(f.default, tuple)}
    return {
        key: tuple(value)
        if isinstance(value, list)
        else (value,)
        if key in several and isinstance(value, str)
        else value
        for key, value in values.items()
    }


def read_config_file(path: Path) -> dict[str, Any]:
    """The options in a TOML file: its ``[config]`` table, or its top level where there is none.

    Raises:
        ConfigError: the file is missing, is not TOML, or holds an unknown option.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: there is no such file.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    return checked_keys(document.get("config", document), str(path))


def non_defaults(config: RunConfig) -> dict[str, Any]:
    """The options that differ from their defaults, in the order of the fields."""
    return {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(config)
        if getattr(config, f.name) != f.default
    }


@dataclass(frozen=True)
class Interval:
    """How often something is due: exactly one of the three is set; none means never."""

    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None


_UNITS_S = {"s": 1, "sec": 1, "min": 60, "h": 3600}


def parse_duration_s(text: str, name: str) -> float:
    """Seconds of "90s", "5min" or "2h".

    Raises:
        ConfigError: the text is not a duration.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|sec|min|h)", text.strip())
    if not match or float(match[1]) <= 0:
        raise ConfigError(f"{flag(name)} must be a duration such as 90s, 5min or 2h, but is {text!r}.")
    return float(match[1]) * _UNITS_S[match[2]]


def parse_hang_timeout(text: str) -> float | None:
    """Seconds that a step may take; None for "auto", infinite for "never".

    Raises:
        ConfigError: the text is none of these, and no duration.
    """
    if text == "auto":
        return None
    if text == "never":
        return math.inf
    try:
        return parse_duration_s(text, "hang_timeout")
    except ConfigError:
        raise ConfigError(
            f"--hang-timeout must be auto, never or a duration such as 90s, 5min or 2h, but is {text!r}."
        ) from None


def parse_interval(text: str, name: str, *, allow_time: bool = True) -> Interval:
    """Parse "50steps", "1epoch", "5min" or "never".

    Raises:
        ConfigError: the text is none of these.
    """
    text = text.strip()
    if text == "never":
        return Interval()
    match = re.fullmatch(r"(\d+)\s*(steps?|epochs?)", text)
    if match and int(match[1]) > 0:
        return (
            Interval(steps=int(match[1])) if match[2].startswith("step") else Interval(epochs=int(match[1]))
        )
    if allow_time:
        try:
            return Interval(seconds=parse_duration_s(text, name))
        except ConfigError:
            pass
    times = ", 5min" if allow_time else ""
    raise ConfigError(f"{flag(name)} must be such as 50steps, 1epoch{times} or never, but is {text!r}.")


def parse_nodes(value: int | str) -> tuple[int, int]:
    """The least and the greatest number of machines of 2, "2" or "1:4".

    Raises:
        ConfigError: it is none of these.
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", str(value).strip())
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise ConfigError(f"--nodes must be at least 1, or MIN:MAX such as 1:4, but is {value}.")
    return least, most


def parse_nproc(value: int | str) -> tuple[int, ...] | None:
    """The processes of one machine, or of each, of 2, "2" or "8,4"; None for "auto".

    Raises:
        ConfigError: it is none of these.
    """
    if value == "auto":
        return None
    if isinstance(value, str) and not re.fullmatch(r"\d+(,\d+)*", value.strip()):
        raise ConfigError(f"--nproc must be a whole number, auto, or a list such as 8,4, but is {value!r}.")
    counts = tuple(int(word) for word in str(value).split(","))
    for count in counts:
        _at_least("nproc", count, 1)
    return counts


@dataclass(frozen=True)
class Shuffle:
    """How an epoch is ordered: by samples (``block`` 1), by blocks of neighbours, or not at all (0)."""

    block: int = 1


def parse_shuffle(text: str) -> Shuffle:
    """Parse "sample", "block:N" or "none".

    Raises:
        ConfigError: the text is none of these.
    """
    if text == "sample":
        return Shuffle(block=1)
    if text == "none":
        return Shuffle(block=0)
    match = re.fullmatch(r"block:(\d+)", text)
    if match and int(match[1]) > 0:
        return Shuffle(block=int(match[1]))
    raise ConfigError(f"--shuffle must be sample, block:N or none, but is {text!r}.")


def parse_early_stop(text: str) -> tuple[str, int]:
    """Metric name and patience (evaluations) of "METRIC:PATIENCE".

    Raises:
        ConfigError: the text has another form.
    """
    metric, _, patience = text.rpartition(":")
    if not metric or not patience.isdigit() or int(patience) < 1:
        raise ConfigError(f"--early-stop must be METRIC:PATIENCE, such as loss:3, but is {text!r}.")
    return metric, int(patience)


def parse_best(text: str) -> tuple[str, Literal["min", "max"]]:
    """Metric name and direction of "METRIC:min" or "METRIC:max".

    Raises:
        ConfigError: the text has another form.
    """
    metric, _, direction = text.rpartition(":")
    if metric and direction == "min":
        return metric, "min"
    if metric and direction == "max":
        return metric, "max"
    raise ConfigError(f"--best must be METRIC:min or METRIC:max, such as accuracy:max, but is {text!r}.")
