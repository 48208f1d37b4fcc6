"""The interface to Ray Tune: trials, searcher and scheduler."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray.tune import Trainable
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from paceline.core.errors import ConfigError
from paceline_tune.history import SearchJournal, TrialResult
from paceline_tune.population import choose_successor, is_comparable
from paceline_tune.sampler import suggest
from paceline_tune.search import Search, SearchDirectory
from paceline_tune.trial import RunningTrial, TrialCommand, TrialReport, TrialServer

# --- Trials: an actor that runs one trial after another ---


OBJECTIVE = "objective"
TIME = "iteration"


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
        state = report.state
        if state == "running" and self._reached_goal(report.metrics):
            state = "goal"
        done = state != "running"
        last_evaluation = self._config["last_evaluation"]
        if not done and last_evaluation is not None and report.iteration >= last_evaluation:
            self._end()  # it saves before a trial that continues it may begin
            done = True
        return {
            TIME: report.iteration,
            OBJECTIVE: self._objective(report),
            "step": report.step,
            "metrics": dict(report.metrics),
            "state": state,
            "message": report.message,
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


_MAX_EVALUATIONS = 1_000_000  # if the number of a trial's evaluations is unknown


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


@dataclass(frozen=True)
class _NamedTrial:
    """A trial with a name that stays the same over restarts of the search, unlike Tune's."""

    trial_id: str


_WORST = 1e300  # instead of infinity: numpy finds no quantile between two infinities, and so none would be below it


class Asha(ASHAScheduler):  # type: ignore[misc]
    """Tune's ASHA, which continues from earlier results, and stops a trial whose metric is NaN where it compares it."""

    def __init__(self, search: Search) -> None:
        evaluations = search.evaluations or _MAX_EVALUATIONS
        super().__init__(
            time_attr=TIME,
            metric=OBJECTIVE,
            mode=search.mode,
            max_t=max(evaluations, search.grace_period),
            grace_period=search.grace_period,
            reduction_factor=search.reduction_factor,
        )

    def replay(self, results: Sequence[TrialResult], search: Search) -> None:
        """Repeat earlier comparisons in the same order."""
        worst = -math.inf if search.mode == "max" else math.inf
        for result in results:
            name = _NamedTrial(str(result.trial))
            if name.trial_id not in self._trial_info:
                super().on_trial_add(None, name)
            value = result.value(search.metric_name)
            if result.state in ("diverged", "failed"):
                value = None
            elif not result.metrics:
                continue
            values = {TIME: result.iteration, OBJECTIVE: worst if value is None else value}
            self._compare(None, name, values)

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        if str(trial.config["number"]) not in self._trial_info:
            super().on_trial_add(tune_controller, _name(trial))

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        return self._compare(tune_controller, _name(trial), result)

    def _compare(self, tune_controller: Any, name: _NamedTrial, result: Mapping[str, Any]) -> str:
        value, before = result[OBJECTIVE], self._comparisons(name)
        clipped = {**result, OBJECTIVE: min(max(value, -_WORST), _WORST)}
        decision = str(super().on_trial_result(tune_controller, name, clipped))
        if decision == TrialScheduler.CONTINUE and math.isinf(value) and self._comparisons(name) > before:
            self._num_stopped += 1  # it is the worst also where it is the first
            return str(TrialScheduler.STOP)
        return decision

    def _comparisons(self, name: _NamedTrial) -> int:
        return sum(name.trial_id in recorded for _, recorded in self._brackets[0]._rungs)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Record the last result of a trial, unless it was interrupted."""
        if result.get("state") != "waiting":
            super().on_trial_complete(tune_controller, _name(trial), result)

    def debug_string(self) -> str:
        """Describe the rungs: how many trials each has seen, and the value required to pass."""
        rungs = []
        for milestone, recorded in self._brackets[0]._rungs:
            cutoff = self._brackets[0].cutoff(recorded)
            condition = (
                ""
                if cutoff is None or abs(cutoff) > _WORST / len(recorded)
                else f", {self._metric_op * cutoff:.6g} to pass"
            )
            rungs.append(f"iteration {milestone:g}: {len(recorded)} trials{condition}")
        return f"ASHA: {self._num_stopped} stopped; rungs: {' | '.join(rungs)}"

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        """Remove a trial that Tune has given up."""
        self._trial_info.pop(str(trial.config["number"]), None)


def _name(trial: Any) -> _NamedTrial:
    return _NamedTrial(str(trial.config["number"]))


def make_scheduler(search: Search, results: Sequence[TrialResult]) -> TrialScheduler:
    """Return the scheduler that stops trials early, after it has replayed earlier results."""
    if search.scheduler != "asha":
        return FIFOScheduler()
    scheduler = Asha(search)
    scheduler.replay(results, search)
    return scheduler
