"""The sampler "tpe": what it chooses, and of what its choice depends."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline_tune.history import SearchHistory, SearchJournal, TrialResult, TrialState, read_trials
from paceline_tune.sampler import suggest
from paceline_tune.search import Search, SearchDirectory
from paceline_tune.space import Parameters

SEARCH = Search(
    options={"task": "fashion-mnist-mlp", "seed": 3},
    space=("opt=choice:sgd,adam", "lr=log:1e-4:1", "momentum=uniform:0:0.99 if opt=sgd", "n=log-int:8:512"),
    trials=40,
    metric="loss:min",
    sampler="tpe",
)


def loss(parameters: Parameters) -> float:
    """Least for sgd with lr 0.01, momentum 0.9 and n 64."""
    lr, n, momentum = (float(parameters.get(name, 0.5) or 0) for name in ("lr", "n", "momentum"))
    slower = 0.0 if parameters["opt"] == "sgd" else 0.3
    return abs(math.log10(lr / 0.01)) + slower + abs(momentum - 0.9) / 2 + abs(math.log(n / 64)) / 3


def result(trial: int, value: float | None, state: TrialState = "finished", iteration: int = 1) -> TrialResult:
    return TrialResult(
        trial=trial, state=state, iteration=iteration, step=iteration, metrics={"loss": value}, seconds=1, clock_s=1
    )


def run(search: Search, history: SearchHistory, numbers: range) -> list[Parameters]:
    """Search one after another; return the parameters of ``numbers``."""
    chosen: list[Parameters] = []
    for number in numbers:
        parameters = suggest(search, history, number)
        history.trial(number).suggested = parameters
        history.take(result(number, loss(parameters)))
        chosen.append(parameters)
    return chosen


def test_it_finds_better_values_than_random_draws() -> None:
    history = SearchHistory([])
    chosen = run(SEARCH, history, range(40))
    drawn = [SEARCH.parameters(number) for number in range(40)]
    assert sum(map(loss, chosen[20:])) < 0.75 * sum(map(loss, drawn[20:]))
    assert all(("momentum" in each) == (each["opt"] == "sgd") for each in chosen)
    assert all(type(each["n"]) is int for each in chosen)
    assert all(each["lr"] == float(f"{each['lr']:.4g}") for each in chosen)
    best = history.ranking("loss", "min")[0]
    assert best.mean == min(map(loss, chosen)) == loss(best.trials[0].parameters(SEARCH))


def test_a_choice_depends_on_the_journal_alone(tmp_path: Path) -> None:
    """A resumed search tries the same configurations as one that was not killed."""
    whole = run(SEARCH, SearchHistory([]), range(20))
    journal = SearchJournal(tmp_path / "journal.jsonl")
    for number, parameters in enumerate(whole[:15]):
        journal.suggest(number, parameters)
        journal.add(result(number, loss(parameters)))
    journal.close()
    assert run(SEARCH, read_trials(tmp_path / "journal.jsonl"), range(15, 20)) == whole[15:]
    assert run(replace(SEARCH, options={"task": "x", "seed": 4}), SearchHistory([]), range(2)) != whole[:2]


def test_running_stopped_and_failed_trials_count() -> None:
    """Where low values of x fail and high ones are stopped early, what is between them is chosen."""
    search = replace(SEARCH, space=("x=uniform:0:9",))
    history = SearchHistory([])
    for number in range(30):
        x = 0.3 * number
        history.trial(number).suggested = {"x": x}
        if x < 3:
            history.take(result(number, x / 100, "diverged" if number % 2 else "failed"))
        elif x < 6:
            history.take(result(number, 5 + abs(x - 4.5)))
        else:
            history.take(result(number, 1.0, "stopped"))
    history.trial(30).suggested = {"x": 4.0}  # it runs, without a result
    several = [float(suggest(search, history, number)["x"] or 0) for number in range(31, 51)]
    assert sum(3 <= x <= 6 for x in several) > 14, several


def test_a_countable_space_has_each_combination_once_and_constraints_hold() -> None:
    texts = ("a=int:1:4", "b=choice:1,2,3")
    search = replace(SEARCH, space=texts, choices={"b": [1, 2, 3]}, constraints=("a * b < 9",))
    history = SearchHistory([])
    assert search.planned == 10
    for number in range(10):
        parameters = suggest(search, history, number)
        history.trial(number).suggested = parameters
        history.take(result(number, float(parameters["a"] or 0)))
    chosen = {tuple(history.trial(number).parameters(search).values()) for number in range(10)}
    assert chosen == {(a, b) for a in range(1, 5) for b in (1, 2, 3) if a * b < 9}
    narrow = replace(search, space=("x=uniform:0:1", "y=uniform:0:1"), choices={}, constraints=("x < 0.05 * y",))
    for number in range(3):
        x, y = (float(value or 0) for value in suggest(narrow, SearchHistory([]), number).values())
        assert x < 0.05 * y


def test_repeats_are_one_result() -> None:
    """Of two trials of a configuration, the mean counts."""
    search = replace(SEARCH, space=("x=uniform:0:9",), repeats=2)
    history = SearchHistory([])
    for number in range(40):
        x = 0.45 * (number // 2)
        history.trial(number).suggested = {"x": x}
        # The first of two alone would say that high values are the best.
        history.take(result(number, -x if number % 2 == 0 else 3 * x))
    several = [float(suggest(search, history, number)["x"] or 0) for number in range(20, 35)]
    assert sum(several) / len(several) < 3, several


@pytest.mark.ray
def test_the_searcher_waits_for_room_and_repeats_what_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # Ray sets it when it is imported
    from paceline_tune.ray_adapter import JournalSearcher

    search = replace(SEARCH, repeats=2)

    def searcher(journal: SearchJournal, numbers: range) -> Any:
        directory = SearchDirectory(tmp_path)
        return JournalSearcher(search, directory, journal, numbers, lambda: False, lambda: 2)

    journal = SearchJournal(tmp_path / "journal.jsonl")
    first = searcher(journal, range(4))
    orders = [first.suggest(name)["order"].options for name in "ab"]
    assert first.suggest("c") is None
    assert orders[0]["set"] == orders[1]["set"]
    assert [order["seed"] for order in orders] == [3, 4]
    first.on_trial_complete("a")
    third = first.suggest("c")["order"].options
    assert third["set"] != orders[0]["set"]
    assert third["seed"] == 3
    journal.close()
    journal = SearchJournal(tmp_path / "journal.jsonl")
    again = searcher(journal, range(2, 4))
    assert [again.suggest(name)["order"].options["set"] for name in "ab"] == [third["set"]] * 2
    journal.close()
