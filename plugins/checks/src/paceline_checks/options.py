"""Options of checks during a training: of the machines, and of the task."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from paceline.core.errors import ConfigError
from paceline.core.options import Changes, OptionGroup, option

if TYPE_CHECKING:
    from paceline.core.config import RunConfig

_check_option = partial(option, group="Recovery", bits="never", scope="recovery")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class CheckOptions(OptionGroup):
    """Options of the checks that a run makes while it trains."""

    acts_by_default = True

    sdc_check_every: int = _check_option(
        0,
        "Every N steps, compute one micro-batch's gradient on a second rank too and compare the bits; name and "
        "remove a rank that differs. 0: never.",
        resume="kept",
        needs="corruption",
        minimum=0,
    )
    purity: Literal["error", "warn", "off"] = _check_option(
        "error",
        "Check that the task computes the same on any number of processes and after a restart. error: stop before "
        "the first checkpoint if it does not, later warn.",
        resume="adjustable",
    )

    def changes(self, config: RunConfig) -> Changes:
        """The purity guard is there also where it is off, and records that."""
        hooks = ["paceline_checks.purity:PurityGuard"]
        if self.sdc_check_every:
            hooks.append("paceline_checks.silent_corruption:SilentCorruptionGuard")
        return Changes(hooks=tuple(hooks), whole_loss=("--sdc-check-every",) if self.sdc_check_every else ())

    def check(self, config: RunConfig) -> None:
        """Reject a reduction that adds up micro-batches before they can be compared."""
        if self.sdc_check_every and config.reducer not in ("exact", "allreduce"):
            raise ConfigError(
                f"--sdc-check-every needs --reduction exact or allreduce: {config.reducer_name} adds up a rank's "
                "micro-batches before they can be compared."
            )
