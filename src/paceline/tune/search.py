"""Search spaces, budgets, and a search's settings and directory."""

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

# --- The space: ``lr=log:1e-3:1``, and the parameters of each trial ---
#
# Trial k's parameters depend only on the seed and k, so a resumed search has the same trials. A finite number of
# combinations is tried in a shuffled order, each once.


Value = float | int | str
Kind = Literal["log", "uniform", "int", "choice"]

FORMS = "NAME=log:LOW:HIGH, NAME=uniform:LOW:HIGH, NAME=int:LOW:HIGH or NAME=choice:A,B,C"
_MAX_LISTED = 100_000
_DIGITS = 4


@dataclass(frozen=True)
class Dimension:
    """A field of the task with its possible values.

    Attributes:
        field: its name.
        kind: the distribution; "log" is uniform in the logarithm.
        values: the lowest and the highest value; with "choice" all values, as text.
    """

    field: str
    kind: Kind
    values: tuple[Value, ...]

    @property
    def options(self) -> Sequence[Value] | None:
        """Return all values, if they are countable."""
        if self.kind == "choice":
            return self.values
        return range(int(self.values[0]), int(self.values[1]) + 1) if self.kind == "int" else None

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the lowest and the highest value of a range."""
        return float(self.values[0]), float(self.values[1])

    def draw(self, random_number: random.Random) -> Value:
        """Draw a value; floats have four significant digits, which are easy to copy."""
        if self.options is not None:
            return random_number.choice(self.options)
        low, high = self.bounds
        if self.kind == "log":
            value = math.exp(random_number.uniform(math.log(low), math.log(high)))
        else:
            value = random_number.uniform(low, high)
        return min(max(float(f"{value:.{_DIGITS}g}"), low), high)


@dataclass(frozen=True)
class Space:
    """All dimensions of a search; ``seed`` decides the drawn values and their order."""

    dimensions: tuple[Dimension, ...]
    seed: int

    @property
    def size(self) -> int | None:
        """Return the number of combinations; None if they are not countable."""
        counts = [None if d.options is None else len(d.options) for d in self.dimensions]
        return math.prod(count for count in counts if count is not None) if None not in counts else None

    @cached_property
    def _order(self) -> Sequence[int] | None:
        """Return the numbers of all combinations in a shuffled order."""
        if self.size is None or self.size > _MAX_LISTED:
            return None
        order = list(range(self.size))
        random.Random(f"{self.seed}").shuffle(order)
        return order

    def parameters(self, number: int) -> dict[str, Value]:
        """Return the parameters of trial ``number``, by field."""
        if self._order is None:
            return {d.field: d.draw(random.Random(f"{self.seed}/{number}/{d.field}")) for d in self.dimensions}
        rest, parameters = self._order[number], {}
        for dimension in self.dimensions:
            assert dimension.options is not None
            rest, index = divmod(rest, len(dimension.options))
            parameters[dimension.field] = dimension.options[index]
        return parameters


def parse_space(texts: Sequence[str], seed: int) -> Space:
    """Parse ``--search``.

    Raises:
        ConfigError: a text has another form, or a field occurs twice.
    """
    if not texts:
        raise ConfigError(f"a search needs at least one field: --search {FORMS}.")
    dimensions = tuple(map(_parse, texts))
    names = [dimension.field for dimension in dimensions]
    duplicates = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if duplicates:
        raise ConfigError(f"--search contains {', '.join(duplicates)} twice. Give each field one range.")
    return Space(dimensions, seed)


def _parse(text: str) -> Dimension:
    field, _, distribution = text.partition("=")
    kind, _, rest = distribution.partition(":")
    if not field.strip().isidentifier():
        raise ConfigError(f"--search {text!r} must be {FORMS}.")
    match kind.strip():
        case "choice":
            values = tuple(word.strip() for word in rest.split(","))
            if "" in values or len(set(values)) < len(values):
                raise ConfigError(f"--search {text!r}: choices must be different values, such as {field}=choice:32,64.")
            return Dimension(field.strip(), "choice", values)
        case "log" | "uniform" as chosen:
            low, high = _bounds(text, rest, float)
            if chosen == "log" and float(low) <= 0:
                raise ConfigError(f"--search {text!r}: a logarithmic range must start above 0.")
            return Dimension(field.strip(), chosen, (low, high))
        case "int":
            return Dimension(field.strip(), "int", _bounds(text, rest, int))
    raise ConfigError(f"--search {text!r}: unknown kind {kind.strip()!r}. Use {FORMS}.")


def _bounds(text: str, rest: str, number: type[float] | type[int]) -> tuple[Value, Value]:
    low_text, separator, high_text = rest.partition(":")
    try:
        low, high = number(low_text), number(high_text)
    except ValueError:
        low, high = math.nan, math.nan
    if not separator or not (math.isfinite(low) and math.isfinite(high) and low < high):
        number_kind = "whole numbers" if number is int else "numbers"
        raise ConfigError(f"--search {text!r}: a range must be two {number_kind} LOW:HIGH, the lower one first.")
    return low, high


def assignments(parameters: Mapping[str, Value]) -> tuple[str, ...]:
    """Return parameters as arguments of ``--set``."""
    return tuple(f"{name}={value}" for name, value in parameters.items())


# --- Budgets: ``2h``, ``100trials``, ``50gpu-h``, ``$200`` ---


WARN_AT = (0.5, 0.8, 0.95)
Unit = Literal["seconds", "trials", "gpu-h", "$"]


@dataclass(frozen=True)
class SearchCost:
    """The actual or expected costs of a search.

    Attributes:
        seconds: wall-clock time.
        trials: number of started trials.
        gpu_hours: of all trials together.
    """

    seconds: float = 0.0
    trials: int = 0
    gpu_hours: float = 0.0


@dataclass(frozen=True)
class SearchBudget:
    """The limit of a search's costs.

    Attributes:
        amount: in ``unit``.
        unit: seconds of wall-clock time, trials, GPU hours, or dollars.
        price_per_hour: dollars per hour, if the unit is dollars.
    """

    amount: float
    unit: Unit
    price_per_hour: float | None = None

    def used(self, cost: SearchCost) -> float:
        """Return the share of the budget that a cost is; above 1 if it is larger."""
        return self._in_unit(cost) / self.amount

    def show(self, cost: SearchCost) -> str:
        """Format a cost together with the budget, in its unit."""
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
    """Parse ``--budget``.

    Raises:
        ConfigError: it has another form, or an impossible unit.
    """
    if price_per_hour is not None and (price_per_hour <= 0 or not text.startswith("$")):
        raise ConfigError(f"--price-per-hour {price_per_hour:g} needs a --budget in dollars, such as $200.")
    match = re.fullmatch(r"(\$?)(\d+(?:\.\d+)?)\s*(trials?|gpu-h|s|sec|min|h)?", text.strip())
    if match is None or bool(match[1]) == bool(match[3]) or float(match[2]) <= 0:
        raise ConfigError(f"--budget must be such as 2h, 100trials, 50gpu-h or $200, but is {text!r}.")
    if match[1]:
        if price_per_hour is None:
            raise ConfigError(
                f"--budget {text} needs the price of the nodes per hour, in dollars: --price-per-hour 3.5."
            )
        return SearchBudget(float(match[2]), "$", price_per_hour)
    if match[3].startswith("trial"):
        if float(match[2]) % 1:
            raise ConfigError(f"--budget {text}: the number of trials must be whole.")
        return SearchBudget(float(match[2]), "trials")
    if match[3] == "gpu-h":
        if not gpus_per_trial:
            raise ConfigError(f"--budget {text}: trials use no GPU. Give --gpus-per-trial, or a budget in hours.")
        return SearchBudget(float(match[2]), "gpu-h")
    return SearchBudget(parse_duration_s(text.strip(), "budget"), "seconds")


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """The expected costs of a search, by the measured costs of a trial's first steps or first evaluation.

    Attributes:
        trial: one whole trial.
        search: all trials, including those that stop early.
        concurrent: number of concurrent trials.
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
    """Estimate the costs of a search.

    Of the trials that reach a rung, one in ``reduction`` continues (Li et al., "A System for Massively Parallel
    Hyperparameter Tuning", https://arxiv.org/abs/1810.05934). The asynchronous form continues some more, whose
    number is not known in advance.

    Args:
        evaluations: of a whole trial.
        seconds_per_evaluation: including the steps before it.
        trials: number of started trials.
        rungs: evaluations after which trials are compared.
        reduction: eta.
        concurrent: number of concurrent trials.
        gpus_per_trial: held by each trial.
    """
    trial_s = evaluations * seconds_per_evaluation
    total, remaining, done = 0.0, float(trials), 0
    for rung in rungs:
        if rung >= evaluations:
            break
        total += remaining * (rung - done)
        remaining, done = max(1.0, remaining / reduction), rung
    total += remaining * (evaluations - done)
    work_s = total * seconds_per_evaluation
    clock_s = max(work_s / min(concurrent, trials), trial_s)
    return CostEstimate(
        trial=SearchCost(trial_s, 1, trial_s / 3600 * gpus_per_trial),
        search=SearchCost(clock_s, trials, work_s / 3600 * gpus_per_trial),
        concurrent=concurrent,
    )


def require_room(budget: SearchBudget, estimated: CostEstimate, text: str) -> None:
    """Refuse a budget that is too small for one trial.

    Raises:
        ConfigError: the budget is below the costs of one trial.
    """
    if budget.used(estimated.trial) > 1:
        raise ConfigError(
            f"--budget {text} is less than the costs of one whole trial, about {budget.show(estimated.trial)}. "
            "Increase it, or shorten trials (--epochs, --max-steps)."
        )


def show_seconds(seconds: float) -> str:
    """Format seconds: 42 s, 3 min 20 s, 2 h 5 min."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60} min"


# --- A search's settings and directory ---
#
# ::
#
#     tune.json         resolved settings: the task, its options, the space, the scheduler, the budget
#     journal.jsonl     one record per result, in the order in which they were compared, and the costs
#     trials/00003/     trial 3: a run directory for paceline resume, runs and audit
#     tensorboard/      each trial's hyperparameters with its results
#     parallel.svg  curves.svg
#     result.json       the best trial, and how each trial ended


SchedulerName = Literal["asha", "none"]

_LOCK_TIMEOUT_S = 30.0
_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Search:
    """The settings of a search; the content of ``tune.json``.

    Attributes:
        options: of each trial's run, as for ``paceline train``: task, seed, epochs, nproc, ...
        space: of ``--search``.
        trials: largest number.
        scheduler: stops trials early.
        grace_period: evaluations that every trial has.
        reduction_factor: one in this many trials passes a rung.
        metric: ``NAME:min`` or ``NAME:max``, of the validation split.
        stop: values at which a trial ends, by metric.
        cpus: CPUs of each trial.
        gpus: GPUs of each trial.
        budget: of ``--budget``.
        price_per_hour: dollars per hour of the nodes.
        evaluations: of a whole trial; None if unknown.
        total_steps: of a whole trial; None if unknown.
        seconds_per_evaluation: including the steps before it, measured on this machine before the search.
        workdir: directory of the task's file.
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
        """Return the options that all trials share."""
        return config_from_mapping(dict(self.options), "tune.json")

    @cached_property
    def parsed_space(self) -> Space:
        return parse_space(self.space, int(self.options.get("seed", 0)))

    @property
    def metric_name(self) -> str:
        return parse_best(self.metric)[0]

    @property
    def mode(self) -> Literal["min", "max"]:
        return parse_best(self.metric)[1]

    @property
    def limit(self) -> SearchBudget | None:
        return None if self.budget is None else parse_budget(self.budget, self.price_per_hour, self.gpus)

    @property
    def planned(self) -> int:
        """Return the number of trials within the request, the budget and the space."""
        limit, size = self.limit, self.parsed_space.size
        limits = [self.trials]
        if limit is not None and limit.unit == "trials":
            limits.append(int(limit.amount))
        return min([*limits, *([] if size is None else [size])])

    @property
    def rungs(self) -> tuple[int, ...]:
        """Return the evaluations after which trials are compared, ascending."""
        if self.scheduler == "none" or self.evaluations is None:
            return ()
        pending_rungs = [float(self.grace_period)]
        while pending_rungs[-1] < self.evaluations:
            pending_rungs.append(self.grace_period * self.reduction_factor ** len(pending_rungs))
        rungs = []
        for evaluation in range(self.grace_period, self.evaluations):
            # ASHA compares once per evaluation, at the highest rung not used yet.
            if reached := bisect_right(pending_rungs, evaluation):
                pending_rungs.pop(reached - 1)
                rungs.append(evaluation)
        return tuple(rungs)

    def trial_options(self, number: int, directory: SearchDirectory) -> dict[str, Any]:
        """Return the options of a trial's run."""
        arguments = assignments(self.parsed_space.parameters(number))
        return {
            **self.options,
            "set": [*self.options.get("set", ()), *arguments],
            "run_dir": str(directory.trial(number)),
        }


@dataclass(frozen=True)
class SearchDirectory:
    """The paths in a search's directory; creating an instance touches nothing."""

    path: Path

    @property
    def settings(self) -> Path:
        return self.path / "tune.json"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def lock(self) -> Path:
        """Return the path of the lock of the searching process."""
        return self.path / "tune.lock"

    @property
    def stop(self) -> Path:
        """Return the path of a file that makes trials save and stop while it exists."""
        return self.path / "stop"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def trial(self, number: int) -> Path:
        """Return the directory of a trial's run."""
        return self.path / "trials" / f"{number:05d}"

    def write(self, search: Search, *, new: bool = False) -> None:
        """Write ``tune.json``.

        Args:
            search: its content.
            new: require that the directory contains no search.

        Raises:
            RunDirectoryError: the directory cannot be written, or already contains a search.
            RunInUseError: another process uses the search.
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
        """Refuse a directory that contains a search.

        Raises:
            RunDirectoryError: it contains one.
        """
        if self.settings.exists():
            raise RunDirectoryError(
                f"{self.path} already contains a search. Continue it with: paceline tune --resume --run-dir "
                f"{self.path}; or choose another --run-dir DIR."
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the search's lock; wait a while for a killed command whose trials are still saving.

        Raises:
            RunInUseError: another process holds the lock.
        """
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
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
        """Read the search.

        Raises:
            RunDirectoryError: it does not exist, or is damaged.
        """
        try:
            document = json.loads(self.settings.read_bytes())
            known = {f.name for f in fields(Search)}
            if not isinstance(document, dict) or document.keys() - known:
                raise ValueError("it is not a search")
            search = Search(**{**document, "space": tuple(document["space"])})
            _ = search.config, search.parsed_space, search.mode, search.limit
        except FileNotFoundError:
            raise RunDirectoryError(
                f"{self.path} contains no search (no tune.json). Check --run-dir DIR, or leave --resume out."
            ) from None
        except (OSError, ValueError, TypeError, KeyError, ConfigError) as error:
            raise RunDirectoryError(
                f"{self.settings} cannot be used: {error}. Restore it from a copy, or start another search."
            ) from error
        return search
