"""Drives a search: the trials on Ray, and what becomes of each."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Self

from ray.tune import Callback
from rich.console import Console
from rich.live import Live

from paceline.core.errors import LaunchError, PacelineError, RunDirectoryError
from paceline.core.signals import STOP_SIGNALS, StopRequests, handle_signals
from paceline.launch.ray_cluster import connect, import_ray
from paceline.runs.metrics import finite
from paceline.tune.charts import draw
from paceline.tune.history import SearchJournal, TrialResult, write_hparams, write_result
from paceline.tune.search import WARN_AT, Search, SearchCost, SearchDirectory, estimate, show_seconds
from paceline.tune.status import SearchStatus, render

# --- Follows a search: writes the journal, shows the status, and watches the budget ---


_SHOW_S = 0.5
_RECORD_S = 15.0  # what is forgotten of a search that is killed, at most


class SearchMonitor:
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
        self,
        ray: ModuleType,
        search: Search,
        directory: SearchDirectory,
        journal: SearchJournal,
        *,
        quiet: bool,
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
    def cost(self) -> SearchCost:
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

    def poll(self) -> None:
        """Look at the budget, record what is spent, and show where the search stands."""
        self._watch_budget()
        if time.monotonic() - self._recorded_at > _RECORD_S:
            self._recorded_at = time.monotonic()
            self._journal.add_spent(self.clock_s, self._running_s)
        if self._live.is_started and time.monotonic() - self._shown_at > _SHOW_S:
            self._shown_at = time.monotonic()
            self._live.update(render(self._search, self._journal, self.standing()), refresh=True)

    def standing(self) -> SearchStatus:
        """What there is to show, besides the trials."""
        there, free = self._ray.cluster_resources(), self._ray.available_resources()
        used = [
            f"{there[name] - free.get(name, 0):g}/{there[name]:g} {name}s" for name in ("CPU", "GPU") if name in there
        ]
        asha = self._search.scheduler == "asha" and self.scheduler is not None
        return SearchStatus(
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
        result = TrialResult(
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
            TrialResult(
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

    def _say_line(self, result: TrialResult) -> None:
        value = result.value(self._search.metric_name)
        shown = "" if value is None else f", {self._search.metric_name} {value:.6g}"
        state = "" if result.state == "running" else f", {result.state}"
        # What else is said of a loss that is NaN is advice for a run that was meant to go on.
        message = result.message.partition(". ")[0] if result.state == "diverged" else result.message
        why = f": {message}" if message else ""
        self.say(f"trial {result.trial:05d}: iteration {result.iteration}, step {result.step}{shown}{state}{why}")

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

    def __init__(self, observer: SearchMonitor) -> None:
        self._observer = observer

    def on_step_end(self, iteration: int, trials: Any, **info: Any) -> None:
        self._observer.poll()

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self._observer.started(trial.config["number"])

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
        self._observer.result(trial.config["number"], result, ended=bool(result.get("done")))

    def on_trial_recover(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self._observer.lost(trial.config["number"])

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self._observer.gave_up(trial.config["number"], "it was lost again and again")


# --- Searches in the Ray cluster that RAY_ADDRESS names: ``python -m paceline.tune.run_search DIRECTORY`` ---
#
# Ray Tune places the trials and ASHA ends them early; what is known of them is in the search's own journal,
# and nothing that Tune writes is ever read: it is made of pickles.


_MOST_FAILURES = 3
# Tune's own output, loggers and handlers; ours take their place.
_TUNE = {
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "600",
    "TUNE_MAX_PENDING_TRIALS_PG": "16",
    "RAY_NUM_REDIS_GET_RETRIES": "5",
    "RAY_AIR_NEW_OUTPUT": "0",
}


def main(argv: Sequence[str]) -> int:
    """Search; return the exit code.

    It is 0 once all trials have ended well, 75 or 130 if the search was stopped, and 1 where a trial failed,
    or none has a value of the metric.
    """
    parser = argparse.ArgumentParser(prog="python -m paceline.tune.run_search", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args(argv)
    directory = SearchDirectory(options.directory)
    os.environ.update({name: value for name, value in _TUNE.items() if name not in os.environ})
    try:
        with ExitStack() as stack:
            stack.enter_context(directory.locked())
            search = directory.read()
            ray = import_ray()
            connect(ray, os.environ["RAY_ADDRESS"], "--ray-address")
            stack.callback(ray.shutdown)
            return _search(ray, search, directory, quiet=options.quiet)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code


def unfinished(search: Search, journal: SearchJournal) -> list[int]:
    """The trials that are to run: those that have begun and not ended, then those that have not begun."""
    there = [n for n, trial in journal.trials.items() if not trial.ended]
    return [*sorted(there), *(n for n in range(search.planned) if n not in journal.trials)]


def _search(ray: ModuleType, search: Search, directory: SearchDirectory, *, quiet: bool) -> int:

    require_room(ray, search)
    directory.stop.unlink(missing_ok=True)
    journal = SearchJournal(directory.journal)
    numbers = unfinished(search, journal)
    asked: list[int] = []
    requests = StopRequests()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if requests.hear(number) == "end":
            raise SystemExit(128 + number)
        asked.append(number)
        directory.stop.touch()

    observer = SearchMonitor(ray, search, directory, journal, quiet=quiet)
    try:
        with handle_signals(STOP_SIGNALS, on_signal), observer:
            observer.poll()
            if numbers and not observer.closed:
                _tune(search, directory, journal, numbers, observer)
    finally:
        journal.close()
    directory.stop.unlink(missing_ok=True)
    trials = [journal.trial(number) for number in range(search.planned)]
    done = all(trial.ended for trial in trials)
    try:
        write_result(search, directory, journal, done=done)
        write_hparams(search, directory, journal)
        draw(search, journal, directory.path)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write to {directory.path}: {error.strerror}. Make room, then go on with: paceline tune "
            f"--resume --run-dir {directory.path}. What had ended is not run again."
        ) from error
    except LaunchError as error:
        observer.say(str(error))
    if asked:
        return 130 if asked[0] == signal.SIGINT else 75
    if not done and not observer.spent:
        raise LaunchError(
            f"{sum(not t.ended for t in trials)} trials did not end: "
            f"{observer.failure or 'Ray gave them up'}. Go on with: paceline tune --resume --run-dir "
            f"{directory.path}"
        )
    if (done or observer.spent) and journal.best(search.metric_name, search.mode) is None:
        return 1
    return 1 if any(trial.state == "failed" for trial in trials) else 0


def require_room(ray: ModuleType, search: Search) -> None:
    """Refuse trials that no machine of the cluster has room for.

    Raises:
        LaunchError: they would wait for ever.
    """
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(m.get("CPU", 0) >= search.cpus and m.get("GPU", 0) >= search.gpus for m in machines):
        has = ", ".join(f"{m.get('CPU', 0):g} CPUs and {m.get('GPU', 0):g} GPUs" for m in machines)
        raise LaunchError(
            f"no machine has room for a trial of {search.cpus:g} CPUs and {search.gpus:g} GPUs; the cluster "
            f"has {has}. Give less: --cpus-per-trial, --gpus-per-trial."
        )


def _tune(
    search: Search,
    directory: SearchDirectory,
    journal: SearchJournal,
    numbers: Sequence[int],
    observer: SearchMonitor,
) -> None:
    from ray import tune

    from paceline.tune.ray_adapter import JournalSearcher, TrialRun, make_scheduler

    # It misses the files that its own loggers would have written.
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    observer.scheduler = make_scheduler(search, journal.results)
    with tempfile.TemporaryDirectory(prefix="paceline-tune-", dir="/tmp", ignore_cleanup_errors=True) as own:
        try:
            # Not tune.Tuner, which pickles all that it is given.
            tune.run(
                TrialRun,
                name="search",
                storage_path=own,
                num_samples=len(numbers),
                search_alg=JournalSearcher(search, directory, journal, numbers, lambda: observer.closed),
                scheduler=observer.scheduler,
                resources_per_trial={"cpu": search.cpus, **({"gpu": search.gpus} if search.gpus else {})},
                reuse_actors=True,
                max_failures=_MOST_FAILURES,
                raise_on_failed_trial=False,
                callbacks=[observer.callback],
                verbose=0,
            )
        except (tune.TuneError, RuntimeError) as error:
            raise LaunchError(f"Ray Tune ended: {str(error).strip().splitlines()[-1]}") from error


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.exit(code)
