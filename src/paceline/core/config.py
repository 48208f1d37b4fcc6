"""All options of a run: one frozen object, read from the command line, a file, or a run's record."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from paceline.core.built_in import BUILT_IN
from paceline.core.errors import ConfigError
from paceline.core.files import check_path, parse_toml
from paceline.core.fine_tuning_config import FineTuningOptions
from paceline.core.options import (
    Requirement,
    check_bounds,
    check_type,
    flag,
    option,
    parse_best,
    parse_early_stop,
    parse_interval,
    parse_shuffle,
)
from paceline.core.plugins import all_names, plugin_names

# --- The configuration of a run: its fields, with those of its base classes, are the options of every entry point ---
#
# ``paceline train --global-batch-size 96``, ``paceline.fit(task, global_batch_size=96)`` and
# ``global_batch_size = 96`` in a ``run.toml`` are the same field. ``--help`` shows the help
# texts of the fields.

_training_option = partial(option, group="Training", resume="fixed", bits="always", scope="training")
_data_option = partial(option, group="Data", resume="fixed", bits="always", scope="data")
_evaluation_option = partial(option, group="Evaluation", resume="fixed", bits="always", scope="evaluation")
_record_option = partial(option, group="Run directory and checkpoints", resume="kept", bits="never", scope="records")


@dataclass(frozen=True, kw_only=True)
class RunConfig(FineTuningOptions):
    """All options of a training run; ``None`` means "the task's default, else Paceline's"."""

    global_batch_size: int | None = _training_option(
        None, "Samples per step, over all processes.", minimum=1, fingerprint=True, evaluation=True
    )
    epochs: int | None = _training_option(
        None, "Passes over the training data.", replaces="max_steps", minimum=1, evaluation=True
    )
    max_steps: int | None = _training_option(
        None,
        "Stop after this many steps, instead of --epochs.",
        replaces="epochs",
        minimum=1,
        evaluation=True,
    )
    seed: int = _training_option(
        0,
        "Seed of the data order, the initial weights and all other randomness.",
        minimum=0,
        maximum=2**63 - 1,
        evaluation=True,
    )
    precision: Literal["fp32", "bf16", "fp16"] = _training_option(
        "fp32", "Mixed precision by torch.amp: bf16 or fp16.", fingerprint=True, evaluation=True
    )
    clip_norm: float | None = _training_option(
        None, "Clip the gradient's 2-norm to this value.", minimum=0, exclusive=True
    )
    ema: float | None = _training_option(
        None,
        "Keep and evaluate an exponential moving average of the weights, with this decay.",
        needs="ema",
        minimum=0,
        maximum=1,
        exclusive=True,
    )
    compile: bool = _training_option(False, "Compile the model with torch.compile.", needs="compile", fingerprint=True)

    shuffle: str = _data_option("sample", "sample, window:N (blocks of N neighbours) or none.")
    num_workers: int | Literal["auto"] = option(
        "auto",
        "Data-loading processes per rank. auto: 0 for tensors, else up to 4.",
        group="Data",
        resume="kept",
        bits="never",
        scope="process",
        minimum=0,
    )
    val_fraction: float | None = _data_option(
        None,
        "Hold out this fraction of the training data for validation.",
        minimum=0,
        maximum=1,
        exclusive=True,
        evaluation=True,
    )

    eval_every: str = _evaluation_option("1epoch", "Evaluate every Nsteps or Nepochs, or never.", evaluation=True)
    early_stop: str | None = _evaluation_option(
        None,
        "METRIC:PATIENCE or METRIC:min:PATIENCE. Stop after PATIENCE evaluations without a better METRIC. Default: "
        "higher is better, unless its name ends in loss or --best-metric says min.",
        requires=Requirement(
            "eval_every",
            other_than="never",
            message="--early-stop needs evaluations, but --eval-every is {value}.",
        ),
    )
    best_metric: str | None = _evaluation_option(
        None, "METRIC:min or METRIC:max, to select the best checkpoint.", evaluation=True
    )

    run_dir: str | None = option(
        None,
        "The run's directory. Default: runs/TASK-TIME.",
        group="Run directory and checkpoints",
        resume="fresh",
        bits="never",
        scope="place",
        from_launcher=True,
    )
    resume: Literal["auto", "never", "must"] = option(
        "auto",
        "auto: continue an existing run; never: refuse one; must: require one.",
        group="Run directory and checkpoints",
        resume="fresh",
        bits="never",
        scope="place",
    )
    checkpoint_every: tuple[str, ...] = _record_option(
        ("1epoch",), "Save every Nsteps, Nepochs or time such as 5min; may be repeated. never: only at the end."
    )
    keep_checkpoints: int = _record_option(3, "Checkpoints to keep, besides the best.", minimum=1)
    backup_to: str | None = _record_option(
        None,
        "Also copy each verified checkpoint to this directory, in the background. A run that has lost its own "
        "checkpoints resumes from there.",
    )
    log_every: int = _record_option(50, "Steps between two log records.", minimum=1)
    log_to: tuple[str, ...] = _record_option(
        (),
        "Also log to mlflow or wandb, besides TensorBoard; may be repeated. wandb is offline unless WANDB_MODE is set.",
    )
    profile: int = option(
        0,
        "Profile this many steps with torch.profiler.",
        group="Run directory and checkpoints",
        resume="fresh",
        bits="never",
        scope="records",
        needs="lockstep",
        minimum=0,
    )

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            check_type(f.name, getattr(self, f.name), _hints()[f.name])
            check_bounds(f.name, getattr(self, f.name), f.metadata["classification"])
        for name in ("run_dir", "backup_to", "init_from"):
            if (path := getattr(self, name)) is not None:
                check_path(path, flag(name))
        self._check_replaced()
        super().__post_init__()
        self._check_requirements()
        self.check_communication(self.strategies, self.reduction, self.precision)
        self.check_memory(self.precision, compiles=self.compile)
        self.check_servers(self.strategies, self.precision, self.clip_norm)
        parse_shuffle(self.shuffle)
        parse_interval(self.eval_every, "eval_every", allow_time=False)
        for text in self.checkpoint_every:
            parse_interval(text, "checkpoint_every")
        if self.early_stop is not None:
            parse_early_stop(self.early_stop)
        if self.best_metric is not None:
            parse_best(self.best_metric)
        for name in self.log_to:
            if name not in BUILT_IN["paceline.trackers"] and name not in plugin_names("paceline.trackers"):
                raise ConfigError(
                    f"--log-to must be {' or '.join(all_names('paceline.trackers'))}, but is {name!r}. TensorBoard "
                    "files are always written."
                )

    def _check_replaced(self) -> None:
        for f in dataclasses.fields(self):
            other = f.metadata["classification"].replaces
            if other is not None and None not in (getattr(self, f.name), getattr(self, other)):
                raise ConfigError(f"give {flag(f.name)} or {flag(other)}, not both.")

    def _check_requirements(self) -> None:
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for f in dataclasses.fields(self):
            requires: Requirement | None = f.metadata["classification"].requires
            own = getattr(self, f.name)
            if requires is None or own == f.default:
                continue
            value = getattr(self, requires.option)
            if requires.is_met(value, defaults[requires.option]):
                continue
            if requires.message is not None:
                raise ConfigError(requires.message.format(flag=flag(f.name), own=own, value=value))
            hint = _hints()[requires.option]
            choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
            works = [choice for choice in choices if requires.is_met(choice, defaults[requires.option])]
            what = " ".join([flag(requires.option), " or ".join(map(str, works))]).rstrip()
            raise ConfigError(f"{flag(f.name)} needs {what}. Give both, or leave {flag(f.name)} out.")


@functools.cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(RunConfig)


# --- Configurations from TOML and from keywords ---


def config_from_mapping(values: Mapping[str, Any], source: str) -> RunConfig:
    """Build a configuration from TOML or keyword values.

    Raises:
        ConfigError: an unknown key (with the nearest ones) or a value that cannot work.
    """
    return RunConfig(**check_keys(values, source))


def check_keys(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Reject unknown options, and convert lists, and single strings of list options, to tuples."""
    import difflib

    known = [f.name for f in dataclasses.fields(RunConfig)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=3)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"The options are: {', '.join(known)}."
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
    """Return the options in a TOML file: its ``[config]`` table, or its top level without one.

    Raises:
        ConfigError: the file is missing, is not TOML, or contains an unknown option.
    """
    try:
        document = parse_toml(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: there is no such file.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    options = document.get("config", document)
    if not isinstance(options, dict):
        raise ConfigError(f"--config {path}: config must be a table of options.")
    return check_keys(options, str(path))


def non_defaults(config: RunConfig) -> dict[str, Any]:
    """Return the options that differ from their defaults, in the order of the fields."""
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if getattr(config, f.name) != f.default}


def to_flags(values: Mapping[str, Any], *, leave_out: Collection[str] = ()) -> list[str]:
    """Return the command-line words that set these options.

    Args:
        values: the options, such as those of :func:`non_defaults`.
        leave_out: the names of options to skip.
    """
    words = []
    for name, value in values.items():
        if name in leave_out:
            continue
        if isinstance(value, bool):
            words.append(flag(name))
            continue
        for item in value if isinstance(value, tuple) else (value,):
            words += [flag(name), str(item)]
    return words
