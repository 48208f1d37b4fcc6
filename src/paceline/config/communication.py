"""How much data-parallel ranks tell each other: compressed gradients, or parameters now and then."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from paceline.config.options import Capability, Requirement, flag, option
from paceline.config.recovery import RecoveryOptions
from paceline.errors import ConfigError

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
"""What Douillard et al. found best for DiLoCo's outer optimizer."""

_NOT_WHILE_APART: tuple[Capability, ...] = ("ema", "corruption", "spares")
"""What ranks cannot do between two synchronisations."""

_NESTEROV = Requirement(
    "outer_optimizer",
    "nesterov",
    message="--outer-lr and --outer-momentum need --outer-optimizer nesterov.",
)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class CommunicationOptions(RecoveryOptions):
    """What crosses a network that is slower than the processors."""

    sync_every: int = option(
        0,
        "Local SGD: train independently, and average the weights every N steps. 0: sum the gradients in "
        "every step.",
        group="Local SGD and compression",
        resume="adjustable",
        bits="always",
        scope="parallel",
        minimum=0,
    )
    outer_optimizer: Literal["none", "nesterov"] = option(
        "none",
        "With --sync-every: how to apply the averaged change of the weights. none: use the average; "
        "nesterov: SGD with Nesterov momentum (DiLoCo).",
        group="Local SGD and compression",
        resume="adjustable",
        bits="always",
        scope="parallel",
        requires=Requirement(
            "sync_every",
            message="--outer-optimizer {own} steps when weights are averaged. Say how often with "
            "--sync-every, such as --sync-every 50.",
        ),
    )
    outer_lr: float = option(
        OUTER_LR,
        "Learning rate of --outer-optimizer.",
        group="Local SGD and compression",
        resume="adjustable",
        bits="always",
        scope="parallel",
        requires=_NESTEROV,
        minimum=0,
        maximum=math.inf,
        exclusive=True,
    )
    outer_momentum: float = option(
        OUTER_MOMENTUM,
        "Momentum of --outer-optimizer.",
        group="Local SGD and compression",
        resume="adjustable",
        bits="always",
        scope="parallel",
        requires=_NESTEROV,
        minimum=0,
        maximum=1,
        exclusive=True,
    )
    comm_hook: Literal["none", "fp16", "bf16", "powersgd"] = option(
        "none",
        "How DistributedDataParallel compresses gradients: to fp16, to bf16, or to low-rank matrices "
        "(powersgd).",
        group="Local SGD and compression",
        resume="adjustable",
        bits="always",
        scope="parallel",
    )
    powersgd_rank: int = option(
        1,
        "Rank of PowerSGD's matrices: the higher, the nearer to the gradient.",
        group="Local SGD and compression",
        resume="adjustable",
        bits="always",
        scope="parallel",
        requires=Requirement("comm_hook", "powersgd"),
        minimum=1,
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
        for name, nothing in (("sync_every", 0), ("comm_hook", "none")):
            value = getattr(self, name)
            if value != nothing and methods != ("ddp",):
                raise ConfigError(
                    f"{flag(name)} {value} works with --strategy ddp only, not with {', '.join(methods)}. "
                    f"Leave one of them out, or give {flag(name)} {nothing}."
                )
        if self.sync_every:
            self._check_apart(reduction)
        if self.comm_hook != "none":
            self._check_hook(reduction, precision)

    def _check_apart(self, reduction: str) -> None:
        if reduction != "exact":
            raise ConfigError(
                f"--reduction {reduction} does not work with --sync-every: no gradients are summed over the "
                "processes. Leave one of them out."
            )
        for f in dataclasses.fields(self):
            needs = f.metadata["classification"].needs
            if needs in _NOT_WHILE_APART and getattr(self, f.name) != f.default:
                raise ConfigError(
                    f"{flag(f.name)} does not work with --sync-every, between whose synchronisations weights "
                    "differ. Leave one of them out."
                )

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
        if self.comm_hook == "powersgd" and precision == "fp16":
            raise ConfigError(
                "--comm-hook powersgd does not work with --precision fp16: what one overflowed step leaves "
                "in its error feedback would stay in all later ones. Use --precision bf16."
            )
