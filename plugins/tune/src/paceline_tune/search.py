"""Budgets, and a search's settings and directory."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.core.config import RunConfig, config_from_mapping
from paceline.core.errors import ConfigError, RunDirectoryError
from paceline.core.files import write_atomically
from paceline.core.options import parse_best, parse_duration_s
from paceline.core.ownership import FileLock
from paceline.runs.directory import in_use
from paceline_tune.space import Parameters, Space, Value, assignments, parse_space

# --- Budgets: ``2h``, ``100trials``, ``50gpu-h``, ``$200`` ---


WARN_AT = (0.5, 0.8, 0.95)
Unit = Literal["seconds", "trials", "gpu-h", "$"]


@dataclass(frozen=True)
class SearchCost:
    """The actual or expected costs of a search: seconds of wall-clock time, and GPU hours of all trials together."""

    seconds: float = 0.0
    trials: int = 0
    gpu_hours: float = 0.0

    def __add__(self, other: SearchCost) -> SearchCost:
        return SearchCost(self.seconds + other.seconds, self.trials + other.trials, self.gpu_hours + other.gpu_hours)


@dataclass(frozen=True)
class SearchBudget:
    """The limit of a search's costs.

    Attributes:
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
        dollars = cost.seconds / 3600 * (self.price_per_hour or 0.0)
        return {"seconds": cost.seconds, "trials": cost.trials, "gpu-h": cost.gpu_hours, "$": dollars}[self.unit]


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
        search: all trials, including those that stop early.
        trials_s: seconds of all trials, one after another.
    """

    trial: SearchCost
    search: SearchCost
    concurrent: int
    trials_s: float


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
#     journal.jsonl     one record per result, in the order in which they were compared, suggested parameters, costs
#     ray.log           warnings and errors of Ray, if there are any
#     trials/00003/     trial 3: a run directory for paceline resume, runs and audit
#     tensorboard/      each trial's hyperparameters with its results
#     parallel.svg  curves.svg
#     result.json       the best trial, and how each trial ended


SchedulerName = Literal["asha", "pbt", "none"]
SamplerName = Literal["random", "tpe"]

_LOCK_TIMEOUT_S = 30.0
_MAX_EVALUATIONS = 1_000_000  # if the number of a trial's evaluations is unknown


@dataclass(frozen=True, kw_only=True)
class Search:
    """The settings of a search; the content of ``tune.json``. The help of ``paceline tune`` describes its options.

    Attributes:
        options: of each trial's run, as for ``paceline train``: task, seed, epochs, nproc, ...
        choices: the values of choices with the types of the task's fields, by name.
        searched_options: the names in ``space`` that are options of the run.
        evaluations: of a whole trial; None if unknown.
        total_steps: of a whole trial; None if unknown.
        start_s: of a trial, until its first step, measured on this machine before the search.
        seconds_per_evaluation: including the steps before it, measured so too.
    """

    options: Mapping[str, Any]
    space: tuple[str, ...]
    trials: int
    metric: str
    constraints: tuple[str, ...] = ()
    sampler: SamplerName = "random"
    repeats: int = 1
    choices: Mapping[str, Sequence[Value]] = field(default_factory=dict)
    searched_options: tuple[str, ...] = ()
    scheduler: SchedulerName = "asha"
    grace_period: int = 1
    reduction_factor: float = 4.0
    perturbation_interval: int = 1
    stop: Mapping[str, float] = field(default_factory=dict)
    cpus: float = 1.0
    gpus: float = 0.0
    budget: str | None = None
    price_per_hour: float | None = None
    evaluations: int | None = None
    total_steps: int | None = None
    start_s: float = 0.0
    seconds_per_evaluation: float | None = None
    workdir: str = ""

    @property
    def config(self) -> RunConfig:
        return config_from_mapping(dict(self.options), "tune.json")

    @cached_property
    def parsed_space(self) -> Space:
        return parse_space(self.space, self.seed, constraints=self.constraints, choices=self.choices)

    @property
    def seed(self) -> int:
        return int(self.options.get("seed", 0))

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
        return self.whole_trials * self.generations

    @property
    def whole_trials(self) -> int:
        """Return the number of trials but for later generations: together they are as long as that many whole runs."""
        limit, size = self.limit, self.parsed_space.size
        if self.scheduler == "pbt":
            return self.trials
        whole = (self.trials if size is None else min(self.trials, size)) * self.repeats
        return min(whole, int(limit.amount)) if limit is not None and limit.unit == "trials" else whole

    @property
    def generations(self) -> int:
        if self.scheduler != "pbt" or self.evaluations is None:
            return 1
        return -(-self.evaluations // self.perturbation_interval)

    def generation(self, number: int) -> int:
        return number // self.trials if self.scheduler == "pbt" else 0

    def last_evaluation(self, number: int) -> int | None:
        """Return the evaluation after which a trial ends for the next generation; None: it is trained to its end."""
        generation = self.generation(number) + 1
        return generation * self.perturbation_interval if generation < self.generations else None

    @property
    def milestones(self) -> list[float]:
        """The evaluations from which ASHA compares trials: at an evaluation at the highest one not used yet."""
        last = self.evaluations or _MAX_EVALUATIONS
        powers = (self.grace_period * self.reduction_factor**power for power in count())
        return list(takewhile(lambda milestone: milestone <= last, powers))

    @property
    def rungs(self) -> tuple[int, ...]:
        """The evaluations at which ASHA compares a trial that is trained to its end."""
        if self.scheduler != "asha" or self.evaluations is None:
            return ()
        pending, rungs = self.milestones, []
        for evaluation in range(self.grace_period, self.evaluations):
            if reached := bisect_right(pending, evaluation):
                pending.pop(reached - 1)
                rungs.append(evaluation)
        return tuple(rungs)

    def estimate(self, start_s: float, seconds_per_evaluation: float, concurrent: int) -> CostEstimate | None:
        """Estimate the costs of the search, of which ``concurrent`` trials run at a time; None without their length.

        Of the trials that reach a rung, one in ``reduction_factor`` continues (Li et al., "A System for Massively
        Parallel Hyperparameter Tuning", https://arxiv.org/abs/1810.05934). The asynchronous form continues some more,
        whose number is not known in advance.

        Args:
            start_s: of a trial, until its first step.
            seconds_per_evaluation: including the steps before it.
        """
        if self.evaluations is None or self.seconds_per_evaluation is None:
            return None
        trials, start_s = self.whole_trials, start_s * self.generations
        trial_s = start_s + self.evaluations * seconds_per_evaluation
        total, remaining, done = 0.0, float(trials), 0
        for rung in self.rungs:
            total += remaining * (rung - done)
            remaining, done = max(1.0, remaining / self.reduction_factor), rung
        total += remaining * (self.evaluations - done)
        work_s = trials * start_s + total * seconds_per_evaluation
        return CostEstimate(
            trial=SearchCost(trial_s, 1, trial_s / 3600 * self.gpus),
            search=SearchCost(max(work_s / min(concurrent, trials), trial_s), trials, work_s / 3600 * self.gpus),
            concurrent=concurrent,
            trials_s=work_s,
        )

    def run_options(self, number: int, parameters: Parameters) -> dict[str, Any]:
        options = {**self.options, **{n: v for n, v in parameters.items() if n in self.searched_options}}
        fields = {name: value for name, value in parameters.items() if name not in self.searched_options}
        options["set"] = [*self.options.get("set", ()), *assignments(fields)]
        if self.repeats > 1:
            options["seed"] = self.seed + number % self.repeats
        return options

    def parameters(self, number: int) -> dict[str, Value]:
        """Return the parameters that the space alone gives to a trial: those of sampler "random"."""
        configuration, size = number // self.repeats, self.parsed_space.size
        if self.scheduler == "pbt" and size is not None:
            configuration %= size  # several members may begin with the same
        return self.parsed_space.parameters(configuration)


class SearchDirectory:
    """The paths in a search's directory; creating an instance touches nothing.

    Attributes:
        stop: a file that makes trials save and stop while it exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings = path / "tune.json"
        self.journal = path / "journal.jsonl"
        self.result = path / "result.json"
        self.tensorboard = path / "tensorboard"
        self.stop = path / "stop"

    def trial(self, number: int) -> Path:
        return self.path / "trials" / f"{number:05d}"

    def write(self, search: Search, *, new: bool = False) -> None:
        """Write ``tune.json``; a ``new`` search only into a directory that contains none."""
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
        """Refuse a directory that contains a search."""
        if self.settings.exists():
            raise RunDirectoryError(
                f"{self.path} already contains a search. Continue it with: paceline tune --resume --run-dir "
                f"{self.path}; or choose another --run-dir DIR."
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the search's lock; wait a while for a killed command whose trials are still saving."""
        path = self.path / "tune.lock"
        with closing(FileLock(path)) as lock:
            if not lock.take_within(_LOCK_TIMEOUT_S):
                raise in_use(path)
            yield

    def read(self) -> Search:
        """Read the search."""
        try:
            document = json.loads(self.settings.read_bytes())
            search = msgspec.convert(document, Search)
            if unknown := document.keys() - {f.name for f in fields(Search)}:
                raise ValueError(f"it has an unknown key {min(unknown)!r:.80}")
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
