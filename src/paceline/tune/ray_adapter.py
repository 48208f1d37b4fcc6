"""What Ray Tune sees of a trial."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from ray.tune import Trainable
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from paceline.tune.history import SearchJournal, TrialResult
from paceline.tune.search import Search, SearchDirectory
from paceline.tune.trial import RunningTrial, TrialCommand, TrialReport, TrialServer

# --- What Ray Tune starts on its machines: an actor that has one trial after another ---


OBJECTIVE = "objective"
TIME = "iteration"


class TrialRun(Trainable):  # type: ignore[misc]
    """One trial of a search; after it the actor, and the torch that it has imported, serve the next one.

    ``config`` is what :class:`~paceline.tune.ray_adapter.Trials` suggests: ``number``, ``order``, ``metric``,
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
        self._order = TrialCommand(
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
            told = TrialReport(iteration=self._order.iteration, step=self._order.step, metrics={}, state="waiting")
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

    def _objective(self, told: TrialReport) -> float:
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


# --- What Ray Tune is given: the trials that are to run, and the scheduler, as far as it had come ---


_NO_END = 1_000_000  # evaluations, where nobody knows how many a trial has


class JournalSearcher(Searcher):  # type: ignore[misc]
    """Suggests one trial after another, those that were interrupted first.

    Args:
        search: what is searched.
        directory: its directory.
        journal: what is known of trials that have begun.
        numbers: the trials that are to run.
        closed: whether nothing more is to begin.
    """

    def __init__(
        self,
        search: Search,
        directory: SearchDirectory,
        journal: SearchJournal,
        numbers: Sequence[int],
        closed: Callable[[], bool],
    ) -> None:
        super().__init__(metric=OBJECTIVE, mode=search.mode)
        self._search, self._directory, self._journal = search, directory, journal
        self._numbers = list(numbers)
        self._closed = closed

    def suggest(self, trial_id: str) -> Any:
        """The next trial's configuration."""
        if not self._numbers or self._closed():
            return Searcher.FINISHED
        number, search = self._numbers.pop(0), self._search
        trial = self._journal.trial(number)
        return {
            "number": number,
            "workdir": search.workdir,
            "metric": search.metric_name,
            "mode": search.mode,
            "stop": dict(search.stop),
            "order": {
                "options": search.trial_options(number, self._directory),
                "iteration": trial.iteration,
                "step": trial.step,
                "stop_file": str(self._directory.stop),
            },
        }

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Nothing is learned from it: what comes next was drawn before."""

    def save(self, checkpoint_path: str) -> None:
        """The journal says all there is to know."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing is read from there."""


@dataclass(frozen=True)
class _NamedTrial:
    """A trial by the name that it keeps over restarts of the search; Tune's own is a new one each time."""

    trial_id: str


class Asha(ASHAScheduler):  # type: ignore[misc]
    """Tune's ASHA, which goes on where it stood.

    Args:
        search: how trials are compared.
    """

    def __init__(self, search: Search) -> None:
        evaluations = search.evaluations or _NO_END
        super().__init__(
            time_attr=TIME,
            metric=OBJECTIVE,
            mode=search.mode,
            max_t=max(evaluations, search.grace_period),
            grace_period=search.grace_period,
            reduction_factor=search.reduction_factor,
        )

    def replay(self, results: Sequence[TrialResult], search: Search) -> None:
        """Compare what was compared before, in the same order."""
        worst = float("-inf") if search.mode == "max" else float("inf")
        for result in results:
            name = _NamedTrial(str(result.trial))
            if name.trial_id not in self._trial_info:
                super().on_trial_add(None, name)
            value = result.value(search.metric_name)
            if result.state in ("diverged", "failed"):
                value = None
            elif not result.metrics:
                continue
            compared = {TIME: result.iteration, OBJECTIVE: worst if value is None else value}
            super().on_trial_result(None, name, compared)

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """A trial that was known before keeps its place."""
        if str(trial.config["number"]) not in self._trial_info:
            super().on_trial_add(tune_controller, _name(trial))

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Compare; others may end it."""
        # Between two that are as bad as can be, there is no quantile; numpy would warn of it.
        with numpy.errstate(invalid="ignore"):
            return str(super().on_trial_result(tune_controller, _name(trial), result))

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Its last result counts, but not where it was only interrupted."""
        if result.get("state") != "waiting":
            super().on_trial_complete(tune_controller, _name(trial), result)

    def debug_string(self) -> str:
        """The rungs: how many trials each has seen, and what it takes to pass."""
        rungs = []
        for milestone, recorded in self._brackets[0]._rungs:
            cutoff = self._brackets[0].cutoff(recorded)
            passes = "" if cutoff is None else f", {self._metric_op * cutoff:.6g} to pass"
            rungs.append(f"iteration {milestone:g}: {len(recorded)} trials{passes}")
        return f"ASHA: {self._num_stopped} stopped; rungs: {' | '.join(rungs)}"

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        """It is given up."""
        self._trial_info.pop(str(trial.config["number"]), None)


def _name(trial: Any) -> _NamedTrial:
    return _NamedTrial(str(trial.config["number"]))


def make_scheduler(search: Search, results: Sequence[TrialResult]) -> TrialScheduler:
    """What ends trials early.

    Args:
        search: how trials are compared.
        results: those of before, in their order.
    """
    if search.scheduler == "none":
        return FIFOScheduler()
    scheduler = Asha(search)
    scheduler.replay(results, search)
    return scheduler
