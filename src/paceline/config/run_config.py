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
from paceline.config.options import at_least, check_type, flag, option
from paceline.config.values import Interval, parse_best, parse_early_stop, parse_interval, parse_shuffle
from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RunConfig(FineTuningOptions):
    """All options of a training run; ``None`` means "the task's default, else Paceline's"."""

    global_batch_size: int | None = option(None, "Samples a step, over all processes.", group="Training")
    epochs: int | None = option(None, "Passes over the training data.", group="Training")
    max_steps: int | None = option(None, "Stop after this many steps instead.", group="Training")
    seed: int = option(
        0, "Decides the data's order, the initial weights and all randomness.", group="Training"
    )
    precision: Literal["fp32", "bf16", "fp16"] = option(
        "fp32", "Mixed precision by torch.amp.", group="Training"
    )
    clip_norm: float | None = option(None, "Clip the gradient's 2-norm to this.", group="Training")
    ema: float | None = option(
        None,
        "Keep an exponential moving average of the weights with this decay, and evaluate it.",
        group="Training",
    )
    compile: bool = option(False, "Compile the model with torch.compile.", group="Training")

    shuffle: str = option("sample", "sample, block:N (blocks of N neighbours) or none.", group="Data")
    workers: int | Literal["auto"] = option(
        "auto", "Data-loading processes a rank. auto: 0 for tensors, else up to 4.", group="Data"
    )
    val_fraction: float | None = option(
        None, "Carve this fraction of train as the validation split.", group="Data"
    )

    eval_every: str = option("1epoch", "Evaluate every Nsteps or Nepochs, or never.", group="Evaluation")
    early_stop: str | None = option(
        None, "METRIC:PATIENCE; stop after PATIENCE evaluations without a better METRIC.", group="Evaluation"
    )
    best: str | None = option(
        None, "METRIC:min or METRIC:max, which decides the best model.", group="Evaluation"
    )

    run: str | None = option(None, "The run's directory. Default: runs/TASK-TIME.", group="Run directory")
    resume: Literal["auto", "never", "must"] = option(
        "auto", "auto: continue an existing run; never: refuse one; must: require one.", group="Run directory"
    )
    checkpoint_every: tuple[str, ...] = option(
        ("1epoch",),
        "Nsteps, Nmin (s, min, h) or Nepochs; may be repeated. never: only at the end.",
        group="Run directory",
    )
    keep: int = option(3, "Checkpoints to keep, besides the best.", group="Run directory")
    backup_to: str | None = option(
        None,
        "Copy each checkpoint that verifies to this folder too, in the background; a run whose own are lost "
        "goes on from there.",
        group="Run directory",
    )
    log_every: int = option(50, "Steps between two log records.", group="Run directory")
    log_to: tuple[str, ...] = option(
        (),
        "mlflow or wandb, besides TensorBoard; may be repeated. wandb is offline unless WANDB_MODE says "
        "otherwise.",
        group="Run directory",
    )
    profile: int = option(0, "Profile this many steps with torch.profiler.", group="Run directory")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            check_type(f.name, getattr(self, f.name), _hints()[f.name])
        for name in ("accumulate", "keep", "log_every"):
            at_least(name, getattr(self, name), 1)
        for name in ("shards", "global_batch_size", "epochs", "max_steps", "threads"):
            value = getattr(self, name)
            if isinstance(value, int):
                at_least(name, value, 1)
        for name in ("profile", "workers"):
            value = getattr(self, name)
            if isinstance(value, int):
                at_least(name, value, 0)
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
        super().__post_init__()
        self.check_communication(self.methods, self.reduction, self.precision)
        self.check_memory(self.precision, compiles=self.compile)
        self.check_servers(self.methods, self.precision, self.clip_norm)
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
        for name in self.log_to:
            if name not in ("mlflow", "wandb"):
                raise ConfigError(
                    f"--log-to must be mlflow or wandb, but is {name!r}. TensorBoard's files are "
                    "written in any case."
                )


@functools.cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(RunConfig)
