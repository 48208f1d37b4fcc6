"""When a step overlaps with the next one, for strategies that can: whenever all ranks just go on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from paceline.data.microbatch import Loader, MicroBatch
from paceline.strategies.base import Strategy
from paceline.training.control import Control
from paceline.training.schedule import Schedule
from paceline.training.state import Progress


class Lookahead:
    """Reads one step ahead, and decides where the ranks must have done a step before the next one begins.

    That is before an epoch's end, an evaluation, a save and the run's end, which follow from the progress
    alone, and in the step after one in which a rank asked for something: so all ranks decide alike.

    Args:
        schedule: when epochs, evaluations and the run end.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._read: tuple[int, list[MicroBatch]] | None = None
        self._asked = False
        self.overlapping = False
        """Whether the next step has begun within the one that was done last."""

    def fetch(self, loader: Loader, strategy: Strategy, progress: Progress) -> list[MicroBatch]:
        """The micro-batches of the step that comes now."""
        read, self._read = self._read, None
        if read is not None and read[0] == progress.step:
            return read[1]
        return loader.fetch(progress.epoch, progress.step_in_epoch, strategy.shards)

    def go_on(
        self, loader: Loader, strategy: Strategy, progress: Progress, save_is_due: Callable[[Progress], bool]
    ) -> None:
        """Have the step that was begun overlap with the next one, unless something comes in between."""
        after = dataclasses.replace(
            progress,
            version=progress.version + 1,
            step=progress.step + 1,
            step_in_epoch=progress.step_in_epoch + 1,
        )
        schedule = self._schedule
        self.overlapping = strategy.overlaps_steps and not (
            self._asked
            or schedule.finished(after)
            or schedule.epoch_ends(after)
            or schedule.evaluation_is_due(after)
            or save_is_due(after)
        )
        if self.overlapping:
            following = loader.fetch(after.epoch, after.step_in_epoch, strategy.shards)
            self._read = (after.step, following)
            strategy.go_on(following)

    def obeyed(self, word: Control) -> Control:
        """What of a control word is obeyed now: nothing while steps overlap, but soon."""
        if not self.overlapping:
            self._asked = False
            return word
        self._asked = bool(word.stop or word.save or word.reform)
        return Control()
