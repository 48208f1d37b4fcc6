"""When something is due: pure functions of where a run stands."""

from __future__ import annotations

import dataclasses

from paceline.config import Interval, RunConfig, parse_interval
from paceline.training.plan import DataPlan
from paceline.training.rounds import Rounds
from paceline.training.state import Progress


class Schedule:
    """When a run's epochs, evaluations and the run itself end.

    Args:
        config: the run's options.
        data: how long it goes on.

    Attributes:
        rounds: evaluations happen at their ends only.
    """

    def __init__(self, config: RunConfig, data: DataPlan) -> None:
        self.rounds = Rounds(config.sync_every or 1, data.steps_per_epoch, data.total_steps)
        self._epochs = config.epochs or 0
        self._evaluate_every = parse_interval(config.eval_every, "eval_every", allow_time=False)
        self._total_steps = data.total_steps
        self._steps_per_epoch = data.steps_per_epoch

    def finished(self, progress: Progress) -> bool:
        """Whether no step is left."""
        if progress.stopped_early:
            return True
        total = self._total_steps
        return progress.step >= total if total is not None else progress.epoch >= self._epochs

    def epoch_ends(self, progress: Progress) -> bool:
        """Whether the last step was its epoch's last."""
        if progress.step_in_epoch == 0:
            return False
        steps = self._steps_per_epoch
        return progress.epoch_ended if steps is None else progress.step_in_epoch >= steps

    def evaluation_is_due(self, progress: Progress) -> bool:
        """Whether the model is to be evaluated now, once the epoch's end has been counted."""
        if progress.step == progress.evaluated_step:
            return False
        every = self._evaluate_every
        # A run may come from another strategy, in the middle of a round.
        since = max(self.rounds.begun(progress), progress.evaluated_step)
        return is_due(every, progress, since) or (self.finished(progress) and every != Interval())

    def evaluation_follows(self, progress: Progress, *, more: bool) -> bool:
        """Whether an evaluation will be due after the step under way.

        Args:
            progress: before that step.
            more: there is another step's data in this epoch (streams).
        """
        after = dataclasses.replace(
            progress,
            step=progress.step + 1,
            step_in_epoch=progress.step_in_epoch + 1,
            epoch_ended=not more,
        )
        if self.epoch_ends(after):
            after.epoch, after.step_in_epoch = after.epoch + 1, 0
        return self.evaluation_is_due(after)


def is_due(every: Interval, progress: Progress, since: int) -> bool:
    """Whether something that happens ``every`` so many steps or epochs became due after step ``since``."""
    if every.steps is not None:
        return progress.step // every.steps > since // every.steps
    return every.epochs is not None and progress.step_in_epoch == 0 and progress.epoch % every.epochs == 0
