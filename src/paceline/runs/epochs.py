"""The steps at which a run's epochs begin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class EpochSteps:
    """Where the epochs of a run begin: a fork may have other batches than the run from which it continues.

    Attributes:
        per_epoch: steps of an epoch, from ``first_epoch`` on.
        first_epoch, first_step: the epoch with which these batches began, and its first step.
    """

    per_epoch: int
    first_epoch: int = 0
    first_step: int = 0

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> Self | None:
        """Return those that ``run.toml`` records; None for streams."""
        data = manifest.get("data", {})
        steps = data.get("steps_per_epoch")
        return None if steps is None else cls(steps, data.get("first_epoch", 0), data.get("first_step", 0))

    def begin(self, epoch: int) -> int:
        """Return the steps before an epoch, which is not before ``first_epoch``."""
        return self.first_step + (epoch - self.first_epoch) * self.per_epoch

    def position(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and its number in that epoch, both from 0."""
        epochs, step_in_epoch = divmod(step - self.first_step, self.per_epoch)
        return self.first_epoch + epochs, step_in_epoch

    def number(self, total_steps: int | None) -> int | None:
        """Return the epochs that a run of so many steps begins; None if its length is unknown."""
        return self.position(total_steps - 1)[0] + 1 if total_steps else None
