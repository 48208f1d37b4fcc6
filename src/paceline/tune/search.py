"""What a search is: its space, its budget, and its record."""

from __future__ import annotations

import fcntl
import json
import math
import random
import re
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from paceline.core.config import RunConfig, config_from_mapping
from paceline.core.errors import ConfigError, RunDirectoryError, RunInUseError
from paceline.core.files import write_atomically
from paceline.core.options import parse_best, parse_duration_s

# --- What is searched: ``lr=log:1e-3:1``, and the parameters of each trial ---
#
# Trial k's parameters follow from the seed and k alone, so that a search which goes on after a kill means the
# same trials. Where there are only so many combinations, they come in a shuffled order, and none comes twice.


Value = float | int | str
Kind = Literal["log", "uniform", "int", "choice"]

FORMS = "NAME=log:LOW:HIGH, NAME=uniform:LOW:HIGH, NAME=int:LOW:HIGH or NAME=choice:A,B,C"
_MOST_LISTED = 100_000
_DIGITS = 4


@dataclass(frozen=True)
class Dimension:
    """One field of the task, and what values it may have.

    Attributes:
        field: its name.
        kind: how a value is drawn; "log" is uniform in the logarithm.
        values: the lowest and the highest value; with "choice" all of them, as text.
    """

    field: str
    kind: Kind
    values: tuple[Value, ...]

    @property
    def options(self) -> Sequence[Value] | None:
        """All values, where they can be counted."""
        if self.kind == "choice":
            return self.values
        return range(int(self.values[0]), int(self.values[1]) + 1) if self.kind == "int" else None

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest value of a range."""
        return float(self.values[0]), float(self.values[1])

    def draw(self, random_number: random.Random) -> Value:
        """A value; floats have four significant digits, so that a person can copy them."""
        if self.options is not None:
            return random_number.choice(self.options)
        low, high = self.bounds
        if self.kind == "log":
            drawn = math.exp(random_number.uniform(math.log(low), math.log(high)))
        else:
            drawn = random_number.uniform(low, high)
        return min(max(float(f"{drawn:.{_DIGITS}g}"), low), high)


@dataclass(frozen=True)
class Space:
    """All dimensions of a search, and what decides the order in which values come.

    Attributes:
        dimensions: at least one.
        seed: decides what is drawn.
    """

    dimensions: tuple[Dimension, ...]
    seed: int

    @property
    def size(self) -> int | None:
        """How many combinations there are; None where they cannot be counted."""
        counts = [None if d.options is None else len(d.options) for d in self.dimensions]
        return math.prod(count for count in counts if count is not None) if None not in counts else None

    @cached_property
    def _order(self) -> Sequence[int] | None:
        """The numbers of all combinations, shuffled."""
        if self.size is None or self.size > _MOST_LISTED:
            return None
        order = list(range(self.size))
        random.Random(f"{self.seed}").shuffle(order)
        return order

    def parameters(self, number: int) -> dict[str, Value]:
        """The parameters of a trial, by field.

        Args:
            number: from 0; below ``size`` where there is one.
        """
        if self._order is None:
            return {d.field: d.draw(random.Random(f"{self.seed}/{number}/{d.field}")) for d in self.dimensions}
        rest, chosen = self._order[number], {}
        for dimension in self.dimensions:
            assert dimension.options is not None
            rest, place = divmod(rest, len(dimension.options))
            chosen[dimension.field] = dimension.options[place]
        return chosen


def parse_space(texts: Sequence[str], seed: int) -> Space:
    """Read what ``--search`` says.

    Raises:
        ConfigError: one of the texts has another form, or a field comes twice.
    """
    if not texts:
        raise ConfigError(f"there is nothing to search. Say what: --search {FORMS}.")
    dimensions = tuple(map(_parse, texts))
    names = [dimension.field for dimension in dimensions]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise ConfigError(f"--search names {', '.join(twice)} twice. Give each field one range.")
    return Space(dimensions, seed)


def _parse(text: str) -> Dimension:
    field, _, how = text.partition("=")
    kind, _, rest = how.partition(":")
    if not field.strip().isidentifier():
        raise ConfigError(f"--search {text!r}: write {FORMS}.")
    match kind.strip():
        case "choice":
            values = tuple(word.strip() for word in rest.split(","))
            if "" in values or len(set(values)) < len(values):
                raise ConfigError(f"--search {text!r}: list different values, such as {field}=choice:32,64.")
            return Dimension(field.strip(), "choice", values)
        case "log" | "uniform" as chosen:
            low, high = _bounds(text, rest, float)
            if chosen == "log" and float(low) <= 0:
                raise ConfigError(f"--search {text!r}: a logarithmic range must begin above 0.")
            return Dimension(field.strip(), chosen, (low, high))
        case "int":
            return Dimension(field.strip(), "int", _bounds(text, rest, int))
    raise ConfigError(f"--search {text!r}: there is no kind {kind.strip()!r}. Write {FORMS}.")


def _bounds(text: str, rest: str, number: type[float] | type[int]) -> tuple[Value, Value]:
    low_text, separator, high_text = rest.partition(":")
    try:
        low, high = number(low_text), number(high_text)
    except ValueError:
        low, high = math.nan, math.nan
    if not separator or not (math.isfinite(low) and math.isfinite(high) and low < high):
        what = "whole numbers" if number is int else "numbers"
        raise ConfigError(f"--search {text!r}: give two {what}, LOW:HIGH, the lower one first.")
    return low, high


def assignments(parameters: Mapping[str, Value]) -> tuple[str, ...]:
    """Parameters as ``--set`` takes them."""
    return tuple(f"{name}={value}" for name, value in parameters.items())


# --- What a search may cost: ``2h``, ``100trials``, ``50gpu-h``, ``$200`` ---


WARN_AT = (0.5, 0.8, 0.95)
Unit = Literal["seconds", "trials", "gpu-h", "$"]


@dataclass(frozen=True)
class SearchCost:
    """What was spent, or is going to be.

    Attributes:
        seconds: of the clock.
        trials: that were begun.
        gpu_hours: of all trials together.
    """

    seconds: float = 0.0
    trials: int = 0
    gpu_hours: float = 0.0


@dataclass(frozen=True)
class SearchBudget:
    """The most that a search may spend.

    Attributes:
        amount: in ``unit``.
        unit: seconds of the clock, trials, GPU hours, or dollars.
        price_per_hour: dollars for an hour of the clock, where the unit is dollars.
    """

    amount: float
    unit: Unit
    price_per_hour: float | None = None

    def used(self, cost: SearchCost) -> float:
        """The part of the budget that ``cost`` is; above 1 where it is more."""
        return self._in_unit(cost) / self.amount

    def show(self, cost: SearchCost) -> str:
        """A cost in the budget's unit, beside the budget."""
        spent = self._in_unit(cost)
        match self.unit:
            case "seconds":
                return f"{show_seconds(spent)} of {show_seconds(self.amount)}"
            case "$":
                return f"${spent:.2f} of ${self.amount:.2f}"
        return f"{spent:.4g} of {self.amount:g} {self.unit}"

    def _in_unit(self, cost: SearchCost) -> float:
        match self.unit:
            case "seconds":
                return cost.seconds
            case "trials":
                return cost.trials
            case "gpu-h":
                return cost.gpu_hours
        assert self.price_per_hour is not None
        return cost.seconds / 3600 * self.price_per_hour


def parse_budget(text: str, price_per_hour: float | None, gpus_per_trial: float) -> SearchBudget:
    """Read what ``--budget`` says.

    Raises:
        ConfigError: it has another form, or says nothing here.
    """
    if price_per_hour is not None and (price_per_hour <= 0 or not text.startswith("$")):
        raise ConfigError(f"--price-per-hour {price_per_hour:g} needs a --budget in dollars, such as $200.")
    match = re.fullmatch(r"(\$?)(\d+(?:\.\d+)?)\s*(trials?|gpu-h|s|sec|min|h)?", text.strip())
    if match is None or bool(match[1]) == bool(match[3]) or float(match[2]) <= 0:
        raise ConfigError(f"--budget must be such as 2h, 100trials, 50gpu-h or $200, but is {text!r}.")
    if match[1]:
        if price_per_hour is None:
            raise ConfigError(
                f"--budget {text}: say what an hour of the machines costs, in dollars: --price-per-hour 3.5."
            )
        return SearchBudget(float(match[2]), "$", price_per_hour)
    if match[3].startswith("trial"):
        if float(match[2]) % 1:
            raise ConfigError(f"--budget {text}: trials are whole.")
        return SearchBudget(float(match[2]), "trials")
    if match[3] == "gpu-h":
        if not gpus_per_trial:
            raise ConfigError(f"--budget {text}: trials use no GPU. Say --gpus-per-trial, or give hours.")
        return SearchBudget(float(match[2]), "gpu-h")
    return SearchBudget(parse_duration_s(text.strip(), "budget"), "seconds")


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """What a search is going to cost, from what a trial's first steps or rung took.

    Attributes:
        trial: one whole trial.
        search: all of them, with those that stop early.
        concurrent: trials at a time.
    """

    trial: SearchCost
    search: SearchCost
    concurrent: int


def estimate(
    *,
    evaluations: int,
    seconds_per_evaluation: float,
    trials: int,
    rungs: tuple[int, ...],
    reduction: float,
    concurrent: int,
    gpus_per_trial: float,
) -> CostEstimate:
    """What a search will cost.

    Of the trials that reach a rung, one in ``reduction`` goes on (Li et al., "A System for Massively Parallel
    Hyperparameter Tuning", https://arxiv.org/abs/1810.05934). The asynchronous form lets some more go on,
    which are not known before.

    Args:
        evaluations: of a whole trial.
        seconds_per_evaluation: steps up to it included.
        trials: how many begin.
        rungs: after which evaluations trials are compared.
        reduction: eta.
        concurrent: trials at a time.
        gpus_per_trial: that each holds.
    """
    trial_s = evaluations * seconds_per_evaluation
    total, left, done = 0.0, float(trials), 0
    for rung in rungs:
        if rung >= evaluations:
            break
        total += left * (rung - done)
        left, done = max(1.0, left / reduction), rung
    total += left * (evaluations - done)
    work_s = total * seconds_per_evaluation
    clock_s = max(work_s / min(concurrent, trials), trial_s)
    return CostEstimate(
        trial=SearchCost(trial_s, 1, trial_s / 3600 * gpus_per_trial),
        search=SearchCost(clock_s, trials, work_s / 3600 * gpus_per_trial),
        concurrent=concurrent,
    )


def require_room(budget: SearchBudget, estimated: CostEstimate, text: str) -> None:
    """Refuse a budget that not even one trial fits into.

    Raises:
        ConfigError: it is below what one trial costs.
    """
    if budget.used(estimated.trial) > 1:
        raise ConfigError(
            f"--budget {text} is less than one whole trial takes, which is about "
            f"{budget.show(estimated.trial)}. Give more, or shorter trials (--epochs, --max-steps)."
        )


def show_seconds(seconds: float) -> str:
    """Seconds for people: 42 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


# --- A search: what was asked for, and its directory ---
#
# ::
#
#     tune.json         everything resolved: the task, its options, the space, the scheduler, the budget
#     journal.jsonl     one record for each result, in the order in which they were compared; what was spent
#     trials/00003/     trial 3: a run's directory, which paceline resume, runs and audit take
#     tensorboard/      each trial's hyperparameters with its results
#     parallel.svg  curves.svg
#     result.json       the best trial, and how every one ended


SchedulerName = Literal["asha", "none"]

_PATIENCE_S = 30.0
_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is searched, and how; the content of ``tune.json``.

    Attributes:
        options: of each trial's run, as ``paceline train`` knows them: task, seed, epochs, nproc, ...
        space: what ``--search`` said.
        trials: how many, at most.
        scheduler: what ends trials early.
        grace_period: evaluations that every trial has.
        reduction_factor: one in so many trials passes a rung.
        metric: ``NAME:min`` or ``NAME:max``, of the validation split.
        stop: values at which a trial has done enough, by metric.
        cpus: CPUs that each trial holds.
        gpus: GPUs that each trial holds.
        budget: what ``--budget`` said.
        price_per_hour: dollars for an hour of the machines.
        evaluations: of a whole trial; None where nobody knows.
        total_steps: of a whole trial; None where nobody knows.
        seconds_per_evaluation: with the steps before it, as measured here before the search.
        workdir: where the task's file is looked for.
    """

    options: Mapping[str, Any]
    space: tuple[str, ...]
    trials: int
    metric: str
    scheduler: SchedulerName = "asha"
    grace_period: int = 1
    reduction_factor: float = 4.0
    stop: Mapping[str, float] = field(default_factory=dict)
    cpus: float = 1.0
    gpus: float = 0.0
    budget: str | None = None
    price_per_hour: float | None = None
    evaluations: int | None = None
    total_steps: int | None = None
    seconds_per_evaluation: float | None = None
    workdir: str = ""

    @property
    def config(self) -> RunConfig:
        """The options that all trials have."""
        return config_from_mapping(dict(self.options), "tune.json")

    @cached_property
    def parsed_space(self) -> Space:
        """What is searched."""
        return parse_space(self.space, int(self.options.get("seed", 0)))

    @property
    def metric_name(self) -> str:
        """The metric that decides."""
        return parse_best(self.metric)[0]

    @property
    def mode(self) -> Literal["min", "max"]:
        """Whether it is to be small or large."""
        return parse_best(self.metric)[1]

    @property
    def limit(self) -> SearchBudget | None:
        """The budget."""
        return None if self.budget is None else parse_budget(self.budget, self.price_per_hour, self.gpus)

    @property
    def planned(self) -> int:
        """How many trials there will be: as asked for, as the budget and the space allow."""
        limit, size = self.limit, self.parsed_space.size
        most = [self.trials]
        if limit is not None and limit.unit == "trials":
            most.append(int(limit.amount))
        return min([*most, *([] if size is None else [size])])

    @property
    def rungs(self) -> tuple[int, ...]:
        """After which evaluations trials are compared, the first one first."""
        if self.scheduler == "none" or self.evaluations is None:
            return ()
        left = [float(self.grace_period)]
        while left[-1] < self.evaluations:
            left.append(self.grace_period * self.reduction_factor ** len(left))
        found = []
        for evaluation in range(self.grace_period, self.evaluations):
            # ASHA compares once an evaluation, at the highest rung not compared at yet.
            if reached := bisect_right(left, evaluation):
                left.pop(reached - 1)
                found.append(evaluation)
        return tuple(found)

    def trial_options(self, number: int, directory: SearchDirectory) -> dict[str, Any]:
        """The options of a trial's run."""
        chosen = assignments(self.parsed_space.parameters(number))
        return {
            **self.options,
            "set": [*self.options.get("set", ()), *chosen],
            "run_dir": str(directory.trial(number)),
        }


@dataclass(frozen=True)
class SearchDirectory:
    """The paths inside a search's directory; making one touches nothing."""

    path: Path

    @property
    def settings(self) -> Path:
        """``tune.json``."""
        return self.path / "tune.json"

    @property
    def journal(self) -> Path:
        """``journal.jsonl``."""
        return self.path / "journal.jsonl"

    @property
    def lock(self) -> Path:
        """``tune.lock``, held by the process that searches."""
        return self.path / "tune.lock"

    @property
    def stop(self) -> Path:
        """``stop``: while it is there, trials save and end."""
        return self.path / "stop"

    @property
    def result(self) -> Path:
        """``result.json``."""
        return self.path / "result.json"

    @property
    def tensorboard(self) -> Path:
        """``tensorboard/``."""
        return self.path / "tensorboard"

    def trial(self, number: int) -> Path:
        """A trial's run."""
        return self.path / "trials" / f"{number:05d}"

    def write(self, search: Search, *, new: bool = False) -> None:
        """Write ``tune.json``.

        Args:
            search: its content.
            new: nothing of a search is to be there.

        Raises:
            RunDirectoryError: the directory cannot be written, or holds a search already.
            RunInUseError: somebody searches there.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with self.locked():
                if new:
                    self.require_none()
                write_atomically(self.settings, (json.dumps(asdict(search), indent=2) + "\n").encode())
        except OSError as error:
            raise RunDirectoryError(
                f"cannot write to {self.path}: {error.strerror}. Choose another directory with --run-dir DIR."
            ) from error

    def require_none(self) -> None:
        """Refuse a directory in which there is a search.

        Raises:
            RunDirectoryError: there is one.
        """
        if self.settings.exists():
            raise RunDirectoryError(
                f"{self.path} holds a search already. Go on with it: paceline tune --resume --run-dir "
                f"{self.path}; or choose another --run-dir DIR."
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the search's lock; one whose command was killed has a while to save its trials and end.

        Raises:
            RunInUseError: somebody else searches there.
        """
        deadline = time.monotonic() + _PATIENCE_S
        with self.lock.open("a+b") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise RunInUseError(
                            f"{self.path} is in use by another process. Wait for it to end, or choose "
                            "another --run-dir DIR."
                        ) from None
                    time.sleep(_POLL_S)
            yield

    def read(self) -> Search:
        """The search that is here.

        Raises:
            RunDirectoryError: there is none, or it is damaged.
        """
        try:
            document = json.loads(self.settings.read_bytes())
            known = {f.name for f in fields(Search)}
            if not isinstance(document, dict) or document.keys() - known:
                raise ValueError("it holds something else")
            search = Search(**{**document, "space": tuple(document["space"])})
            _ = search.config, search.parsed_space, search.mode, search.limit
        except FileNotFoundError:
            raise RunDirectoryError(
                f"{self.path} holds no search (no tune.json). Check --run-dir DIR, or leave --resume out."
            ) from None
        except (OSError, ValueError, TypeError, KeyError, ConfigError) as error:
            raise RunDirectoryError(
                f"{self.settings} cannot be used: {error}. Restore it from a copy, or begin another search."
            ) from error
        return search
