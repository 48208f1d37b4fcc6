"""How configurations are chosen by the results of earlier ones: the sampler "tpe", with Optuna, and populations.

Population-based training: Jaderberg et al., https://arxiv.org/abs/1711.09846, in its synchronous form. After every
``--perturbation-interval`` evaluations, all members are compared. The worst quarter takes over the state of members of
the best quarter, and explores: its values are perturbed or drawn again. So what follows depends on the seed and the
results alone, and not on the order in which these arrive. Each member of each generation is a trial, and its run a fork
of the one that it continues.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from paceline.core.errors import LaunchError
from paceline.core.plugins import import_library
from paceline_tune.history import SearchHistory
from paceline_tune.search import Search
from paceline_tune.space import Dimension, Parameters, Space, Value

# --- The sampler "tpe" ---


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


# --- Populations ---


_SHARE = 4  # one in this many members is replaced, and as many are continued by others
_DRAWN_AGAIN = 0.25  # probability, for each value
_STEP = 0.2  # relative
_MAX_EXPLORED = 1000


class Successor(NamedTuple):
    """How a member continues: the trial whose state it takes over, and its values from there on."""

    parent: int
    parameters: Mapping[str, Value]


def is_comparable(search: Search, history: SearchHistory, number: int) -> bool:
    """Return whether all trials of the generation before that of trial ``number`` have ended."""
    return all(n in history.trials and history.trials[n].ended for n in _generation_before(search, number))


def choose_successor(search: Search, history: SearchHistory, number: int) -> Successor | None:
    """Return how trial ``number``, of a later generation than the first, continues.

    Args:
        history: the earlier generations, all of whose trials have ended.

    Returns:
        None if no member of the generation before has a result.
    """
    before = [history.trials[n] for n in _generation_before(search, number)]
    sign = -1.0 if search.mode == "max" else 1.0
    last = [trial.results[-1] for trial in before if trial.results and trial.state not in ("failed", "diverged")]
    values = {its.trial: value for its in last if (value := its.value(search.metric_name)) is not None}
    ranking = sorted(values, key=lambda n: (sign * values[n], n))
    if not ranking:
        return None
    own = number - search.trials
    replaced = max(1, len(before) // _SHARE)
    # Members without a result are the worst.
    survivors = ranking[: len(before) - replaced]
    if own in survivors:
        return Successor(own, history.trials[own].parameters(search))
    random_number = random.Random(f"{search.seed}/pbt/{number}")
    parent = random_number.choice(ranking[:replaced])
    return Successor(parent, explore(search.parsed_space, history.trials[parent].parameters(search), random_number))


def _generation_before(search: Search, number: int) -> Sequence[int]:
    first = (search.generation(number) - 1) * search.trials
    return range(first, first + search.trials)


def explore(space: Space, parameters: Parameters, random_number: random.Random) -> dict[str, Value]:
    """Return values near ``parameters``, some of them drawn again; ``parameters`` if no others satisfy the constraints.

    Numbers are multiplied by 0.8 or 1.2, within their bounds; whole numbers change by at least 1; a choice becomes a
    neighbour of it.
    """
    for _ in range(_MAX_EXPLORED):
        explored: dict[str, Value] = {}
        for dimension in space.dimensions:
            if dimension.applies(explored):
                explored[dimension.name] = _explore(dimension, parameters.get(dimension.name), random_number)
        if explored != parameters and space.allows(explored):
            return explored
    return dict(parameters)


def _explore(dimension: Dimension, value: Value, random_number: random.Random) -> Value:
    if value is None or random_number.random() < _DRAWN_AGAIN:
        return dimension.draw(random_number)
    direction = random_number.choice((-1, 1))
    if dimension.kind == "choice":
        index = dimension.values.index(value) + direction
        return dimension.values[min(max(index, 0), len(dimension.values) - 1)]
    assert isinstance(value, int | float)
    scaled = value * (1 + _STEP * direction)
    if dimension.kind in ("int", "log-int"):
        low, high = dimension.bounds
        nearest = round(scaled)
        return int(min(max(nearest if nearest != value else nearest + direction, low), high))
    return dimension.round(scaled)
