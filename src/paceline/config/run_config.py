"""The configuration of a run: one flat dataclass, whose fields are the options of every front door.

``paceline train --global-batch-size 96``, ``paceline.fit(task, global_batch_size=96)`` and
``global_batch_size = 96`` in a ``run.toml`` are the same field. The help texts live beside the
fields and feed ``--help``.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from dataclasses import dataclass
from typing import Any, Literal

from paceline.config.fine_tuning import FineTuningOptions
from paceline.config.options import Requirement, check_bounds, check_type, flag, option
from paceline.config.values import parse_best, parse_early_stop, parse_interval, parse_shuffle
from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RunConfig(FineTuningOptions):
    """All options of a training run; ``None`` means "the task's default, else Paceline's"."""

    global_batch_size: int | None = option(
        None,
        "Samples per step, over all processes.",
        group="Training",
        resume="fixed",
        bits="always",
        scope="training",
        minimum=1,
        fingerprint=True,
        evaluation=True,
        summary=True,
    )
    epochs: int | None = option(
        None,
        "Passes over the training data.",
        group="Training",
        resume="fixed",
        bits="always",
        scope="training",
        replaces="max_steps",
        minimum=1,
        evaluation=True,
        summary=True,
    )
    max_steps: int | None = option(
        None,
        "Stop after this many steps, instead of --epochs.",
        group="Training",
        resume="fixed",
        bits="always",
        scope="training",
        replaces="epochs",
        minimum=1,
        evaluation=True,
        summary=True,
    )
    seed: int = option(
        0,
        "Seed of the data order, the initial weights and all other randomness.",
        group="Training",
        resume="fixed",
        bits="always",
        scope="training",
        minimum=0,
        maximum=2**63 - 1,
        evaluation=True,
        summary=True,
    )
    precision: Literal["fp32", "bf16", "fp16"] = option(
        "fp32",
        "Mixed precision by torch.amp: bf16 or fp16.",
        group="Training",
        resume="fixed",
        bits="always",
        scope="training",
        fingerprint=True,
        evaluation=True,
        summary=True,
    )
    clip_norm: float | None = option(
        None,
        "Clip the gradient's 2-norm to this value.",
        group="Training",
        resume="fixed",
        bits="always",
        scope="training",
        minimum=0,
        exclusive=True,
    )
    ema: float | None = option(
        None,
        "Keep and evaluate an exponential moving average of the weights, with this decay.",
        group="Training",
        resume="fixed",
        bits="always",
        scope="training",
        needs="ema",
        minimum=0,
        maximum=1,
        exclusive=True,
    )
    compile: bool = option(
        False,
        "Compile the model with torch.compile.",
        group="Training",
        resume="fixed",
        bits="always",
        scope="training",
        needs="compile",
        fingerprint=True,
        summary=True,
    )

    shuffle: str = option(
        "sample",
        "sample, block:N (blocks of N neighbours) or none.",
        group="Data",
        resume="fixed",
        bits="always",
        scope="data",
    )
    workers: int | Literal["auto"] = option(
        "auto",
        "Data-loading processes per rank. auto: 0 for tensors, else up to 4.",
        group="Data",
        resume="kept",
        bits="never",
        scope="process",
        minimum=0,
    )
    val_fraction: float | None = option(
        None,
        "Hold out this fraction of the training data for validation.",
        group="Data",
        resume="fixed",
        bits="always",
        scope="data",
        minimum=0,
        maximum=1,
        exclusive=True,
        evaluation=True,
    )

    eval_every: str = option(
        "1epoch",
        "Evaluate every Nsteps or Nepochs, or never.",
        group="Evaluation",
        resume="fixed",
        bits="always",
        scope="evaluation",
        evaluation=True,
        summary=True,
    )
    early_stop: str | None = option(
        None,
        "METRIC:PATIENCE. Stop after PATIENCE evaluations without a better METRIC.",
        group="Evaluation",
        resume="fixed",
        bits="always",
        scope="evaluation",
        requires=Requirement(
            "eval_every",
            other_than="never",
            message="--early-stop needs evaluations, but --eval-every is {value}.",
        ),
        summary=True,
    )
    best: str | None = option(
        None,
        "METRIC:min or METRIC:max, to choose the best checkpoint by.",
        group="Evaluation",
        resume="fixed",
        bits="always",
        scope="evaluation",
        evaluation=True,
        summary=True,
    )

    run: str | None = option(
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
    checkpoint_every: tuple[str, ...] = option(
        ("1epoch",),
        "Save every Nsteps, Nepochs or time such as 5min; may be repeated. never: only at the end.",
        group="Run directory and checkpoints",
        resume="kept",
        bits="never",
        scope="records",
    )
    keep: int = option(
        3,
        "Checkpoints to keep, besides the best.",
        group="Run directory and checkpoints",
        resume="kept",
        bits="never",
        scope="records",
        minimum=1,
    )
    backup_to: str | None = option(
        None,
        "Also copy each verified checkpoint to this folder, in the background. A run that has lost its own "
        "checkpoints continues from there.",
        group="Run directory and checkpoints",
        resume="kept",
        bits="never",
        scope="records",
    )
    log_every: int = option(
        50,
        "Steps between two log records.",
        group="Run directory and checkpoints",
        resume="kept",
        bits="never",
        scope="records",
        minimum=1,
    )
    log_to: tuple[str, ...] = option(
        (),
        "Also log to mlflow or wandb, besides TensorBoard; may be repeated. wandb is offline unless "
        "WANDB_MODE says otherwise.",
        group="Run directory and checkpoints",
        resume="kept",
        bits="never",
        scope="records",
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
        self._check_replaced()
        super().__post_init__()
        self._check_requirements()
        self.check_communication(self.methods, self.reduction, self.precision)
        self.check_memory(self.precision, compiles=self.compile)
        self.check_servers(self.methods, self.precision, self.clip_norm)
        parse_shuffle(self.shuffle)
        parse_interval(self.eval_every, "eval_every", allow_time=False)
        for text in self.checkpoint_every:
            parse_interval(text, "checkpoint_every")
        if self.early_stop is not None:
            parse_early_stop(self.early_stop)
        if self.best is not None:
            parse_best(self.best)
        for name in self.log_to:
            if name not in ("mlflow", "wandb"):
                raise ConfigError(
                    f"--log-to must be mlflow or wandb, but is {name!r}. TensorBoard's files are "
                    "written in any case."
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
