"""The sampler "tpe": it chooses a configuration by the results of earlier ones, with Optuna."""

from __future__ import annotations

import random
import warnings
from types import ModuleType
from typing import Any

from paceline.core.errors import LaunchError
from paceline.core.plugins import import_library
from paceline_tune.history import SearchHistory
from paceline_tune.search import Search
from paceline_tune.space import Dimension, Parameters, Value

_MAX_TRIES = 20


def import_optuna() -> ModuleType:
    """Import Optuna; a LaunchError says how to install it."""
    optuna: ModuleType = import_library("optuna", "--sampler tpe", "tune", LaunchError)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def suggest(search: Search, history: SearchHistory, configuration: int) -> dict[str, Value]:
    """Choose a configuration by the Tree-structured Parzen Estimator.

    Bergstra et al., "Algorithms for Hyper-Parameter Optimization" (NeurIPS 2011), as Optuna computes it. The study is
    built from the history each time, so the choice depends on seed, number and the results so far alone, and a search
    that was killed continues as if it had not been.

    Returns:
        Parameters by name; different from those of all earlier configurations if the space is countable.
    """
    optuna = import_optuna()
    space = search.parsed_space
    seed = random.Random(f"{search.seed}/tpe/{configuration}").getrandbits(32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # about constant_liar
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    study = optuna.create_study(direction="maximize" if search.mode == "max" else "minimize", sampler=sampler)
    earlier = {
        trial.number // search.repeats: trial for trial in history.trials.values() if trial.suggested is not None
    }
    for number in sorted(earlier):
        study.add_trial(_frozen(optuna, search, history, number))
    tried = [trial.suggested for trial in earlier.values()]
    for _ in range(_MAX_TRIES):
        asked, parameters = study.ask(), dict[str, Value]()
        for dimension in space.dimensions:
            if dimension.applies(parameters):
                parameters[dimension.name] = _ask(asked, dimension)
        if space.allows(parameters) and not (space.size is not None and parameters in tried):
            return parameters
        study.tell(asked, state=optuna.trial.TrialState.FAIL)  # which the sampler ignores
    if space.size is None:
        return space.parameters(configuration)
    return next(p for number in range(space.size) if (p := space.parameters(number)) not in tried)


def _ask(trial: Any, dimension: Dimension) -> Value:
    if dimension.kind == "choice":
        chosen: Value = trial.suggest_categorical(dimension.name, dimension.values)
        return chosen
    low, high = dimension.bounds
    is_log = dimension.kind.startswith("log")
    if dimension.kind in ("int", "log-int"):
        return int(trial.suggest_int(dimension.name, int(low), int(high), log=is_log))
    return dimension.round(trial.suggest_float(dimension.name, low, high, log=is_log))


def _distribution(optuna: ModuleType, dimension: Dimension) -> Any:
    distributions = optuna.distributions
    if dimension.kind == "choice":
        return distributions.CategoricalDistribution(dimension.values)
    low, high = dimension.bounds
    if dimension.kind in ("int", "log-int"):
        return distributions.IntDistribution(int(low), int(high), log=dimension.kind == "log-int")
    return distributions.FloatDistribution(low, high, log=dimension.kind == "log")


def _frozen(optuna: ModuleType, search: Search, history: SearchHistory, number: int) -> Any:
    """Return a configuration as a trial of Optuna's, by all of its repeats.

    Stopped ones count as pruned, which Optuna compares by how far they came, and then by their value there. Failed and
    diverged ones are pruned without a value, the worst result.
    """
    states = optuna.trial.TrialState
    first = number * search.repeats
    trials = [history.trials[n] for n in range(first, first + search.repeats) if n in history.trials]
    parameters: Parameters = trials[0].suggested or {}
    known = {dimension.name: dimension for dimension in search.parsed_space.dimensions}
    values = [trial.best(search.metric_name, search.mode) for trial in trials]
    state, value, intermediate = states.PRUNED, None, dict[int, float]()
    if any(trial.state in ("failed", "diverged") for trial in trials):
        pass
    elif len(trials) < search.repeats or not all(trial.ended for trial in trials):
        state = states.RUNNING
    elif any(trial.state == "stopped" for trial in trials):
        intermediate = {trials[0].iteration: values[0]} if values[0] is not None else {}
    elif None not in values:
        state, value = states.COMPLETE, sum(v for v in values if v is not None) / len(values)
    return optuna.trial.create_trial(
        state=state,
        value=value,
        params=dict(parameters),
        distributions={name: _distribution(optuna, known[name]) for name in parameters},
        intermediate_values=intermediate,
    )
