"""How much data-parallel ranks tell each other: compressed gradients, or parameters now and then."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from paceline.config.options import at_least, flag, option
from paceline.config.recovery import RecoveryOptions
from paceline.errors import ConfigError

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
"""What Douillard et al. found best for DiLoCo's outer optimizer."""

_APART_REFUSES = ("ema", "verify_every", "spares")
_NOT_WHILE_APART = "does not work with --sync-every, between whose synchronisations weights differ"


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class CommunicationOptions(RecoveryOptions):
    """What crosses a network that is slower than the processors."""

    sync_every: int = option(
        0,
        "Local SGD: every process trains on its own shards, and after so many steps their weights are "
        "averaged. 0: gradients are summed in every step.",
        group="Communication",
    )
    outer_optimizer: Literal["none", "nesterov"] = option(
        "none",
        "With --sync-every, what follows the averaged change of the weights. none: they become the average; "
        "nesterov: SGD with Nesterov momentum (DiLoCo).",
        group="Communication",
    )
    outer_lr: float = option(OUTER_LR, "Learning rate of --outer-optimizer.", group="Communication")
    outer_momentum: float = option(OUTER_MOMENTUM, "Momentum of --outer-optimizer.", group="Communication")
    comm_hook: Literal["none", "fp16", "bf16", "powersgd"] = option(
        "none",
        "How DistributedDataParallel sends gradients: as fp16 or bf16, or as products of thin matrices "
        "(powersgd). Needs no --reduction.",
        group="Communication",
    )
    powersgd_rank: int = option(
        1, "Columns of these matrices: more are nearer to the gradient.", group="Communication"
    )

    @property
    def rigid_communication(self) -> tuple[str, ...]:
        """The options among these under which no rank can come or go while others go on."""
        apart = (f"--sync-every {self.sync_every}",) if self.sync_every else ()
        return apart if self.comm_hook == "none" else (*apart, f"--comm-hook {self.comm_hook}")

    def check_communication(self, methods: tuple[str, ...], reduction: str, precision: str) -> None:
        """Refuse what does not go together.

        Args:
            methods: the strategies at work.
            reduction: as asked for.
            precision: of the training.

        Raises:
            ConfigError: says which option to leave out.
        """
        at_least("sync_every", self.sync_every, 0)
        at_least("powersgd_rank", self.powersgd_rank, 1)
        for name, nothing in (("sync_every", 0), ("comm_hook", "none")):
            value = getattr(self, name)
            if value != nothing and methods != ("ddp",):
                raise ConfigError(
                    f"{flag(name)} {value} works with --strategy ddp only, not with {', '.join(methods)}. "
                    f"Leave one of them out, or give {flag(name)} {nothing}."
                )
        if self.sync_every:
            self._check_apart(reduction)
        elif self.outer_optimizer != "none":
            raise ConfigError(
                f"--outer-optimizer {self.outer_optimizer} steps when weights are averaged. Say how often "
                "with --sync-every, such as --sync-every 50."
            )
        if self.outer_optimizer == "none" and (self.outer_lr, self.outer_momentum) != (
            OUTER_LR,
            OUTER_MOMENTUM,
        ):
            raise ConfigError("--outer-lr and --outer-momentum need --outer-optimizer nesterov.")
        if not (self.outer_lr > 0 and math.isfinite(self.outer_lr)):
            raise ConfigError(f"--outer-lr must be positive, but is {self.outer_lr:g}.")
        if not 0 < self.outer_momentum < 1:
            raise ConfigError(f"--outer-momentum must be between 0 and 1, but is {self.outer_momentum:g}.")
        if self.comm_hook != "none":
            self._check_hook(reduction, precision)
        elif self.powersgd_rank != 1:
            raise ConfigError("--powersgd-rank needs --comm-hook powersgd.")

    def _check_apart(self, reduction: str) -> None:
        if reduction != "exact":
            raise ConfigError(
                f"--reduction {reduction} does not work with --sync-every: no gradients are summed over the "
                "processes. Leave one of them out."
            )
        for name in _APART_REFUSES:
            if getattr(self, name):
                raise ConfigError(f"{flag(name)} {_NOT_WHILE_APART}. Leave one of them out.")

    def _check_hook(self, reduction: str, precision: str) -> None:
        if self.sync_every:
            raise ConfigError(
                f"--comm-hook {self.comm_hook} compresses gradients, and with --sync-every none are sent. "
                "Leave one of them out."
            )
        if reduction == "fast":
            raise ConfigError(
                f"--comm-hook {self.comm_hook} is DistributedDataParallel's; --reduction fast is not. Leave "
                "--reduction out."
            )
        if self.comm_hook != "powersgd" and self.powersgd_rank != 1:
            raise ConfigError("--powersgd-rank needs --comm-hook powersgd.")
        if self.comm_hook == "powersgd" and precision == "fp16":
            raise ConfigError(
                "--comm-hook powersgd does not work with --precision fp16: what one overflowed step leaves "
                "in its error feedback would stay in all later ones. Use --precision bf16."
            )
