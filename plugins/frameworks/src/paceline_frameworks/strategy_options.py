"""The option of ``--strategy deepspeed``, and what it and ``--strategy horovod`` can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.core.errors import ConfigError
from paceline.core.option_groups import ALL_CAPABILITIES, Traits
from paceline.core.options import OptionGroup, option

if TYPE_CHECKING:
    from paceline.core.config import RunConfig

DEEPSPEED = Traits(
    reductions=("exact",),
    own_reduction="deepspeed",
    shards_state=True,
    supports=frozenset({"ema", "lockstep"}),
)
HOROVOD = Traits(reductions=("exact",), own_reduction="horovod", supports=ALL_CAPABILITIES - {"spares"})


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class DeepSpeedOptions(OptionGroup):
    """Options of ``--strategy deepspeed``."""

    zero_stage: Literal[1, 2, 3] = option(
        1,
        "With --strategy deepspeed: the sharded state. 1: optimizer state; 2: and gradients; 3: and parameters.",
        group="DeepSpeed",
        strategies=("deepspeed",),
        resume="kept",
        bits="by_strategy",
        scope="parallel",
    )

    def check(self, config: RunConfig) -> None:
        if self.zero_stage == 3 and config.training.ema is not None:
            raise ConfigError(
                "--ema does not work with --zero-stage 3, where no rank holds a full parameter. "
                "Use --zero-stage 2, or --strategy fsdp."
            )
