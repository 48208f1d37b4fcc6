"""The evaluations that a run makes while it trains, and what follows from them."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.distributed.world import World
from paceline.monitoring.monitor import Monitor
from paceline.training.judge import Judge
from paceline.training.run import Run
from paceline.training.state import TrainingState


class Validation:
    """On the validation split.

    Args:
        run: what is trained.
    """

    def __init__(self, run: Run) -> None:
        self._deadline = run.deadline
        self._evaluator = run.build_evaluator("val")
        self._judge = Judge(run.config)

    @property
    def exists(self) -> bool:
        """Whether the task has a validation split."""
        return self._evaluator is not None

    def run(self, world: World, state: TrainingState, monitor: Monitor, stop: Callable[[], int]) -> bool:
        """Evaluate, and have plateau schedules, early stop and the best model follow.

        Args:
            world: all its ranks evaluate together.
            state: makes one transition.
            monitor: told of the metrics.
            stop: what asks for a stop, as in the control word.

        Returns:
            Whether the model is the best so far.

        Raises:
            EvaluationStopped: somebody asked for a stop; nothing has changed.
        """
        assert self._evaluator is not None
        monitor.activity("evaluating val")
        began = time.monotonic()
        try:
            metrics = self._evaluator.run(world, state.evaluated_module, stop)
        finally:
            self._deadline.evaluation_took(time.monotonic() - began)
        progress = state.progress
        progress.evaluated_step = progress.step
        progress.version += 1
        improved = self._judge.apply(metrics, progress)
        state.step_plateaus(self._judge.value(metrics))
        epoch = progress.epoch - 1 if progress.step_in_epoch == 0 else progress.epoch
        monitor.evaluated("val", progress.step, epoch, metrics)
        return improved

    def close(self) -> None:
        """Close the split."""
        if self._evaluator is not None:
            self._evaluator.close()
