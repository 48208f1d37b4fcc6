"""Follows a search: writes the journal, shows the status, and watches the budget."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, Self

from ray.tune import Callback
from rich.console import Console
from rich.live import Live

from paceline.monitoring.writers import finite
from paceline.tuning.budget import WARN_AT, Cost, estimate, show_seconds
from paceline.tuning.journal import Journal, Result
from paceline.tuning.search import Search, SearchDirectory
from paceline.tuning.status import Standing, render

_SHOW_S = 0.5
_RECORD_S = 15.0  # what is forgotten of a search that is killed, at most


class Observer:
    """What happens beside the trials.

    Args:
        ray: the library, connected.
        search: what is searched.
        directory: its directory.
        journal: takes the results.
        quiet: show nothing.

    Attributes:
        callback: tells Tune's events.
        scheduler: Tune's, once there is one.
        spent: the budget is.
        failure: of the last trial that Tune gave up.
    """

    def __init__(
        self, ray: ModuleType, search: Search, directory: SearchDirectory, journal: Journal, *, quiet: bool
    ) -> None:
        self._ray, self._search, self._directory, self._journal = ray, search, directory, journal
        self._budget = search.limit
        self._began = time.monotonic()
        self._earlier_s = journal.clock_s
        self._notes: list[str] = []
        self._warned = 0.0
        self._shown_at = 0.0
        self._recorded_at = self._began
        self._estimated = bool(journal.results)
        self.scheduler: Any = None
        self.spent = False
        self.failure = ""
        self._since: dict[int, float] = {}  # when a running trial began, or gave its last result
        self.callback = _Events(self)
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()
        for number in list(self._since):
            self._journal.unsaid_s += self._taken(number)
        self._journal.add_spent(self.clock_s)

    @property
    def clock_s(self) -> float:
        """Seconds that the search has taken, over all its starts."""
        return self._earlier_s + time.monotonic() - self._began

    @property
    def cost(self) -> Cost:
        """What was spent until now, with what running trials have taken since their last result."""
        known = self._journal.cost(self.clock_s, self._search.gpus)
        return replace(known, gpu_hours=known.gpu_hours + self._running_s / 3600 * self._search.gpus)

    @property
    def _running_s(self) -> float:
        now = time.monotonic()
        return sum(now - since for since in self._since.values())

    def _taken(self, number: int) -> float:
        """Seconds since a trial began or gave its last result; it is not at work any more."""
        now = time.monotonic()
        return now - self._since.pop(number, now)

    @property
    def closed(self) -> bool:
        """Whether nothing more is to begin."""
        return self.spent or self._directory.stop.exists()

    def turn(self) -> None:
        """Look at the budget, record what is spent, and show where the search stands."""
        self._watch_budget()
        if time.monotonic() - self._recorded_at > _RECORD_S:
            self._recorded_at = time.monotonic()
            self._journal.add_spent(self.clock_s, self._running_s)
        if self._live.is_started and time.monotonic() - self._shown_at > _SHOW_S:
            self._shown_at = time.monotonic()
            self._live.update(render(self._search, self._journal, self.standing()), refresh=True)

    def standing(self) -> Standing:
        """What there is to show, besides the trials."""
        there, free = self._ray.cluster_resources(), self._ray.available_resources()
        used = [
            f"{there[name] - free.get(name, 0):g}/{there[name]:g} {name}s"
            for name in ("CPU", "GPU")
            if name in there
        ]
        asha = self._search.scheduler == "asha" and self.scheduler is not None
        return Standing(
            clock_s=self.clock_s,
            resources=", ".join(used),
            scheduler=self.scheduler.debug_string() if asha else "",
            budget="" if self._budget is None else self._budget.show(self.cost),
            notes=self._notes,
        )

    def started(self, number: int) -> None:
        """A trial has a machine."""
        self._journal.trial(number).begun = True
        self._since[number] = time.monotonic()

    def result(self, number: int, said: Mapping[str, Any], *, ended: bool) -> None:
        """Record what a trial said.

        Args:
            number: the trial.
            said: what its actor returned, with what Tune adds.
            ended: it is not to go on.
        """
        trial = self._journal.trial(number)
        state = said["state"]
        if ended or state != "running":
            self._since.pop(number, None)
        else:
            self._since[number] = time.monotonic()
        interrupted = state == "waiting"
        if interrupted or (state == "running" and said["step"] <= trial.step):
            self._journal.unsaid_s += said["seconds"]
            return  # said before, or to be gone on with
        place = f"{said.get('node_ip', '')}:{said.get('pid', '')}"
        result = Result(
            trial=number,
            state="stopped" if ended and state == "running" else state,
            iteration=said["iteration"],
            step=said["step"],
            metrics=finite(dict(said["metrics"])),
            seconds=round(said["seconds"], 3),
            clock_s=round(self.clock_s, 3),
            place=place,
            message=said["message"],
        )
        self._journal.add(result)
        if not self._live.is_started:
            self._say_line(result)
        if not self._estimated and result.iteration == 1:
            self._estimate_anew(max(0.0, result.seconds - said["start_s"]))

    def lost(self, number: int) -> None:
        """A trial's process or machine is; it begins again from its last checkpoint."""
        self._journal.unsaid_s += self._taken(number)
        self.say(f"trial {number:05d} was lost, and goes on from its last checkpoint.")

    def gave_up(self, number: int, why: str) -> None:
        """Tune has no more patience with a trial."""
        self.failure = why
        trial = self._journal.trial(number)
        self._journal.add(
            Result(
                trial=number,
                state="failed",
                iteration=trial.iteration,
                step=trial.step,
                metrics={},
                seconds=round(self._taken(number), 3),
                clock_s=round(self.clock_s, 3),
                message=why,
            )
        )

    def say(self, text: str) -> None:
        """Tell the user, above the table."""
        self._console.print(f"paceline: {text}", markup=False, soft_wrap=True)

    def _say_line(self, result: Result) -> None:
        value = result.value(self._search.metric_name)
        shown = "" if value is None else f", {self._search.metric_name} {value:.6g}"
        state = "" if result.state == "running" else f", {result.state}"
        # What else is said of a loss that is NaN is advice for a run that was meant to go on.
        message = result.message.partition(". ")[0] if result.state == "diverged" else result.message
        why = f": {message}" if message else ""
        self.say(
            f"trial {result.trial:05d}: iteration {result.iteration}, step {result.step}{shown}{state}{why}"
        )

    def _estimate_anew(self, seconds_per_evaluation: float) -> None:
        """An evaluation's cost is known now, and it is this cluster's; without the first import of torch."""
        self._estimated = True
        search = self._search
        if search.evaluations is None or search.seconds_per_evaluation is None:
            return
        room = self._ray.cluster_resources()
        concurrent = int(room.get("CPU", 1) // search.cpus) if search.cpus else search.planned
        if search.gpus:
            concurrent = min(concurrent, int(room.get("GPU", 0) // search.gpus))
        expected = estimate(
            evaluations=search.evaluations,
            seconds_per_evaluation=seconds_per_evaluation,
            trials=search.planned,
            rungs=search.rungs,
            reduction=search.reduction_factor,
            concurrent=max(1, concurrent),
            gpus_per_trial=search.gpus,
        )
        self.say(
            f"by the first evaluation, the search takes about {show_seconds(expected.search.seconds)}, "
            f"{expected.concurrent} trials at a time"
            + ("" if self._budget is None else f": {self._budget.show(expected.search)}")
            + "."
        )

    def _watch_budget(self) -> None:
        budget = self._budget
        if budget is None or self.spent:
            return
        used = budget.used(self.cost)
        passed = max((mark for mark in WARN_AT if used >= mark), default=0.0)
        if passed > self._warned:
            self._warned = passed
            note = f"{passed:.0%} of the budget is spent: {budget.show(self.cost)}."
            self._notes = [note]
            self.say(note)
        # A budget of trials ends by itself: no more of them are begun.
        if used >= 1 and budget.unit != "trials":
            self.spent = True
            self._directory.stop.touch()
            self.say(f"the budget is spent: {budget.show(self.cost)}. Running trials save, and end.")


class _Events(Callback):  # type: ignore[misc]
    """What Tune tells."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def on_step_end(self, iteration: int, trials: Any, **info: Any) -> None:
        self._observer.turn()

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self._observer.started(trial.config["number"])

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
        self._observer.result(trial.config["number"], result, ended=bool(result.get("done")))

    def on_trial_recover(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self._observer.lost(trial.config["number"])

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self._observer.gave_up(trial.config["number"], "it was lost again and again")
