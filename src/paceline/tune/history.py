"""The record of a search: every trial, the result, and TensorBoard's view."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.core.config import config_from_mapping, to_flags
from paceline.core.files import ResilientAppendFile, read_json_lines, write_atomically
from paceline.core.option_sets import select
from paceline.launch.submit import task_command
from paceline.runs.directory import RunDirectory
from paceline.tune.search import Search, SearchCost, SearchDirectory, assignments

# --- What came of each trial so far: a line for each result, in the order in which trials were compared ---
#
# Between them, now and then and at the end of each start, is a line of what the search had spent by then.


_log = logging.getLogger(__name__)

TrialState = Literal["waiting", "running", "stopped", "finished", "goal", "diverged", "failed"]
"""Where a trial stands; "running" also where the search itself has stopped."""

ENDED: tuple[TrialState, ...] = ("stopped", "finished", "goal", "diverged", "failed")
"""stopped: others were better; goal: ``--stop`` was reached; diverged: its loss became NaN or infinite."""


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """What is known of a trial after an evaluation, or at its end.

    Attributes:
        trial: its number.
        state: what became of it.
        iteration: evaluations so far.
        step: steps at the last of them.
        metrics: of it, by name; null where a number is NaN.
        seconds: that the trial took since the result before.
        clock_s: seconds that the search has taken, over all its starts.
        place: machine and process.
        message: why it failed.
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
        """The metric's value, where there is one."""
        found = self.metrics.get(metric)
        return found if found is not None and math.isfinite(found) else None


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What a search had spent at some moment, over all its starts.

    Attributes:
        clock_s: seconds that it had taken.
        trial_s: seconds of all trials together, with those that no result says: of trials that were at work,
            were interrupted, or were lost.
    """

    clock_s: float
    trial_s: float


@dataclass
class Trial:
    """A trial, as its results tell.

    Attributes:
        number: of the trial.
        results: in their order.
        placed: machine and process of the last one.
        begun: it runs in this start of the search; a journal that was read says nothing of that.
    """

    number: int
    results: list[TrialResult] = field(default_factory=list)
    placed: str = ""
    begun: bool = False

    @property
    def state(self) -> TrialState:
        """Where it stands."""
        if self.results:
            return self.results[-1].state
        return "running" if self.begun else "waiting"

    @property
    def ended(self) -> bool:
        """Whether it is not to be run again."""
        return self.state in ENDED

    @property
    def iteration(self) -> int:
        """Evaluations so far."""
        return self.results[-1].iteration if self.results else 0

    @property
    def step(self) -> int:
        """Steps at the last evaluation."""
        return self.results[-1].step if self.results else 0

    @property
    def seconds(self) -> float:
        """That it took."""
        return sum(result.seconds for result in self.results)

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """Step and value of each evaluation."""
        points = [(result.step, result.value(metric)) for result in self.results]
        return [(step, value) for step, value in dict(points).items() if value is not None]

    def last(self, metric: str) -> float | None:
        """The latest value."""
        curve = self.curve(metric)
        return curve[-1][1] if curve else None

    def best(self, metric: str, mode: str) -> float | None:
        """The best value on the way."""
        values = [value for _, value in self.curve(metric)]
        return (max(values) if mode == "max" else min(values)) if values else None


class SearchHistory:
    """What is known of all trials of a search.

    Args:
        records: in their order.

    Attributes:
        trials: by their numbers.
        results: in their order.
        unsaid_s: seconds of trials that no result says.
    """

    def __init__(self, records: Iterable[TrialResult | Spent]) -> None:
        self.trials: dict[int, Trial] = {}
        self.results: list[TrialResult] = []
        self.unsaid_s = 0.0
        self._spent = Spent(clock_s=0.0, trial_s=0.0)
        for record in records:
            if isinstance(record, Spent):
                self._spent = record
            else:
                self.take(record)
        self.unsaid_s = max(0.0, self._spent.trial_s - self._trial_s)

    def take(self, result: TrialResult) -> None:
        """Add a result."""
        self.results.append(result)
        trial = self.trial(result.trial)
        trial.results.append(result)
        trial.placed = result.place or trial.placed

    def trial(self, number: int) -> Trial:
        """A trial, which may have no result yet."""
        return self.trials.setdefault(number, Trial(number))

    @property
    def clock_s(self) -> float:
        """Seconds that the search had taken by the last record."""
        return max((self._spent.clock_s, *(result.clock_s for result in self.results)))

    def cost(self, clock_s: float, gpus_per_trial: float) -> SearchCost:
        """What was spent.

        Args:
            clock_s: seconds of the search.
            gpus_per_trial: that each trial held.
        """
        begun = sum(trial.state != "waiting" for trial in self.trials.values())
        return SearchCost(clock_s, begun, self._trial_s / 3600 * gpus_per_trial)

    @property
    def _trial_s(self) -> float:
        return sum(trial.seconds for trial in self.trials.values()) + self.unsaid_s

    def best(self, metric: str, mode: str) -> Trial | None:
        """The trial with the best value; among equals the one with the lowest number.

        One that failed or diverged is none: to train it whole would end in the same way.
        """
        sign = 1.0 if mode == "max" else -1.0
        rated = [
            (sign * value, -t.number)
            for t in self.trials.values()
            if t.state not in ("failed", "diverged") and (value := t.best(metric, mode)) is not None
        ]
        return self.trials[-max(rated)[1]] if rated else None


class SearchJournal(SearchHistory):
    """The results of a search at work; the file grows by whole lines only.

    Args:
        path: ``journal.jsonl``.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(_read(path))
        self._file = ResilientAppendFile(path, _log.warning)

    def add(self, result: TrialResult) -> None:
        """Record a result: it is on its way to disk on return."""
        self.take(result)
        self._write(result)

    def add_spent(self, clock_s: float, running_s: float = 0.0) -> None:
        """Record what was spent until now.

        Args:
            clock_s: seconds of the search.
            running_s: seconds of the trials at work, since they began or gave their last results.
        """
        trial_s = self._trial_s + running_s
        self._spent = Spent(clock_s=round(clock_s, 3), trial_s=round(trial_s, 3))
        self._write(self._spent)

    def _write(self, record: TrialResult | Spent) -> None:
        self._file.write((json.dumps(dataclasses.asdict(record), allow_nan=False) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_trials(path: Path) -> SearchHistory:
    """What a journal says, without touching it."""
    return SearchHistory(_read(path))


def _read(path: Path) -> Iterator[TrialResult | Spent]:
    names = {f.name for f in dataclasses.fields(TrialResult)}
    for record in read_json_lines(path):
        if record.keys() == {"clock_s", "trial_s"}:
            yield Spent(**record)
        elif record.keys() <= names and {"trial", "state", "iteration", "step", "metrics"} <= record.keys():
            yield TrialResult(**record)


# --- What a search has found: ``result.json``, and the command that trains the best configuration ---


_START = select(lambda its: its.from_launcher and its.scope in ("start", "process"))
"""Options that a launcher gives to each machine, and this command to its own."""


def command_of(search: Search, number: int) -> str:
    """The ``paceline train`` that trains a trial's configuration to its end, with the trial's own bits."""
    options = {**search.options}
    options["set"] = [*options.get("set", ()), *assignments(search.parsed_space.parameters(number))]
    config = config_from_mapping(options, "tune.json")
    words = ["paceline", *task_command(config, Path("runs/best"), "python")[3:]]
    words += to_flags({name: options[name] for name in _START if name in options})
    return shlex.join(words)


def write_result(search: Search, directory: SearchDirectory, journal: SearchHistory, *, done: bool) -> dict[str, Any]:
    """Write ``result.json``, and return its content.

    Args:
        search: what was searched.
        directory: its directory.
        journal: what is known of its trials.
        done: whether all trials that were to run have ended.
    """
    trials = [journal.trials[number] for number in sorted(journal.trials)]
    best = journal.best(search.metric_name, search.mode)
    clock_s = journal.clock_s
    cost = journal.cost(clock_s, search.gpus)
    steps = sum(trial.step for trial in trials)
    whole = None if search.total_steps is None else search.total_steps * search.planned
    result = {
        "search": str(directory.path),
        "task": search.options["task"],
        "metric": search.metric,
        "done": done,
        "planned": search.planned,
        "states": dict(Counter(trial.state for trial in trials)),
        "best": None if best is None else _trial(search, best) | {"command": command_of(search, best.number)},
        "steps": steps,
        "steps_without_early_stops": whole,
        "seconds": round(clock_s, 3),
        "gpu_hours": round(cost.gpu_hours, 4),
        "budget": None if search.limit is None else search.limit.show(cost),
        "trials": [_trial(search, trial) for trial in trials],
    }
    write_atomically(directory.result, (json.dumps(result, indent=2) + "\n").encode())
    return result


def _trial(search: Search, trial: Trial) -> dict[str, Any]:
    return {
        "trial": trial.number,
        "state": trial.state,
        "parameters": search.parsed_space.parameters(trial.number),
        search.metric_name: trial.best(search.metric_name, search.mode),
        "iterations": trial.iteration,
        "steps": trial.step,
        "seconds": round(trial.seconds, 3),
        "run": f"trials/{trial.number:05d}",
        **({"message": message} if (message := _message(trial)) else {}),
    }


def _message(trial: Trial) -> str:
    return trial.results[-1].message if trial.results else ""


# --- A search for TensorBoard's HParams page: ``tensorboard --logdir DIRECTORY`` ---
#
# Each trial's run has its curves there already. What is added says which parameters it had; an event file, as
# TensorBoard's own ``hparams`` plugin reads it (``tensorboard/plugins/hparams/api.proto``).


_FILE = "events.out.tfevents.0000000000.hparams"
_ENDED_WELL = ("finished", "stopped", "goal")


def write_hparams(search: Search, directory: SearchDirectory, journal: SearchHistory) -> None:
    """Write the search's description, and the parameters of each trial that has begun."""
    from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

    names = [dimension.field for dimension in search.parsed_space.dimensions]
    tag = f"eval/val/{search.metric_name}"
    experiment = api_pb2.Experiment(
        description=f"paceline tune {search.options['task']}",
        hparam_infos=[api_pb2.HParamInfo(name=name) for name in names],
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag))],
    )
    described = plugin_data_pb2.HParamsPluginData(experiment=experiment, version=0)
    _write(directory.tensorboard, [("_hparams_/experiment", described)])
    for trial in journal.trials.values():
        if not trial.results:
            continue
        start = plugin_data_pb2.SessionStartInfo(group_name=f"{trial.number:05d}")
        for name, value in search.parsed_space.parameters(trial.number).items():
            if isinstance(value, str):
                start.hparams[name].string_value = value
            else:
                start.hparams[name].number_value = float(value)
        status = api_pb2.STATUS_SUCCESS if trial.state in _ENDED_WELL else api_pb2.STATUS_UNKNOWN
        end = plugin_data_pb2.SessionEndInfo(status=status)
        _write(
            RunDirectory(directory.trial(trial.number)).tensorboard,
            [
                (
                    "_hparams_/session_start_info",
                    plugin_data_pb2.HParamsPluginData(session_start_info=start, version=0),
                ),
                (
                    "_hparams_/session_end_info",
                    plugin_data_pb2.HParamsPluginData(session_end_info=end, version=0),
                ),
            ],
        )


def _write(directory: Path, contents: list[tuple[str, Any]]) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.summary.writer.record_writer import RecordWriter

    events = [Event(file_version="brain.Event:2")]
    for tag, content in contents:
        plugin = SummaryMetadata.PluginData(plugin_name="hparams", content=content.SerializeToString())
        metadata = SummaryMetadata(plugin_data=plugin)
        events.append(Event(summary=Summary(value=[Summary.Value(tag=tag, metadata=metadata)])))
    framed = io.BytesIO()
    for event in events:
        RecordWriter(framed).write(event.SerializeToString())
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / _FILE, framed.getvalue())
