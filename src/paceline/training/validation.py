"""The evaluations that a run makes while it trains, and what follows from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from paceline.parallel.world import ParallelDims
from paceline.runs.monitor import Monitor
from paceline.training.run_context import RunContext
from paceline.training.schedule import ModelSelector
from paceline.training.state import TrainingState


class Validation:
    """On the validation split.

    Args:
        run: what is trained.

    Attributes:
        metrics: of the last evaluation that was applied, as they were judged.
    """

    def __init__(self, run: RunContext) -> None:
        self.metrics: Mapping[str, float] = {}
        self._deadline = run.deadline
        self._evaluator = run.build_evaluator("val")
        self._selector = ModelSelector(run.config)

    @property
    def exists(self) -> bool:
        """Whether the task has a validation split."""
        return self._evaluator is not None

    def measure(
        self,
        mesh: ParallelDims,
        state: TrainingState,
        monitor: Monitor,
        stop: Callable[[], int],
        *,
        in_step: bool = False,
    ) -> dict[str, float]:
        """Evaluate; nothing changes.

        Args:
            mesh: all its ranks evaluate together.
            state: its model is evaluated.
            monitor: told what is done.
            stop: what asks for a stop, as in the control word.
            in_step: whoever calls the model needs the other ranks to call theirs.

        Returns:
            The metrics, by name.

        Raises:
            EvaluationStopped: somebody asked for a stop.
        """
        assert self._evaluator is not None
        monitor.set_status("evaluating val")
        began = time.monotonic()
        state.callback.on_eval_begin("val", state.evaluated_module)
        try:
            return self._evaluator.run(mesh, state.evaluated_module, stop, in_step=in_step)
        finally:
            self._deadline.evaluation_took(time.monotonic() - began)

    def apply(self, measured: Mapping[str, float], state: TrainingState, monitor: Monitor) -> bool:
        """Have plateau schedules, early stop and the best model follow.

        Args:
            measured: the metrics.
            state: makes one transition.
            monitor: told of the metrics.

        Returns:
            Whether the model is the best so far.
        """
        metrics = self.metrics = state.callback.on_eval_end("val", measured)
        progress = state.progress
        progress.evaluated_step = progress.step
        progress.version += 1
        improved = self._selector.apply(metrics, progress)
        state.step_plateaus(self._selector.value(metrics))
        epoch = progress.epoch - 1 if progress.step_in_epoch == 0 else progress.epoch
        monitor.on_eval_end("val", progress.step, epoch, metrics)
        return improved

    def close(self) -> None:
        """Close the split."""
        if self._evaluator is not None:
            self._evaluator.close()
