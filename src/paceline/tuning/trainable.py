"""What Ray Tune starts on its machines: an actor that has one trial after another."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.tune import Trainable

from paceline.tuning.running_trial import Order, RunningTrial, Told, TrialServer

OBJECTIVE = "objective"
TIME = "iteration"


class TrialRun(Trainable):  # type: ignore[misc]
    """One trial of a search; after it the actor, and the torch that it has imported, serve the next one.

    ``config`` is what :class:`~paceline.tuning.trials.Trials` suggests: ``number``, ``order``, ``metric``,
    ``mode`` and ``stop``.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Start the process that trials are forked from."""
        os.chdir(config["workdir"])
        self._server = TrialServer()
        self._begin(config)

    def _begin(self, config: Mapping[str, Any]) -> None:
        order = config["order"]
        self._goals, self._metric, self._mode = config["stop"], config["metric"], config["mode"]
        stop_file = Path(order["stop_file"])
        self._order = Order(
            options=order["options"], iteration=order["iteration"], step=order["step"], stop_file=stop_file
        )
        # Started by the first step: Tune makes actors for trials that another one has taken by then.
        self._trial: RunningTrial | None = None

    def step(self) -> dict[str, Any]:
        """Train to the next evaluation."""
        began = time.monotonic()
        if self._trial is None and not self._order.stop_file.exists():
            self._trial = RunningTrial(self._server, self._order)
        started = time.monotonic()
        if self._trial is None:
            told = Told(iteration=self._order.iteration, step=self._order.step, metrics={}, state="waiting")
        else:
            told = self._trial.next()
        state = told.state
        if state == "running" and self._reached_goal(told.metrics):
            state = "goal"
        return {
            TIME: told.iteration,
            OBJECTIVE: self._objective(told),
            "step": told.step,
            "metrics": dict(told.metrics),
            "state": state,
            "message": told.message,
            "seconds": time.monotonic() - began,
            "start_s": started - began,
            "done": state != "running",
        }

    def _objective(self, told: Told) -> float:
        """The metric; the worst there is where it is no number, or none."""
        value = told.metrics.get(self._metric)
        if value is not None and math.isfinite(value) and told.state not in ("diverged", "failed"):
            return value
        return -math.inf if self._mode == "max" else math.inf

    def _reached_goal(self, metrics: Mapping[str, float | None]) -> bool:
        for name, goal in self._goals.items():
            value = metrics.get(name)
            down = name == "loss" or (name == self._metric and self._mode == "min")
            if value is not None and (value <= goal if down else value >= goal):
                return True
        return False

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """End this trial, whose run saves, and make ready for another one."""
        self._end()
        self._begin(new_config)
        return True

    def cleanup(self) -> None:
        """End the trial, and the process that it was forked from."""
        try:
            self._end()
        finally:
            self._server.close()

    def _end(self) -> None:
        if self._trial is not None:
            self._trial.end()
            self._trial = None

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """The run saves itself."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """The run finds its checkpoints itself."""
