"""The interface to Ray Tune: trials, searcher and scheduler."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from ray.tune import Trainable
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from paceline.core.errors import ConfigError
from paceline_tune.history import SearchJournal, TrialResult
from paceline_tune.sampler import choose_successor, is_comparable, suggest
from paceline_tune.search import Search, SearchDirectory
from paceline_tune.trial import RunningTrial, TrialCommand, TrialReport, TrialServer

# --- Trials: an actor that runs one trial after another ---


OBJECTIVE = "objective"
TIME = "iteration"  # a field of TrialReport


class TrialRun(Trainable):  # type: ignore[misc]
    """One trial of a search; afterwards its actor, which has imported torch, runs the next one.

    ``config`` is suggested by :class:`~paceline_tune.ray_adapter.JournalSearcher`.
    """

    def setup(self, config: dict[str, Any]) -> None:
        os.chdir(config["workdir"])
        self._server = TrialServer()
        # Start the trial only in the first step: Tune also creates actors whose trials another actor then runs.
        self._trial: RunningTrial | None = None
        self._config = config

    def step(self) -> dict[str, Any]:
        start_s = time.monotonic()
        command: TrialCommand = self._config["order"]
        report = TrialReport(iteration=command.iteration, step=command.step, metrics={}, state="waiting")
        if self._trial is None and not command.stop_file.exists():
            try:
                self._trial = RunningTrial(self._server, command)
            except ConfigError as error:  # options that cannot be combined
                report = replace(report, state="failed", message=str(error))
        trial_start_s = time.monotonic()
        if self._trial is not None:
            report = self._trial.next()
        if report.state == "running" and self._reached_goal(report.metrics):
            report = replace(report, state="goal")
        done = report.state != "running"
        last_evaluation = self._config["last_evaluation"]
        if not done and last_evaluation is not None and report.iteration >= last_evaluation:
            self._end()  # it saves before a trial that continues it may begin
            done = True
        return {
            **asdict(report),
            OBJECTIVE: self._objective(report),
            "seconds": time.monotonic() - start_s,
            "start_s": trial_start_s - start_s,
            "done": done,
        }

    def _objective(self, report: TrialReport) -> float:
        """Return the metric, or the worst possible value if it is not finite or the trial failed."""
        value = report.metrics.get(self._config["metric"])
        if value is not None and math.isfinite(value) and report.state not in ("diverged", "failed"):
            return value
        return -math.inf if self._config["mode"] == "max" else math.inf

    def _reached_goal(self, metrics: Mapping[str, float | None]) -> bool:
        metric, mode = self._config["metric"], self._config["mode"]
        for name, goal in self._config["stop"].items():
            value = metrics.get(name)
            lower_is_better = name == "loss" or (name == metric and mode == "min")
            if value is not None and (value <= goal if lower_is_better else value >= goal):
                return True
        return False

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """End this trial, whose run saves a checkpoint, and prepare for another one."""
        self._end()
        self._config = new_config
        return True

    def cleanup(self) -> None:
        try:
            self._end()
        finally:
            self._server.close()

    def _end(self) -> None:
        if self._trial is not None:
            self._trial.end()
            self._trial = None

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Do nothing: the run saves its own checkpoints."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Do nothing: the run finds its own checkpoints."""


# --- Searcher and scheduler, restored from the journal ---


class JournalSearcher(Searcher):  # type: ignore[misc]
    """A searcher that suggests the trials ``numbers`` in order, until ``closed`` returns True.

    ``concurrent`` returns how many trials the cluster runs at a time: Tune asks in advance, but a sampler that learns
    should not choose before it must.
    """

    def __init__(
        self,
        search: Search,
        directory: SearchDirectory,
        journal: SearchJournal,
        numbers: Sequence[int],
        closed: Callable[[], bool],
        concurrent: Callable[[], int],
    ) -> None:
        super().__init__(metric=OBJECTIVE, mode=search.mode)
        self._search = search
        self._directory = directory
        self._journal = journal
        self._numbers = list(numbers)
        self._closed = closed
        self._concurrent = concurrent
        self._running: set[str] = set()

    def suggest(self, trial_id: str) -> Any:
        """Return the next trial's configuration; None: not yet."""
        if not self._numbers or self._closed():
            return Searcher.FINISHED
        search, number = self._search, self._numbers[0]
        continues = search.generation(number) > 0 and number not in self._journal.trials
        if continues:
            if not is_comparable(search, self._journal, number):
                return None
            successor = choose_successor(search, self._journal, number)
            if successor is None:
                return Searcher.FINISHED
            self._journal.suggest(number, successor.parameters, successor.parent)
        elif search.sampler != "random" and len(self._running) >= self._concurrent():
            return None
        del self._numbers[0]
        trial = self._journal.trial(number)
        parent = None if trial.parent is None else self._journal.trials[trial.parent]
        begun = trial if trial.results or parent is None else parent
        self._running.add(trial_id)
        if search.sampler == "tpe" and trial.suggested is None:
            first = self._journal.trials.get(number - number % search.repeats)
            known = None if first is None else first.suggested
            self._journal.suggest(number, known or suggest(search, self._journal, number // search.repeats))
        return {
            "number": number,
            "workdir": search.workdir,
            "metric": search.metric_name,
            "mode": search.mode,
            "stop": dict(search.stop),
            "last_evaluation": search.last_evaluation(number),
            "order": TrialCommand(
                options={
                    **search.run_options(number, trial.parameters(search)),
                    "run_dir": str(self._directory.trial(number)),
                },
                iteration=begun.iteration,
                step=begun.step,
                stop_file=self._directory.stop,
                parent=None if parent is None else self._directory.trial(parent.number),
            ),
        }

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        self._running.discard(trial_id)

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: the journal contains everything."""

    def restore(self, checkpoint_path: str) -> None:
        """Do nothing: the journal contains everything."""


_WORST = 1e300  # instead of infinity: numpy finds no quantile between two infinities, and so none would be below it


class Asha(FIFOScheduler):  # type: ignore[misc]
    """Stops a trial that has fallen behind the others, or whose metric is NaN, where it reaches a rung.

    Asynchronous successive halving (Li et al., https://arxiv.org/abs/1810.05934). Tune's own cannot continue from
    earlier results.
    """

    def __init__(self, search: Search) -> None:
        super().__init__()
        self._evaluations = search.evaluations or math.inf
        self._sign = 1.0 if search.mode == "max" else -1.0
        self._percentile = 100 * (1 - 1 / search.reduction_factor)
        # The highest milestone first, each with the values of the trials that were compared there.
        self._rungs: list[tuple[float, dict[int, float]]] = [(each, {}) for each in reversed(search.milestones)]
        self._stopped: set[int] = set()  # those that fell behind while they trained

    def replay(self, results: Sequence[TrialResult], search: Search) -> None:
        """Repeat earlier comparisons in the same order."""
        for result in results:
            value = None if result.state in ("diverged", "failed") else result.value(search.metric_name)
            if value is not None or result.metrics or result.state in ("diverged", "failed"):
                behind = self._falls_behind(result.trial, result.iteration, value)
                if behind and result.state in ("running", "stopped") and result.iteration < self._evaluations:
                    self._stopped.add(result.trial)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        number = trial.config["number"]
        if result[TIME] >= self._evaluations:
            return str(TrialScheduler.STOP)  # it has ended, and is compared by on_trial_complete
        if self._falls_behind(number, result[TIME], result[OBJECTIVE]):
            self._stopped.add(number)
            return str(TrialScheduler.STOP)
        return str(TrialScheduler.CONTINUE)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Record the last result of a trial, unless it was interrupted or has been compared."""
        number = trial.config["number"]
        if result.get("state") != "waiting" and number not in self._stopped:
            self._falls_behind(number, result[TIME], result[OBJECTIVE])

    def _falls_behind(self, trial: int, iteration: int, value: float | None) -> bool:
        """Compare a trial at the highest rung that it has reached and was not compared at; None is the worst value."""
        reward = -_WORST if value is None else min(max(self._sign * value, -_WORST), _WORST)
        for milestone, recorded in self._rungs:
            if iteration >= milestone and trial not in recorded:
                cutoff = self._cutoff(recorded)
                recorded[trial] = reward
                return reward == -_WORST or (cutoff is not None and reward < cutoff)
        return False

    def _cutoff(self, recorded: Mapping[int, float]) -> float | None:
        return float(np.percentile(list(recorded.values()), self._percentile)) if recorded else None

    def debug_string(self) -> str:
        """Describe the rungs: how many trials each has seen, and the value required to pass."""
        rungs = []
        for milestone, recorded in self._rungs:
            cutoff = self._cutoff(recorded)
            is_number = cutoff is not None and abs(cutoff) <= _WORST / len(recorded)
            condition = f", {self._sign * (cutoff or 0.0):.6g} to pass" if is_number else ""
            rungs.append(f"iteration {milestone:g}: {len(recorded)} trials{condition}")
        return f"ASHA: {len(self._stopped)} stopped; rungs: {' | '.join(rungs)}"


def make_scheduler(search: Search, results: Sequence[TrialResult]) -> TrialScheduler:
    """Return the scheduler that stops trials early, after it has replayed earlier results."""
    if search.scheduler != "asha":
        return FIFOScheduler()
    scheduler = Asha(search)
    scheduler.replay(results, search)
    return scheduler
