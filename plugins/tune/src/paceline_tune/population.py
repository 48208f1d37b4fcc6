"""Population-based training: members train side by side, and bad ones continue from good ones with other values.

Jaderberg et al., "Population Based Training of Neural Networks", https://arxiv.org/abs/1711.09846, in its synchronous
form: after every ``--perturbation-interval`` evaluations, all members are compared. The worst quarter takes over the
state of members of the best quarter, and explores: its values are perturbed or drawn again. So what follows depends on
the seed and the results alone, and not on the order in which these arrive.

Each member of each generation is a trial, and its run a fork of the one that it continues.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceline_tune.history import SearchHistory
from paceline_tune.search import Search
from paceline_tune.space import Dimension, Parameters, Space, Value

_SHARE = 4  # one in this many members is replaced, and as many are continued by others
_DRAWN_AGAIN = 0.25  # probability, for each value
_STEP = 0.2  # relative
_MAX_TRIES = 1000


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
    for _ in range(_MAX_TRIES):
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
