"""When ranks that train apart come together: pure functions of where a run stands."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.training.state import Progress


@dataclass(frozen=True)
class Rounds:
    """The steps from one synchronisation to the next, after which all ranks hold the same state.

    A round has ``every`` steps, but ends with its epoch and with the run: what happens at an epoch's end
    needs no more synchronisations than there are.

    Attributes:
        every: steps in a round; 1 where gradients are summed in each step.
        steps_per_epoch: None for streams, whose rounds are single steps.
        total_steps: of the run; None where it ends by epochs of a stream.
    """

    every: int
    steps_per_epoch: int | None
    total_steps: int | None

    def ends(self, progress: Progress) -> bool:
        """Whether the last step was its round's last.

        Args:
            progress: after that step, before or after the epoch's end was counted.
        """
        done = progress.step_in_epoch
        return done % self.every == 0 or done == self.steps_per_epoch or progress.step == self.total_steps

    def begun(self, progress: Progress) -> int:
        """After which step the round began that ends at ``progress``."""
        done = progress.step_in_epoch or self.steps_per_epoch or 0
        return progress.step - (done % self.every or self.every)
