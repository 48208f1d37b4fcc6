"""What a process keeps of the model, and what it computes or fetches again instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.config.communication import CommunicationOptions
from paceline.config.options import Requirement, option
from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class MemoryOptions(CommunicationOptions):
    """Memory against time."""

    fsdp_wrap: str = option(
        "auto",
        "With --strategy fsdp: which modules to gather as one: class names with commas, a minimum number "
        "of parameters (auto: 1M), or whole.",
        group="FSDP",
        strategies=("fsdp",),
        resume="kept",
        bits="never",
        scope="parallel",
    )
    fsdp_reshard: Literal["auto", "always", "never"] = option(
        "auto",
        "With --strategy fsdp: when to free gathered parameters. auto: after each block's forward, the "
        "outermost's after backward; always: after every forward; never: once per step, as ZeRO-2.",
        group="FSDP",
        strategies=("fsdp",),
        resume="kept",
        bits="never",
        scope="parallel",
    )
    fsdp_offload: bool = option(
        False,
        "With --strategy fsdp: keep parameters, gradients and optimizer state in CPU memory.",
        group="FSDP",
        strategies=("fsdp",),
        resume="kept",
        bits="never",
        scope="parallel",
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
    zero_stage: Literal[1, 2, 3] = option(
        1,
        "With --strategy deepspeed: what to shard. 1: optimizer state; 2: and gradients; 3: and parameters.",
        group="DeepSpeed",
        strategies=("deepspeed",),
        resume="kept",
        bits="by_strategy",
        scope="parallel",
    )
    checkpoint_activations: Literal["none", "block", "selective"] = option(
        "none",
        "What backward recomputes instead of keeping. block: all inside a block; selective: all but the "
        "results of matrix products, convolutions and attention.",
        group="Memory",
        resume="kept",
        bits="never",
        scope="parallel",
        needs="recompute",
    )
    checkpoint_blocks: str = option(
        "auto",
        "With --checkpoint-activations: what a block is: class names with commas, or a minimum number of "
        "parameters such as 1M. auto: the modules that the model repeats in a list.",
        group="Memory",
        resume="kept",
        bits="never",
        scope="parallel",
        needs="recompute",
        requires=Requirement("checkpoint_activations"),
    )

    def check_memory(self, precision: str, *, compiles: bool) -> None:
        """Refuse what has no effect or does not work together.

        Args:
            precision: the value of ``--precision``.
            compiles: ``--compile`` is given.

        Raises:
            ConfigError: says what to change.
        """
        if self.zero_stage == 3 and getattr(self, "ema", None) is not None:
            raise ConfigError(
                "--ema does not work with --zero-stage 3, where no rank holds a parameter whole. "
                "Use --zero-stage 2, or --strategy fsdp."
            )
        if self.fsdp_offload and precision == "fp16":
            raise ConfigError(
                "--fsdp-offload leaves gradients on the CPU, where the scaler of --precision fp16 does not "
                "find them. Use --precision bf16."
            )
        if self.checkpoint_activations != "none" and compiles:
            raise ConfigError(
                "--checkpoint-activations does not work with --compile, which decides itself what backward "
                "computes again. Leave one of them out."
            )
