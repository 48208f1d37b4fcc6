"""Budgets: what they say, what is spent, what is estimated, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.errors import ConfigError
from paceline_tune.history import SearchHistory, TrialResult, TrialState
from paceline_tune.plan_search import estimate_rest, estimate_search
from paceline_tune.search import Search, SearchCost, parse_budget

COST = SearchCost(seconds=1800, trials=7, gpu_hours=4)


@pytest.mark.parametrize(
    ("text", "price", "used", "shown"),
    [
        ("2h", None, 0.25, "30 min 0 s of 2 h 0 min"),
        ("90s", None, 20, "30 min 0 s of 1 min 30 s"),
        ("28trials", None, 0.25, "7 of 28 trials"),
        ("16gpu-h", None, 0.25, "4 of 16 gpu-h"),
        ("$200", 100.0, 0.25, "$50.00 of $200.00"),
    ],
)
def test_a_budget_knows_what_is_spent(text: str, price: float | None, used: float, shown: str) -> None:
    budget = parse_budget(text, price, gpus_per_trial=2)
    assert budget.used(COST) == used
    assert budget.show(COST) == shown


@pytest.mark.parametrize(
    ("text", "price", "gpus", "says"),
    [
        ("2", None, 1, "must be such as 2h"),
        ("-2h", None, 1, "must be such as 2h"),
        ("0h", None, 1, "must be such as 2h"),
        ("$2h", None, 1, "must be such as 2h"),
        ("a lot", None, 1, "must be such as 2h"),
        ("2.5trials", None, 1, "the number of trials must be whole"),
        ("$200", None, 1, "--price-per-hour"),
        ("$200", 0.0, 1, "--price-per-hour"),
        ("2h", 3.0, 1, "needs a --budget in dollars"),
        ("50gpu-h", None, 0, "trials use no GPU"),
    ],
)
def test_what_is_no_budget_is_refused(text: str, price: float | None, gpus: float, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_budget(text, price, gpus)


SEARCH = Search(
    options={"task": "fashion-mnist-mlp"},
    space=("lr=log:1e-3:1",),
    trials=16,
    metric="loss:min",
    evaluations=16,
    seconds_per_evaluation=1.0,
)


def test_the_estimate_counts_those_that_go_on() -> None:
    search = replace(SEARCH, gpus=0.5)
    assert search.rungs == (1, 4)
    expected = search.estimate(3.0, 2.0, concurrent=4)
    assert expected is not None
    # 16 trials to the first rung, 4 for three more, 1 for the twelve after that.
    evaluations = 16 * 1 + 4 * 3 + 1 * 12
    work_s = 16 * 3 + evaluations * 2
    assert expected.trial.seconds == 3 + 32
    assert expected.search.seconds == max(work_s / 4, 35)
    assert expected.search.gpu_hours == pytest.approx(work_s / 3600 * 0.5)
    assert replace(search, evaluations=None).estimate(3.0, 2.0, concurrent=4) is None


@pytest.mark.parametrize(("left", "done_s", "seconds"), [(3, 20.0, 50), (1, 30.0, 10)])
def test_the_estimate_of_a_search_that_continues_is_of_the_trials_that_are_left(
    left: int, done_s: float, seconds: float
) -> None:
    search = replace(SEARCH, trials=8, evaluations=4, scheduler="none", gpus=1)
    whole = search.estimate(0.0, 10.0, concurrent=2)
    assert whole is not None
    assert whole.search.seconds == 8 * 40 / 2
    history = SearchHistory([])
    for number in range(8 - left + 1):  # one of those that are left has begun
        ended = number < 8 - left
        state: TrialState = "finished" if ended else "running"
        seconds_so_far = 40.0 if ended else done_s
        history.take(
            TrialResult(trial=number, state=state, iteration=1, step=1, metrics={}, seconds=seconds_so_far, clock_s=0.0)
        )
    rest = estimate_rest(search, history, whole)
    assert rest is not None
    trials_s = left * 40 - done_s
    assert (rest.search.seconds, rest.search.trials, rest.search.gpu_hours) == (seconds, left, trials_s / 3600)
    assert SearchCost(1, 2, 3) + SearchCost(10, 20, 30) == SearchCost(11, 22, 33)


@pytest.mark.parametrize("text", ["20s", "$0.01", "0.001gpu-h"])
def test_a_budget_below_one_trial_is_refused(text: str) -> None:
    search = replace(SEARCH, trials=4, evaluations=4, seconds_per_evaluation=10.0, gpus=1)
    price = 2.0 if text.startswith("$") else None
    with pytest.raises(ConfigError, match="less than the costs of one whole trial"):
        estimate_search(replace(search, budget=text, price_per_hour=price), cpus=2)
    assert estimate_search(replace(search, budget="41s"), cpus=2) is not None
