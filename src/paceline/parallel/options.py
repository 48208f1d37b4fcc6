"""The options of our strategies, and of memory against recomputation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from paceline.core.built_in import PARTS
from paceline.core.errors import ConfigError
from paceline.core.options import Changes, OptionGroup, Requirement, option

if TYPE_CHECKING:
    from paceline.core.config import RunConfig

_fsdp_option = partial(option, group="FSDP", strategies=("fsdp",), resume="kept", bits="never", scope="parallel")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class FsdpOptions(OptionGroup):
    """Options of ``--strategy fsdp``."""

    fsdp_wrap: str = _fsdp_option(
        "auto",
        "With --strategy fsdp: which modules to gather as one: class names with commas, a minimum number "
        "of parameters, or whole. auto: 1M, and no part of a block.",
    )
    fsdp_reshard: Literal["auto", "always", "never"] = _fsdp_option(
        "auto",
        "With --strategy fsdp: when to free gathered parameters. auto: after each block's forward, the "
        "outermost's after backward; always: after every forward; never: once per step, as ZeRO-2.",
    )
    fsdp_offload: bool = _fsdp_option(
        False, "With --strategy fsdp: keep parameters, gradients and optimizer state in CPU memory."
    )
    fsdp_mixed_precision: bool = option(
        False,
        "With --strategy fsdp: gather linear and convolutional layers in --precision's type, with half the "
        "traffic and memory.",
        group="FSDP",
        strategies=("fsdp",),
        resume="kept",
        bits="by_strategy",
        scope="parallel",
        requires=Requirement("precision"),
    )

    def check(self, config: RunConfig) -> None:
        """Reject what the gradient scaler cannot do."""
        if self.fsdp_offload and config.training.precision == "fp16":
            raise ConfigError(
                "--fsdp-offload leaves gradients on the CPU, where the gradient scaler of --precision fp16 "
                "does not look. Use --precision bf16."
            )


_memory_option = partial(option, group="Memory", resume="kept", bits="never", scope="parallel")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class MemoryOptions(OptionGroup):
    """Options that trade memory for time."""

    checkpoint_activations: Literal["none", "block", "selective"] = _memory_option(
        "none",
        "What backward recomputes instead of keeping. block: all inside a block; selective: all but the "
        "results of matrix products, convolutions and attention.",
        needs="recompute",
    )
    checkpoint_blocks: str = _memory_option(
        "auto",
        "With --checkpoint-activations: the blocks: class names with commas, or a minimum number of "
        "parameters such as 1M. auto: the modules that the model repeats in a list.",
        needs="recompute",
        requires=Requirement("checkpoint_activations"),
    )

    def check(self, config: RunConfig) -> None:
        """Reject what has no effect with ``--compile``."""
        if self.checkpoint_activations != "none" and config.training.compile:
            raise ConfigError(
                "--checkpoint-activations does not work with --compile, which chooses itself what backward "
                "recomputes. Leave one of them out."
            )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class TensorOptions(OptionGroup):
    """Options of ``--strategy tp``."""

    sequence_parallel: bool = option(
        False,
        "With --strategy tp: also split the layers in between (norms, dropouts) along the sequence, by the "
        "task's sequence_parallel_plan.",
        group="Tensor",
        strategies=("tp",),
        resume="kept",
        bits="never",
        scope="parallel",
    )


Schedule = Literal["sequential", "gpipe", "1f1b", "interleaved", "zero-bubble", "pipedream"]


Split = tuple[int, ...] | Literal["balanced", "equal"]
"""Blocks of each stage, or how they are chosen."""


def parse_split(text: str) -> Split:
    """Parse "balanced", "equal" or blocks per stage such as "3,5".

    Raises:
        ConfigError: the text has another form.
    """
    if text == "balanced":
        return "balanced"
    if text == "equal":
        return "equal"
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ConfigError(
            f"--pp-split must be balanced, equal, or a number of blocks for each stage such as 3,5, but is {text!r}."
        )
    return tuple(map(int, text.split(",")))


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class PipelineOptions(OptionGroup):
    """Options of ``--strategy pp``."""

    acts_by_default = True

    pp_schedule: Schedule = option(
        "1f1b",
        "With --strategy pp: the order of forwards and backwards. sequential: one micro-batch at a time, as plain "
        "model parallelism; interleaved: two stages per process; "
        "zero-bubble: weight gradients fill the gaps; pipedream: no waiting between steps, and some micro-batches "
        "use weights that are one update old.",
        group="Pipeline",
        strategies=("pp",),
        resume="kept",
        bits="by_strategy",
        scope="parallel",
    )
    pp_split: Split = option(
        "balanced",
        "With --strategy pp: how to cut the model. balanced: by its blocks' measured time and memory, with pipedream "
        "as equal; equal: by their number; or blocks per stage, such as 3,5.",
        parse=parse_split,
        group="Pipeline",
        strategies=("pp",),
        resume="kept",
        bits="by_strategy",
        scope="parallel",
    )

    def changes(self, config: RunConfig) -> Changes:
        """PipeDream is a strategy of its own."""
        return Changes(strategy=PARTS["--pp-schedule pipedream"] if self.pp_schedule == "pipedream" else None)

    def check(self, config: RunConfig) -> None:
        """Reject axes that a pipeline does not work with, and with PipeDream what waits for all stages' gradients."""
        if "pp" not in config.parallel.strategies:
            return
        other_axes = [axis for axis in config.parallel.mesh or () if axis not in ("pp", "dp", "tp")]
        if other_axes:
            raise ConfigError(
                f"--mesh {config.values['mesh']}: pp can be combined with dp and tp, not with "
                f"{other_axes[0]}. Use --mesh pp=...,dp=...,tp=...."
            )
        if self.pp_schedule != "pipedream":
            return
        if "tp" in config.parallel.strategies:
            raise ConfigError(
                f"--mesh {config.values['mesh']}: --pp-schedule pipedream keeps full weights of each update, and tp "
                "splits them. Use --pp-schedule 1f1b, or leave tp out."
            )
        training = config.training
        if training.clip_norm is not None:
            raise ConfigError(_waits(f"--clip-norm {training.clip_norm}", "--pp-schedule 1f1b"))
        if training.precision == "fp16":
            raise ConfigError(_waits("--precision fp16", "--pp-schedule 1f1b or --precision bf16"))


def _waits(given: str, instead: str) -> str:
    return (
        f"{given} needs all stages' gradients before one is updated, and --pp-schedule pipedream does not wait for "
        f"them. Use {instead}."
    )
