"""Budgets: what they say, what is spent, what is estimated, what is refused."""

from __future__ import annotations

import pytest

from paceline.core.errors import ConfigError
from paceline_tune.search import SearchCost, estimate, parse_budget, require_room

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


def test_the_estimate_counts_those_that_go_on() -> None:
    expected = estimate(
        evaluations=16,
        start_s=3.0,
        seconds_per_evaluation=2.0,
        trials=16,
        rungs=(1, 4),
        reduction=4,
        concurrent=4,
        gpus_per_trial=0.5,
    )
    # 16 trials to the first rung, 4 for three more, 1 for the twelve after that.
    evaluations = 16 * 1 + 4 * 3 + 1 * 12
    work_s = 16 * 3 + evaluations * 2
    assert expected.trial.seconds == 3 + 32
    assert expected.search.seconds == max(work_s / 4, 35)
    assert expected.search.gpu_hours == pytest.approx(work_s / 3600 * 0.5)


def test_the_estimate_of_a_search_that_continues_is_of_the_trials_that_are_left() -> None:
    whole = estimate(
        evaluations=4,
        start_s=0.0,
        seconds_per_evaluation=10.0,
        trials=8,
        rungs=(),
        reduction=4,
        concurrent=2,
        gpus_per_trial=1,
    )
    assert whole.search.seconds == 8 * 40 / 2
    rest = whole.reduce(3, 8, 20, 1)  # one of the three has trained for 20 s
    assert (rest.search.seconds, rest.search.trials, rest.search.gpu_hours) == (50, 3, 100 / 3600)
    last = whole.reduce(1, 8, 30, 1)
    assert last.search.seconds == 10
    assert SearchCost(1, 2, 3) + SearchCost(10, 20, 30) == SearchCost(11, 22, 33)


@pytest.mark.parametrize("text", ["20s", "$0.01", "0.001gpu-h"])
def test_a_budget_below_one_trial_is_refused(text: str) -> None:
    expected = estimate(
        evaluations=4,
        start_s=0.0,
        seconds_per_evaluation=10.0,
        trials=4,
        rungs=(1,),
        reduction=4,
        concurrent=2,
        gpus_per_trial=1,
    )
    budget = parse_budget(text, 2.0 if text.startswith("$") else None, 1)
    with pytest.raises(ConfigError, match="less than the costs of one whole trial"):
        require_room(budget, expected, text)
    require_room(parse_budget("41s", None, 1), expected, "41s")
