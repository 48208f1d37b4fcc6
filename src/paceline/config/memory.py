"""What a process keeps of the model, and what it computes or fetches again instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.config.communication import CommunicationOptions
from paceline.config.options import option
from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class MemoryOptions(CommunicationOptions):
    """Memory against time."""

    fsdp_wrap: str = option(
        "auto",
        "With --strategy fsdp, which modules are gathered as one: class names with commas, a least number of "
        "parameters such as 1M (auto), or whole.",
        group="Parallelism",
        of=("fsdp",),
    )
    fsdp_reshard: Literal["auto", "always", "never"] = option(
        "auto",
        "With --strategy fsdp, when gathered parameters are freed: auto: after each block's forward, the "
        "outermost's after backward; always: after every forward; never: once a step, as ZeRO-2 does.",
        group="Parallelism",
        of=("fsdp",),
    )
    fsdp_offload: bool = option(
        False,
        "With --strategy fsdp, keep parameters, gradients and optimizer state in the CPU's memory.",
        group="Parallelism",
        of=("fsdp",),
    )
    fsdp_mixed_precision: bool = option(
        False,
        "With --strategy fsdp, gather the parameters of linear and convolutional layers in the type of "
        "--precision: half the traffic and memory.",
        group="Parallelism",
        of=("fsdp",),
    )
    zero_stage: Literal[1, 2, 3] = option(
        1,
        "With --strategy deepspeed, what is sharded. 1: the optimizer's state; 2: gradients, too; "
        "3: parameters, too.",
        group="Parallelism",
        of=("deepspeed",),
    )
    checkpoint_activations: Literal["none", "block", "selective"] = option(
        "none",
        "What backward computes again instead of keeping it. block: all inside a block; selective: all but "
        "the results of matrix products, convolutions and attention.",
        group="Parallelism",
    )
    checkpoint_blocks: str = option(
        "auto",
        "With --checkpoint-activations, what a block is: class names with commas, or a least number of "
        "parameters such as 1M. auto: the modules that the model repeats in a list.",
        group="Parallelism",
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
        if self.fsdp_mixed_precision and precision == "fp32":
            raise ConfigError("--fsdp-mixed-precision needs --precision bf16 or fp16.")
        if self.fsdp_offload and precision == "fp16":
            raise ConfigError(
                "--fsdp-offload leaves gradients on the CPU, where the scaler of --precision fp16 does not "
                "find them. Use --precision bf16."
            )
        if self.checkpoint_activations == "none":
            if self.checkpoint_blocks != "auto":
                raise ConfigError("--checkpoint-blocks needs --checkpoint-activations block or selective.")
            return
        if compiles:
            raise ConfigError(
                "--checkpoint-activations does not work with --compile, which decides itself what backward "
                "computes again. Leave one of them out."
            )
