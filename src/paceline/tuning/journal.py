"""What came of each trial so far: a line for each result, in the order in which trials were compared.

Between them, now and then and at the end of each start, is a line of what the search had spent by then.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from paceline.monitoring.patient_file import PatientFile
from paceline.run_directory import read_json_lines
from paceline.tuning.budget import Cost

_log = logging.getLogger(__name__)

TrialState = Literal["waiting", "running", "stopped", "finished", "goal", "diverged", "failed"]
"""Where a trial stands; "running" also where the search itself has stopped."""

ENDED: tuple[TrialState, ...] = ("stopped", "finished", "goal", "diverged", "failed")
"""stopped: others were better; goal: ``--stop`` was reached; diverged: its loss became NaN or infinite."""


@dataclass(frozen=True, kw_only=True)
class Result:
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
    results: list[Result] = field(default_factory=list)
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


class Trials:
    """What is known of all trials of a search.

    Args:
        records: in their order.

    Attributes:
        trials: by their numbers.
        results: in their order.
        unsaid_s: seconds of trials that no result says.
    """

    def __init__(self, records: Iterable[Result | Spent]) -> None:
        self.trials: dict[int, Trial] = {}
        self.results: list[Result] = []
        self.unsaid_s = 0.0
        self._spent = Spent(clock_s=0.0, trial_s=0.0)
        for record in records:
            if isinstance(record, Spent):
                self._spent = record
            else:
                self.take(record)
        self.unsaid_s = max(0.0, self._spent.trial_s - self._trial_s)

    def take(self, result: Result) -> None:
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

    def cost(self, clock_s: float, gpus_per_trial: float) -> Cost:
        """What was spent.

        Args:
            clock_s: seconds of the search.
            gpus_per_trial: that each trial held.
        """
        begun = sum(trial.state != "waiting" for trial in self.trials.values())
        return Cost(clock_s, begun, self._trial_s / 3600 * gpus_per_trial)

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


class Journal(Trials):
    """The results of a search at work; the file grows by whole lines only.

    Args:
        path: ``journal.jsonl``.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(_read(path))
        self._file = PatientFile(path, _log.warning)

    def add(self, result: Result) -> None:
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

    def _write(self, record: Result | Spent) -> None:
        self._file.write((json.dumps(dataclasses.asdict(record), allow_nan=False) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_trials(path: Path) -> Trials:
    """What a journal says, without touching it."""
    return Trials(_read(path))


def _read(path: Path) -> Iterator[Result | Spent]:
    names = {f.name for f in dataclasses.fields(Result)}
    for record in read_json_lines(path):
        if record.keys() == {"clock_s", "trial_s"}:
            yield Spent(**record)
        elif record.keys() <= names and {"trial", "state", "iteration", "step", "metrics"} <= record.keys():
            yield Result(**record)
