"""What a search may cost: ``2h``, ``100trials``, ``50gpu-h``, ``$200``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from paceline.config import parse_duration_s
from paceline.errors import ConfigError

WARN_AT = (0.5, 0.8, 0.95)
Unit = Literal["seconds", "trials", "gpu-h", "$"]


@dataclass(frozen=True)
class Cost:
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
class Budget:
    """The most that a search may spend.

    Attributes:
        amount: in ``unit``.
        unit: seconds of the clock, trials, GPU hours, or dollars.
        price_per_hour: dollars for an hour of the clock, where the unit is dollars.
    """

    amount: float
    unit: Unit
    price_per_hour: float | None = None

    def used(self, cost: Cost) -> float:
        """The part of the budget that ``cost`` is; above 1 where it is more."""
        return self._in_unit(cost) / self.amount

    def show(self, cost: Cost) -> str:
        """A cost in the budget's unit, beside the budget."""
        spent = self._in_unit(cost)
        match self.unit:
            case "seconds":
                return f"{show_seconds(spent)} of {show_seconds(self.amount)}"
            case "$":
                return f"${spent:.2f} of ${self.amount:.2f}"
        return f"{spent:.4g} of {self.amount:g} {self.unit}"

    def _in_unit(self, cost: Cost) -> float:
        match self.unit:
            case "seconds":
                return cost.seconds
            case "trials":
                return cost.trials
            case "gpu-h":
                return cost.gpu_hours
        assert self.price_per_hour is not None
        return cost.seconds / 3600 * self.price_per_hour


def parse_budget(text: str, price_per_hour: float | None, gpus_per_trial: float) -> Budget:
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
        return Budget(float(match[2]), "$", price_per_hour)
    if match[3].startswith("trial"):
        if float(match[2]) % 1:
            raise ConfigError(f"--budget {text}: trials are whole.")
        return Budget(float(match[2]), "trials")
    if match[3] == "gpu-h":
        if not gpus_per_trial:
            raise ConfigError(f"--budget {text}: trials use no GPU. Say --gpus-per-trial, or give hours.")
        return Budget(float(match[2]), "gpu-h")
    return Budget(parse_duration_s(text.strip(), "budget"), "seconds")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a search is going to cost, from what a trial's first steps or rung took.

    Attributes:
        trial: one whole trial.
        search: all of them, with those that stop early.
        concurrent: trials at a time.
    """

    trial: Cost
    search: Cost
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
) -> Estimate:
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
    return Estimate(
        trial=Cost(trial_s, 1, trial_s / 3600 * gpus_per_trial),
        search=Cost(clock_s, trials, work_s / 3600 * gpus_per_trial),
        concurrent=concurrent,
    )


def require_room(budget: Budget, estimated: Estimate, text: str) -> None:
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
