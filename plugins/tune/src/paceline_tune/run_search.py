"""The driver of a search: it runs the trials on Ray and records their results."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Self

from ray.tune import Callback
from rich.console import RenderableType
from rich.live import Live

from paceline.core.errors import RESTART_EXIT_CODE, LaunchError, PacelineError, RunDirectoryError
from paceline.core.output import Console
from paceline.core.ownership import own_prefix
from paceline.core.signals import STOP_SIGNALS, StopRequests, handle_signals
from paceline.core.standard_streams import escape_controls
from paceline.runs.metric_writers import finite, has_tensorboard
from paceline_ray.cluster import connect, import_ray
from paceline_trackers.mlflow import conclude_mlflow_search
from paceline_tune.history import (
    MAX_FAILED,
    SearchJournal,
    TrialResult,
    describe_failure,
    describe_failures,
    shorten,
    write_hparams,
    write_result,
)
from paceline_tune.search import WARN_AT, Search, SearchCost, SearchDirectory, show_seconds
from paceline_tune.status import draw, render
from paceline_tune.trial import last_line

# --- Monitoring: write the journal, show the status, and enforce the budget ---


_SHOW_S = 0.5
_RECORD_S = 15.0  # longest time that a killed search loses


class SearchMonitor(Callback):  # type: ignore[misc]
    """The bookkeeping of a running search, as a callback of Tune.

    Attributes:
        scheduler: of Tune, once it exists.
        failure: why Tune gave up the last trial that it gave up.
        failures: why trials of this start failed or diverged, while no trial has a result.
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
        self._ray = ray
        self._search = search
        self._directory = directory
        self._journal = journal
        self._budget = search.limit
        self._started_at = time.monotonic()
        self._earlier_s = journal.clock_s
        self._notes: list[str] = []
        self._warned = 0.0
        self._shown_at = 0.0
        self._recorded_at = self._started_at
        self._estimated = bool(journal.results)
        self.scheduler: Any = None
        self.spent = False
        self.failure = ""
        self.failures: list[str] = []
        # A population without a member that has a result cannot continue.
        self._max_failed = min(MAX_FAILED, search.trials) if search.scheduler == "pbt" else MAX_FAILED
        self._since: dict[int, float] = {}  # time of a running trial's start or last result
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()
        for number in list(self._since):
            self._journal.unrecorded_s += self._stop_timer(number)
        self._journal.add_spent(self.clock_s)

    @property
    def clock_s(self) -> float:
        return self._earlier_s + time.monotonic() - self._started_at

    @property
    def cost(self) -> SearchCost:
        # Including the time of running trials since their last result.
        recorded = self._journal.cost(self.clock_s, self._search.gpus)
        return replace(recorded, gpu_hours=recorded.gpu_hours + self._running_s / 3600 * self._search.gpus)

    @property
    def _running_s(self) -> float:
        now = time.monotonic()
        return sum(now - since for since in self._since.values())

    def _stop_timer(self, number: int) -> float:
        """Return the time since a trial's start or last result, and end its measurement."""
        now = time.monotonic()
        return now - self._since.pop(number, now)

    @property
    def closed(self) -> bool:
        return self.spent or self.hopeless or self._directory.stop.exists()

    @property
    def hopeless(self) -> bool:
        """Whether several trials have failed, and none has succeeded."""
        return len(self.failures) >= self._max_failed

    def _record(self, result: TrialResult) -> None:
        """Record a result, and stop the search if nothing succeeds."""
        self._journal.add(result)
        if result.state in ("failed", "diverged"):
            if not self._journal.ranking(self._search.metric_name, self._search.mode):
                parameters = self._journal.trial(result.trial).parameters(self._search)
                self.failures.append(describe_failure(parameters, result.state, result.message))
            if len(self.failures) == self._max_failed:
                self._directory.stop.touch()

    def poll(self) -> None:
        self._watch_budget()
        if time.monotonic() - self._recorded_at > _RECORD_S:
            self._recorded_at = time.monotonic()
            self._journal.add_spent(self.clock_s, self._running_s)
        if self._live.is_started and time.monotonic() - self._shown_at > _SHOW_S:
            self._shown_at = time.monotonic()
            self._live.update(self._render(), refresh=True)

    def _render(self) -> RenderableType:
        total, free = self._ray.cluster_resources(), self._ray.available_resources()
        used = [
            f"{total[name] - free.get(name, 0):g}/{total[name]:g} {name}s" for name in ("CPU", "GPU") if name in total
        ]
        asha = self._search.scheduler == "asha" and self.scheduler is not None
        return render(
            self._search,
            self._journal,
            clock_s=self.clock_s,
            resources=", ".join(used),
            scheduler=self.scheduler.debug_string() if asha else "",
            budget="" if self._budget is None else self._budget.show(self.cost),
            notes=self._notes,
        )

    @property
    def concurrent(self) -> int:
        """How many trials the cluster runs at a time, at least 1."""
        resources, search = self._ray.cluster_resources(), self._search
        concurrent = int(resources.get("CPU", 1) // search.cpus) if search.cpus else search.planned
        if search.gpus:
            concurrent = min(concurrent, int(resources.get("GPU", 0) // search.gpus))
        return max(1, concurrent)

    # Tune's events

    def on_step_end(self, iteration: int, trials: Any, **info: Any) -> None:
        self.poll()

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        number = trial.config["number"]
        self._journal.trial(number).begun = True
        self._since[number] = time.monotonic()

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
        """Record a trial's result, which is the actor's return value, with Tune's additions."""
        number, report, ended = trial.config["number"], result, bool(result.get("done"))
        known, state = self._journal.trial(number), report["state"]
        if ended or state != "running":
            self._since.pop(number, None)
        else:
            self._since[number] = time.monotonic()
        if state == "waiting" or (state == "running" and report["step"] <= known.step):
            self._journal.unrecorded_s += report["seconds"]
            return  # already recorded, or the trial will be continued
        recorded = TrialResult(
            trial=number,
            state="stopped" if ended and state == "running" else state,
            iteration=report["iteration"],
            step=report["step"],
            metrics=finite(dict(report["metrics"])),
            seconds=round(report["seconds"], 3),
            clock_s=round(self.clock_s, 3),
            place=f"{report.get('node_ip', '')}:{report.get('pid', '')}",
            message=report["message"],
        )
        self._record(recorded)
        if not self._live.is_started:
            self._print_result(recorded)
        if not self._estimated and recorded.iteration == 1:
            self._update_estimate(max(0.0, recorded.seconds - report["start_s"]))

    def on_trial_recover(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        """Note that a trial's process or node was lost; it restarts from its last checkpoint."""
        number = trial.config["number"]
        self._journal.unrecorded_s += self._stop_timer(number)
        if self._directory.stop.exists():
            self.print_status(f"trial {number:05d} ended with the search; --resume continues it")
            return
        self.print_status(f"trial {number:05d} was lost, and continues from its last checkpoint: {_error_of(trial)}")

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.failure = f"it was lost too often; the last time {_error_of(trial)}"
        number = trial.config["number"]
        known = self._journal.trial(number)
        self._record(
            TrialResult(
                trial=number,
                state="failed",
                iteration=known.iteration,
                step=known.step,
                metrics={},
                seconds=round(self._stop_timer(number), 3),
                clock_s=round(self.clock_s, 3),
                message=self.failure,
            )
        )
        self.print_status(f"trial {number:05d} failed: {self.failure}")

    def print_status(self, text: str) -> None:
        self._console.print(f"paceline: {text}", markup=False, soft_wrap=True)

    def _print_result(self, result: TrialResult) -> None:
        value = result.value(self._search.metric_name)
        shown = "" if value is None else f", {self._search.metric_name} {value:.6g}"
        state = "" if result.state == "running" else f", {result.state}"
        message = shorten(result.state, result.message)
        why = f": {message}" if message else ""
        self.print_status(
            f"trial {result.trial:05d}: iteration {result.iteration}, step {result.step}{shown}{state}{why}"
        )

    def _update_estimate(self, seconds: float) -> None:
        """Estimate the costs by a trial's seconds to its first evaluation here, without the first import of torch."""
        self._estimated = True
        start_s = min(self._search.start_s, seconds)
        expected = self._search.estimate(start_s, seconds - start_s, self.concurrent)
        if expected is None:
            return
        self.print_status(
            f"judging by the first evaluation, the search takes about {show_seconds(expected.search.seconds)}, "
            f"{expected.concurrent} trials at a time"
            + ("" if self._budget is None else f": {self._budget.show(expected.search)}")
            + "."
        )

    def _watch_budget(self) -> None:
        budget = self._budget
        if budget is None or self.spent:
            return
        used = budget.used(self.cost)
        reached = max((mark for mark in WARN_AT if used >= mark), default=0.0)
        if reached > self._warned:
            self._warned = reached
            note = f"{reached:.0%} of the budget is spent: {budget.show(self.cost)}."
            self._notes = [note]
            self.print_status(note)
        # With a budget of trials, no more trials start, so the search ends by itself.
        if used >= 1 and budget.unit != "trials":
            self.spent = True
            self._directory.stop.touch()
            self.print_status(f"the budget is spent: {budget.show(self.cost)}. Running trials save and stop.")


def _error_of(trial: Any) -> str:
    """Return why a trial was lost, from the text that Tune keeps of its errors."""
    with suppress(OSError, TypeError):  # Tune has kept none
        line = last_line(Path(trial.error_file))
        return line.partition("TrialDiedError: ")[2] or line
    return "its process or node ended without a reason"


# --- The driver, in the Ray cluster of RAY_ADDRESS: ``python -m paceline_tune.run_search DIRECTORY [--quiet]`` ---
#
# Ray Tune places the trials and ASHA stops them early. The search's own journal records them; files that Tune
# writes are never read, because they contain pickles.


_MAX_FAILURES = 3
# Disable Tune's own output, loggers and handlers, which ours replace.
_TUNE_VARIABLES = {
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
    """Run the search; return the exit code.

    It is 0 once all trials have ended successfully, 75 or 130 if the search was stopped, and 1 if a trial failed
    or none has a value of the metric.
    """
    directory = SearchDirectory(Path(argv[0]))
    os.environ.update({name: value for name, value in _TUNE_VARIABLES.items() if name not in os.environ})
    try:
        with ExitStack() as stack:
            stack.enter_context(directory.locked())
            search = directory.read()
            ray = import_ray()
            connect(ray, os.environ["RAY_ADDRESS"], "--ray-address")
            stack.callback(ray.shutdown)
            return _search(ray, search, directory, quiet="--quiet" in argv)
    except PacelineError as error:
        # It may quote the task.
        print("paceline: " + escape_controls(str(error), keep="\n\t"), file=sys.stderr)
        return error.exit_code


def unfinished(search: Search, journal: SearchJournal) -> list[int]:
    """Return the trials to run: first those that were interrupted, then the new ones."""
    interrupted = [n for n, trial in journal.trials.items() if not trial.ended]
    return [*sorted(interrupted), *(n for n in range(search.planned) if n not in journal.trials)]


def _search(ray: ModuleType, search: Search, directory: SearchDirectory, *, quiet: bool) -> int:
    require_room(ray, search)
    directory.stop.unlink(missing_ok=True)
    journal = SearchJournal(directory.journal)
    numbers = unfinished(search, journal)
    stop_signals: list[int] = []
    requests = StopRequests()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if requests.hear(number) == "end":
            raise SystemExit(128 + number)
        stop_signals.append(number)
        directory.stop.touch()

    monitor = SearchMonitor(ray, search, directory, journal, quiet=quiet)
    try:
        with handle_signals(STOP_SIGNALS, on_signal), monitor:
            monitor.poll()
            if numbers and not monitor.closed:
                _tune(search, directory, journal, numbers, monitor)
    finally:
        journal.close()
    directory.stop.unlink(missing_ok=True)
    trials = [journal.trial(number) for number in range(search.planned)]
    done = all(trial.ended for trial in trials)
    try:
        result = write_result(search, directory, journal, done=done)
        if has_tensorboard():
            write_hparams(search, directory, journal)
        draw(search, journal, directory.path)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write to {directory.path}: {error.strerror}. Free some space, then continue with: paceline tune "
            f"--resume --run-dir {directory.path}. Finished trials are not run again."
        ) from error
    except LaunchError as error:
        monitor.print_status(str(error))
    if problem := conclude_mlflow_search(directory.path, result):
        monitor.print_status(f"MLflow has no best value of the search: {problem}")
    if stop_signals:
        return 130 if stop_signals[0] == signal.SIGINT else RESTART_EXIT_CODE
    if monitor.hopeless and not done:
        raise LaunchError(
            f"{describe_failures(monitor.failures)}\nThe search has stopped. Change its ranges or its task; for the "
            f"remaining trials all the same: paceline tune --resume --run-dir {directory.path}"
        )
    if not done and not monitor.spent:
        raise LaunchError(
            f"{sum(not t.ended for t in trials)} trials did not end: "
            f"{monitor.failure or 'Ray gave them up'}. Continue with: paceline tune --resume --run-dir "
            f"{directory.path}"
        )
    if (done or monitor.spent) and journal.best(search.metric_name, search.mode) is None:
        return 1
    return 1 if any(trial.state == "failed" for trial in trials) else 0


def require_room(ray: ModuleType, search: Search) -> None:
    """Refuse trials that no node of the cluster has resources for.

    Raises:
        LaunchError: they would wait for ever.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(node.get("CPU", 0) >= search.cpus and node.get("GPU", 0) >= search.gpus for node in nodes):
        available = ", ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
        raise LaunchError(
            f"no node has the resources for a trial of {search.cpus:g} CPUs and {search.gpus:g} GPUs; the nodes "
            f"have {available}. Reduce --cpus-per-trial or --gpus-per-trial."
        )


def _tune(
    search: Search,
    directory: SearchDirectory,
    journal: SearchJournal,
    numbers: Sequence[int],
    monitor: SearchMonitor,
) -> None:
    from ray import tune

    from paceline_tune.ray_adapter import JournalSearcher, TrialRun, make_scheduler

    # Ray's warnings and tracebacks help to debug Ray; the monitor reports how trials end.
    log = logging.FileHandler(directory.path / "ray.log", delay=True)
    log.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    logger = logging.getLogger("ray")
    logger.handlers = [log]
    logger.propagate = False
    # It warns about missing files that its own loggers would have written.
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    monitor.scheduler = make_scheduler(search, journal.results)
    with tempfile.TemporaryDirectory(prefix=own_prefix("tune"), ignore_cleanup_errors=True) as storage:
        try:
            # Not tune.Tuner, which pickles all its arguments.
            tune.run(
                TrialRun,
                name="search",
                storage_path=storage,
                num_samples=len(numbers),
                search_alg=JournalSearcher(
                    search, directory, journal, numbers, lambda: monitor.closed, lambda: monitor.concurrent
                ),
                scheduler=monitor.scheduler,
                resources_per_trial={"cpu": search.cpus, **({"gpu": search.gpus} if search.gpus else {})},
                reuse_actors=True,
                max_failures=_MAX_FAILURES,
                raise_on_failed_trial=False,
                callbacks=[monitor],
                verbose=0,
            )
        except (tune.TuneError, RuntimeError) as error:
            raise LaunchError(f"Ray Tune failed: {str(error).strip().splitlines()[-1]}") from error


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.exit(code)
