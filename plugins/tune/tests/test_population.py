"""Population-based training: who continues whom and with which values, and a search on a real Ray cluster."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugins.tune.tests.test_tune import TASK, TIME_LIMIT_S, wait_for_lines
from tests.processes import Processes

from paceline.core.errors import ConfigError
from paceline.core.files import read_json_lines
from paceline.data.audit import audit
from paceline.runs.directory import RunDirectory
from paceline_tune.history import SearchHistory, Spent, Suggestion, TrialResult, read_trials
from paceline_tune.plan_search import check
from paceline_tune.sampler import choose_successor, explore, is_comparable
from paceline_tune.search import Search, SearchDirectory
from paceline_tune.space import parse_space

SEARCH = Search(
    options={"task": "x:Y", "seed": 3},
    space=("lr=log:1e-3:1", "drop=uniform:0:0.5", "n=int:1:9", "kind=choice:a,b,c"),
    trials=8,
    metric="accuracy:max",
    scheduler="pbt",
    perturbation_interval=2,
    evaluations=7,
)


def history_of(*values: float | None) -> SearchHistory:
    """A first generation that ended with these accuracies; None: it failed."""
    return SearchHistory(
        TrialResult(
            trial=number,
            state="failed" if value is None else "stopped",
            iteration=2,
            step=20,
            metrics={} if value is None else {"accuracy": value},
            seconds=1.0,
            clock_s=1.0,
        )
        for number, value in enumerate(values)
    )


def test_generations_and_their_ends() -> None:
    assert (SEARCH.generations, SEARCH.planned) == (4, 32)
    assert [SEARCH.last_evaluation(number) for number in (0, 7, 8, 23, 24, 31)] == [2, 2, 4, 6, None, None]


def test_the_worst_quarter_continues_from_the_best() -> None:
    history = history_of(0.5, 0.9, 0.1, 0.6, None, 0.8, 0.4, 0.3)
    chosen = {number: choose_successor(SEARCH, history, 8 + number) for number in range(8)}
    for number, successor in chosen.items():
        assert successor is not None
        if number in (2, 4):  # the last one, and the one that failed
            assert successor.parent in (1, 5)
            assert successor.parameters != SEARCH.parameters(successor.parent)
        else:
            assert successor == (number, SEARCH.parameters(number))
        assert choose_successor(SEARCH, history, 8 + number) == successor
    other = replace(SEARCH, options={"task": "x:Y", "seed": 4})
    assert choose_successor(other, history, 10) != chosen[2]


def test_no_member_continues_where_all_have_failed() -> None:
    assert choose_successor(SEARCH, history_of(*[None] * 8), 8) is None


def test_members_are_compared_once_all_have_ended() -> None:
    history = history_of(*[0.5] * 7)
    assert not is_comparable(SEARCH, history, 8)
    history.trial(7)
    assert not is_comparable(SEARCH, history, 8)
    assert is_comparable(SEARCH, history_of(*[0.5] * 8), 15)
    assert not is_comparable(SEARCH, history_of(*[0.5] * 8), 16)


@given(st.integers(0, 2**32), st.integers(0, 50))
def test_explored_values_are_near_and_within_their_bounds(seed: int, number: int) -> None:
    space = parse_space(
        (
            "lr=log:1e-3:1",
            "drop=uniform:0:0.5",
            "n=int:1:9",
            "m=log-int:1:900",
            "kind=choice:a,b,c",
            "w=int:1:3 if kind=a",
        ),
        number,
        constraints=("n + m > 3",),
    )
    before = space.parameters(number)
    after = explore(space, before, random.Random(seed))
    assert after != before
    assert space.allows(after)
    assert ("w" in after) == (after["kind"] == "a")
    for dimension in space.dimensions:
        value = after.get(dimension.name)
        if dimension.kind == "choice":
            assert value in dimension.values
        elif value is not None:
            low, high = dimension.bounds
            assert isinstance(value, int if dimension.kind in ("int", "log-int") else float)
            assert low <= float(value) <= high


def test_steps_that_were_taken_over_count_once() -> None:
    first, second = history_of(0.5).results[0], Suggestion(trial=1, parameters={}, parent=0)
    continued = replace(first, trial=1, step=50)
    history = SearchHistory([first, Spent(clock_s=1.0, trial_s=1.0), second, continued])
    assert history.steps == 50
    assert [trial.number for trial in history.lineage(history.trials[1])] == [0, 1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"trials": 1}, "--trials 1"),
        ({"sampler": "tpe"}, "--sampler tpe"),
        ({"repeats": 2}, "--repeats"),
        ({"stop": {"accuracy": 0.9}}, "--stop"),
        ({"budget": "30trials"}, "--budget in trials"),
        ({"perturbation_interval": 0}, "--perturbation-interval must be at least 1"),
    ],
)
def test_what_a_population_cannot_do_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check(replace(SEARCH, **change))


# --- A search on Ray, killed and continued ---


STEPS, EVERY, MEMBERS = 12, 4, 3


@dataclass(frozen=True)
class Searched:
    path: Path
    result: dict[str, Any]
    before: list[dict[str, Any]]


@pytest.fixture(scope="module")
def searched(module_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Searched:
    """A search of three generations that was killed with -9 in the second one, and went on."""
    path = tmp_path_factory.mktemp("population") / "search"
    words = ["--search", "lr=log:1e-3:0.3", "--scheduler", "pbt", "--trials", str(MEMBERS), "--seed", "5"]
    words += ["--max-steps", str(STEPS), "--eval-every", f"{EVERY}steps", "--checkpoint-every", "1epochs"]
    words += ["--global-batch-size", "24", "--metric", "loss:min", "--run-dir", str(path)]
    tune = [sys.executable, "-m", "paceline", "tune"]
    first = module_processes.start([*tune, TASK, *words], cwd=path.parent)
    wait_for_lines(first, path / "journal.jsonl", MEMBERS + 3)
    os.kill(first.pid, signal.SIGKILL)
    module_processes.finish(first, timeout_s=TIME_LIMIT_S)
    before = read_json_lines(path / "journal.jsonl")
    done = module_processes.run([*tune, "--resume", str(path), "--json"], cwd=path.parent, timeout_s=TIME_LIMIT_S)
    assert done.returncode == 0, done.stderr
    return Searched(path, json.loads(done.stdout.splitlines()[-1]), before)


@pytest.mark.ray
def test_every_choice_follows_from_the_results_before_it(searched: Searched) -> None:
    search, history = SearchDirectory(searched.path).read(), read_trials(searched.path / "journal.jsonl")
    assert read_json_lines(searched.path / "journal.jsonl")[: len(searched.before)] == searched.before
    assert searched.result["done"]
    assert searched.result["states"] == {"stopped": 2 * MEMBERS, "finished": MEMBERS}
    assert searched.result["steps"] == searched.result["steps_without_early_stops"] == MEMBERS * STEPS
    taken_over = 0
    for number in range(MEMBERS, 3 * MEMBERS):
        trial = history.trials[number]
        assert choose_successor(search, history, number) == (trial.parent, trial.suggested)
        taken_over += trial.parent != number - MEMBERS
        assert [result.step for result in trial.results] == [EVERY * (number // MEMBERS + 1)]
    assert taken_over == 2  # one in each later generation


@pytest.mark.ray
def test_forks_by_hand_give_the_best_trials_model(searched: Searched, run_processes: Processes, tmp_path: Path) -> None:
    best = RunDirectory(searched.path / searched.result["best"]["run"])
    assert audit(best).clean
    schedule = searched.result["best"]["schedule"]
    assert [part["from_step"] for part in schedule] == [0, EVERY, 2 * EVERY]
    run = tmp_path / "part-0"
    options = ["--max-steps", str(STEPS), "--checkpoint-every", f"{EVERY}steps", "--keep-checkpoints", "9"]
    options += ["--eval-every", f"{EVERY}steps", "--global-batch-size", "24", "--seed", "5", "--threads", "1"]
    lr = schedule[0]["parameters"]["lr"]
    done = run_processes.paceline("train", TASK, *options, "--set", f"lr={lr}", "--run-dir", run, "--quiet")
    assert done.returncode == 0, done.stderr
    for number, part in enumerate(schedule[1:], start=1):
        fork = tmp_path / f"part-{number}"
        lr, step = part["parameters"]["lr"], str(part["from_step"])
        done = run_processes.paceline("fork", run, "--step", step, "--set", f"lr={lr}", "--run-dir", fork)
        assert done.returncode == 0, done.stderr
        done = run_processes.paceline("resume", fork, "--quiet")
        assert done.returncode == 0, done.stderr
        run = fork
    result, expected = RunDirectory(run).read_result(), best.read_result()
    assert result is not None
    assert expected is not None
    assert result["model_sha256"] == expected["model_sha256"]


@pytest.mark.ray
def test_the_population_of_a_search_stays(searched: Searched, run_processes: Processes) -> None:
    done = run_processes.paceline("tune", "--resume", searched.path, "--trials", str(MEMBERS + 1))
    assert done.returncode == 2
    assert "the members of a population stay" in done.stderr
