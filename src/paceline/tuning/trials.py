"""What Ray Tune is given: the trials that are to run, and the scheduler, as far as it had come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from paceline.tuning.journal import Journal, Result
from paceline.tuning.search import Search, SearchDirectory
from paceline.tuning.trainable import OBJECTIVE, TIME

_NO_END = 1_000_000  # evaluations, where nobody knows how many a trial has


class Trials(Searcher):  # type: ignore[misc]
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
        journal: Journal,
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

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Nothing is learned from it: what comes next was drawn before."""

    def save(self, checkpoint_path: str) -> None:
        """The journal says all there is to know."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing is read from there."""


@dataclass(frozen=True)
class _Named:
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
            max_t=max(evaluations, search.grace),
            grace_period=search.grace,
            reduction_factor=search.reduction_factor,
        )

    def replay(self, results: Sequence[Result], search: Search) -> None:
        """Compare what was compared before, in the same order."""
        worst = float("-inf") if search.mode == "max" else float("inf")
        for result in results:
            name = _Named(str(result.trial))
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


def _name(trial: Any) -> _Named:
    return _Named(str(trial.config["number"]))


def make_scheduler(search: Search, results: Sequence[Result]) -> TrialScheduler:
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
