"""The record of a search: every trial, the result, and data for TensorBoard."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.core.config import config_from_mapping, select, to_flags
from paceline.core.files import ResilientAppendFile, read_json_lines, write_atomically
from paceline.launch.submit import task_command
from paceline.runs.directory import RunDirectory
from paceline.runs.metric_writers import begin_session, end_session
from paceline_tune.search import Search, SearchCost, SearchDirectory
from paceline_tune.space import Value, assignments

# --- The journal: one line per result, in the order in which trials were compared ---
#
# Between the results, regularly and at the end of each start, is a line with the costs so far; and a line with the
# parameters of each trial, if a sampler has chosen them by earlier results.


_log = logging.getLogger(__name__)

TrialState = Literal["waiting", "running", "stopped", "finished", "goal", "diverged", "failed"]
"""The state of a trial; "running" even if the search itself has stopped."""

ENDED: tuple[TrialState, ...] = ("stopped", "finished", "goal", "diverged", "failed")
"""stopped: ended early by the scheduler; goal: reached ``--stop``; diverged: its loss became NaN or infinite."""


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The result of a trial after an evaluation, or at its end.

    Attributes:
        metrics: of the last evaluation, by name; None for NaN.
        seconds: since the trial's previous result.
        clock_s: time of the search, over all its starts.
        place: node and process.
    """

    trial: int
    state: TrialState
    iteration: int
    step: int
    metrics: Mapping[str, float | None]
    seconds: float
    clock_s: float
    place: str = ""
    message: str = ""

    def value(self, metric: str) -> float | None:
        value = self.metrics.get(metric)
        return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True, kw_only=True)
class Spent:
    """The costs of a search so far, over all its starts.

    Attributes:
        clock_s: wall-clock time.
        trial_s: total time of all trials, including the time not covered by results: of running, interrupted
            and lost trials.
    """

    clock_s: float
    trial_s: float


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """The parameters of a trial that were chosen by earlier results, and the trial that it continues, if it does."""

    trial: int
    parameters: Mapping[str, Value]
    parent: int | None = None


@dataclass
class Trial:
    """A trial with its results.

    Attributes:
        placed: node and process of the last result.
        begun: whether it runs in this start of the search; always False when read from a journal.
        suggested: its parameters, if they were chosen by earlier results.
    """

    number: int
    results: list[TrialResult] = field(default_factory=list)
    placed: str = ""
    begun: bool = False
    suggested: Mapping[str, Value] | None = None
    parent: int | None = None

    def parameters(self, search: Search) -> Mapping[str, Value]:
        return search.parameters(self.number) if self.suggested is None else self.suggested

    @property
    def state(self) -> TrialState:
        if self.results:
            return self.results[-1].state
        return "running" if self.begun else "waiting"

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def iteration(self) -> int:
        return self.results[-1].iteration if self.results else 0

    @property
    def step(self) -> int:
        return self.results[-1].step if self.results else 0

    @property
    def seconds(self) -> float:
        return sum(result.seconds for result in self.results)

    def curve(self, metric: str) -> list[tuple[int, float]]:
        points = [(result.step, result.value(metric)) for result in self.results]
        return [(step, value) for step, value in dict(points).items() if value is not None]

    def best(self, metric: str, mode: str) -> float | None:
        values = [value for _, value in self.curve(metric)]
        return (max(values) if mode == "max" else min(values)) if values else None


@dataclass(frozen=True)
class Configuration:
    """The trials with the same parameters, in the order of their seeds, and the best value of each."""

    trials: tuple[Trial, ...]
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float:
        """The standard deviation between the seeds; 0 for one trial."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    def show(self) -> str:
        return f"{self.mean:.6g}" + (f" ± {self.spread:.2g}" if len(self.values) > 1 else "")


class SearchHistory:
    """All trials of a search, by its records in order.

    Attributes:
        unrecorded_s: time of trials that no result covers.
    """

    def __init__(self, records: Iterable[TrialResult | Spent | Suggestion]) -> None:
        self.trials: dict[int, Trial] = {}
        self.results: list[TrialResult] = []
        self.unrecorded_s = 0.0
        self._spent = Spent(clock_s=0.0, trial_s=0.0)
        for record in records:
            if isinstance(record, Spent):
                self._spent = record
            elif isinstance(record, Suggestion):
                trial = self.trial(record.trial)
                trial.suggested = record.parameters
                trial.parent = record.parent
            else:
                self.take(record)
        self.unrecorded_s = max(0.0, self._spent.trial_s - self._trial_s)

    def take(self, result: TrialResult) -> None:
        self.results.append(result)
        trial = self.trial(result.trial)
        trial.results.append(result)
        trial.placed = result.place or trial.placed

    def trial(self, number: int) -> Trial:
        return self.trials.setdefault(number, Trial(number))

    def lineage(self, trial: Trial) -> list[Trial]:
        """Return the trials that it continues, the first one first, and itself."""
        lineage = [trial]
        while (parent := lineage[0].parent) is not None:
            lineage.insert(0, self.trials[parent])
        return lineage

    @property
    def steps(self) -> int:
        """Return the steps of all trials, without those that they took over from others."""
        taken_over = (
            self.trials[trial.parent].step
            for trial in self.trials.values()
            if trial.parent is not None and trial.results
        )
        return sum(trial.step for trial in self.trials.values()) - sum(taken_over)

    @property
    def clock_s(self) -> float:
        return max((self._spent.clock_s, *(result.clock_s for result in self.results)))

    def cost(self, clock_s: float, gpus_per_trial: float) -> SearchCost:
        begun = sum(trial.state != "waiting" for trial in self.trials.values())
        return SearchCost(clock_s, begun, self._trial_s / 3600 * gpus_per_trial)

    @property
    def _trial_s(self) -> float:
        return sum(trial.seconds for trial in self.trials.values()) + self.unrecorded_s

    def ranking(self, metric: str, mode: str, repeats: int = 1) -> list[Configuration]:
        """Return the configurations by their mean values, the best first, by number among equals.

        Failed and diverged trials are excluded, since a full training would end in the same way; and so are
        configurations of which not every trial has a value.
        """
        sign = -1.0 if mode == "max" else 1.0
        configurations: dict[int, list[tuple[Trial, float]]] = {}
        for number in sorted(self.trials):
            trial = self.trials[number]
            value = None if trial.state in ("failed", "diverged") else trial.best(metric, mode)
            if value is not None:
                configurations.setdefault(number // repeats, []).append((trial, value))
        complete = [
            Configuration(*zip(*pairs, strict=True)) for pairs in configurations.values() if len(pairs) == repeats
        ]
        return sorted(complete, key=lambda configuration: sign * configuration.mean)

    def best(self, metric: str, mode: str, repeats: int = 1) -> Trial | None:
        """Return the trial with the best value; with repeats the first one of the best configuration."""
        ranking = self.ranking(metric, mode, repeats)
        return ranking[0].trials[0] if ranking else None


class SearchJournal(SearchHistory):
    """The history of an active search, appended to ``path`` in whole lines."""

    def __init__(self, path: Path) -> None:
        super().__init__(_read(path))
        self._file = ResilientAppendFile(path, _log.warning)

    def add(self, result: TrialResult) -> None:
        """Record a result; it is being written to disk on return."""
        self.take(result)
        self._write(result)

    def add_spent(self, clock_s: float, running_s: float = 0.0) -> None:
        """Record the costs so far; ``running_s`` is the time of running trials since their start or last result."""
        trial_s = self._trial_s + running_s
        self._spent = Spent(clock_s=round(clock_s, 3), trial_s=round(trial_s, 3))
        self._write(self._spent)

    def suggest(self, number: int, parameters: Mapping[str, Value], parent: int | None = None) -> None:
        trial = self.trial(number)
        trial.suggested = parameters
        trial.parent = parent
        self._write(Suggestion(trial=number, parameters=parameters, parent=parent))

    def _write(self, record: TrialResult | Spent | Suggestion) -> None:
        self._file.write((json.dumps(dataclasses.asdict(record), allow_nan=False) + "\n").encode())

    def close(self) -> None:
        self._file.close()


def read_trials(path: Path) -> SearchHistory:
    """Read a journal without changing it."""
    return SearchHistory(_read(path))


def _read(path: Path) -> Iterator[TrialResult | Spent | Suggestion]:
    names = {f.name for f in dataclasses.fields(TrialResult)}
    for record in read_json_lines(path):
        if record.keys() == {"clock_s", "trial_s"}:
            yield Spent(**record)
        elif record.keys() == {"trial", "parameters", "parent"}:
            yield Suggestion(**record)
        elif record.keys() <= names and {"trial", "state", "iteration", "step", "metrics"} <= record.keys():
            yield TrialResult(**record)


MAX_FAILED = 5
"""If this many trials have failed and none has succeeded, a search stops: something else than the values is wrong."""


def shorten(state: TrialState, message: str) -> str:
    """Return why a trial ended; without the advice for a run with a NaN loss, which should continue."""
    return message.partition(". ")[0] if state == "diverged" else message


def describe_failure(parameters: Mapping[str, Value], state: TrialState, message: str) -> str:
    """Describe why a configuration could not be trained."""
    return f"{', '.join(assignments(parameters))}: {shorten(state, message)}"


def describe_failures(failures: Sequence[str]) -> str:
    """Describe why none of several configurations could be trained."""
    shown = "".join(f"\n  {failure}" for failure in failures)
    return f"no configuration could be trained; tried, and failed, were:{shown}"


# --- ``result.json``, and the command that trains the best configuration ---


_LOCAL_OPTIONS = select(lambda its: its.from_launcher and its.scope in ("start", "process"))
"""Options of the machine, which a cluster's launcher gives and this command must give itself."""


def command_of(search: Search, trial: Trial) -> str:
    """Return the ``paceline train`` command that fully trains a trial's configuration, with the same bits."""
    options = search.run_options(trial.number, trial.parameters(search))
    config = config_from_mapping(options, "tune.json")
    words = ["paceline", *task_command(config, Path("runs/best"), "python")[3:]]
    words += to_flags({name: options[name] for name in _LOCAL_OPTIONS if name in options})
    return shlex.join(words)


def write_result(search: Search, directory: SearchDirectory, journal: SearchHistory, *, done: bool) -> dict[str, Any]:
    """Write ``result.json``, and return its content; ``done`` if all planned trials have ended."""
    trials = [journal.trials[number] for number in sorted(journal.trials)]
    ranking = journal.ranking(search.metric_name, search.mode, search.repeats)
    best = _configuration(search, ranking[0]) if ranking else None
    clock_s = journal.clock_s
    cost = journal.cost(clock_s, search.gpus)
    full_steps = None if search.total_steps is None else search.total_steps * search.whole_trials
    result = {
        "search": str(directory.path),
        "task": search.options["task"],
        "metric": search.metric,
        "done": done,
        "planned": search.planned,
        "states": dict(Counter(trial.state for trial in trials)),
        "best": None if best is None else best | _how_to_get(search, directory, journal, ranking[0].trials[0]),
        "steps": journal.steps,
        "steps_without_early_stops": full_steps,
        "seconds": round(clock_s, 3),
        "gpu_hours": round(cost.gpu_hours, 4),
        "budget": None if search.limit is None else search.limit.show(cost),
        **({"configurations": [_configuration(search, each) for each in ranking]} if search.repeats > 1 else {}),
        "trials": [_trial(search, trial) for trial in trials],
    }
    write_atomically(directory.result, (json.dumps(result, indent=2) + "\n").encode())
    return result


def _how_to_get(search: Search, directory: SearchDirectory, journal: SearchHistory, trial: Trial) -> dict[str, Any]:
    """Return the command that gives the trial's model; of one that continues others also their values."""
    if search.scheduler != "pbt":
        return {"command": command_of(search, trial)}
    lineage = journal.lineage(trial)
    begins = (0, *(each.step for each in lineage))
    schedule = [
        {"trial": each.number, "from_step": step, "parameters": dict(each.parameters(search))}
        for each, step in zip(lineage, begins, strict=False)
    ]
    return {"command": shlex.join(["paceline", "export", str(directory.trial(trial.number))]), "schedule": schedule}


def _configuration(search: Search, configuration: Configuration) -> dict[str, Any]:
    """Describe a configuration: its first trial, with the mean of the metric over all of them."""
    first = _trial(search, configuration.trials[0])
    if search.repeats == 1:
        return first
    values = {
        f"{trial.number:05d}": value for trial, value in zip(configuration.trials, configuration.values, strict=True)
    }
    return first | {search.metric_name: configuration.mean, "spread": configuration.spread, "values": values}


def _trial(search: Search, trial: Trial) -> dict[str, Any]:
    return {
        "trial": trial.number,
        "state": trial.state,
        "parameters": dict(trial.parameters(search)),
        search.metric_name: trial.best(search.metric_name, search.mode),
        "iterations": trial.iteration,
        "steps": trial.step,
        "seconds": round(trial.seconds, 3),
        "run": f"trials/{trial.number:05d}",
        **({"message": trial.results[-1].message} if trial.results and trial.results[-1].message else {}),
    }


# --- TensorBoard's HParams page: ``tensorboard --logdir DIRECTORY`` ---


_FILE = "events.out.tfevents.0000000000.hparams"
_SUCCESS_STATES = ("finished", "stopped", "goal")


def write_hparams(search: Search, directory: SearchDirectory, journal: SearchHistory) -> None:
    """Write the description of the search with its best value, and the parameters of each trial that has results.

    The curves are in the trials' own event files.
    """
    from tensorboard.plugins.hparams.api_pb2 import HParamInfo

    from paceline_trackers.tracking_tools import describe_experiment, write_events

    about = f"paceline tune {search.options['task']}"
    scalars = []
    if ranking := journal.ranking(search.metric_name, search.mode, search.repeats):
        scalars = [(f"best/val/{search.metric_name}", ranking[0].mean)]
        about += f"; best: trial {ranking[0].trials[0].number:05d}, {search.metric_name} {ranking[0].show()}"
    infos = [HParamInfo(name=dimension.name) for dimension in search.parsed_space.dimensions]
    description = describe_experiment(about, infos, [f"eval/val/{search.metric_name}"])
    write_events(directory.tensorboard / _FILE, len(journal.trials), [description], scalars)
    for trial in journal.trials.values():
        if trial.results:
            row = [begin_session(trial.parameters(search)), end_session(succeeded=trial.state in _SUCCESS_STATES)]
            write_events(RunDirectory(directory.trial(trial.number)).tensorboard / _FILE, 0, row)
