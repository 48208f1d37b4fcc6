"""What is kept of a search: its journal, ASHA's standing after a restart, the status, the result."""

from __future__ import annotations

import io
import json
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.core.errors import ConfigError, RunDirectoryError, RunInUseError
from paceline_tune.history import (
    SearchHistory,
    SearchJournal,
    Suggestion,
    TrialResult,
    read_trials,
    write_hparams,
    write_result,
)
from paceline_tune.plan_search import require_same
from paceline_tune.search import Search, SearchDirectory
from paceline_tune.space import Value
from paceline_tune.status import draw, render

SEARCH = Search(
    options={"task": "fashion-mnist-mlp", "threads": 1, "set": ["weight_decay=0.1"]},
    space=("lr=log:1e-3:1", "momentum=choice:0.5,0.9"),
    trials=8,
    metric="accuracy:max",
    evaluations=16,
    total_steps=160,
)


def result(trial: int, iteration: int, accuracy: float | None, state: Any = "running") -> TrialResult:
    return TrialResult(
        trial=trial,
        state=state,
        iteration=iteration,
        step=10 * iteration,
        metrics={"accuracy": accuracy},
        seconds=1.5,
        clock_s=2.0 * iteration,
        place="127.0.0.1:7",
    )


def test_a_journal_says_where_each_trial_stands(tmp_path: Path) -> None:
    journal = SearchJournal(tmp_path / "journal.jsonl")
    for each in (result(0, 1, 0.5), result(1, 1, 0.4, "stopped"), result(0, 2, 0.7), result(2, 1, None)):
        journal.add(each)
    journal.close()
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"trial": 3, "state": "fin')  # torn by a kill
    trials = read_trials(tmp_path / "journal.jsonl")
    assert {n: (t.state, t.ended, t.iteration) for n, t in trials.trials.items()} == {
        0: ("running", False, 2),
        1: ("stopped", True, 1),
        2: ("running", False, 1),
    }
    assert trials.trials[0].curve("accuracy") == [(10, 0.5), (20, 0.7)]
    assert trials.trials[2].best("accuracy", "max") is None
    best = trials.best("accuracy", "max")
    assert best is not None
    assert best.number == 0
    assert trials.clock_s == 4.0
    assert trials.cost(10, gpus_per_trial=2).gpu_hours == pytest.approx(4 * 1.5 / 3600 * 2)


@dataclass
class Named:
    """What ASHA looks at of Tune's trials."""

    trial_id: str
    config: dict[str, Any]


@pytest.mark.ray
@pytest.mark.parametrize("cut", [0, 7, 19, 40])
def test_asha_goes_on_as_if_nothing_had_happened(cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions after a restart, under which Tune's own names change, are those of an undisturbed search."""
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # Ray sets it when it is imported
    from paceline_tune.ray_adapter import Asha, make_scheduler

    draw = random.Random(7)
    order = [(trial, iteration) for trial in range(8) for iteration in range(1, 16)]
    order.sort(key=lambda pair: (pair[1] + draw.random() * 6, pair[0]))
    order.sort(key=lambda pair: pair[1] // 4)
    values = {pair: draw.random() for pair in order}

    def run(scheduler: Any, steps: list[tuple[int, int]], prefix: str, ended: set[int]) -> list[TrialResult]:
        assert isinstance(scheduler, Asha)
        names = {n: Named(f"{prefix}{n}", {"number": n}) for n in range(8)}
        for number in names.keys() - ended:
            scheduler.on_trial_add(None, names[number])
        done = []
        for number, iteration in steps:
            if number in ended:
                continue
            value = values[number, iteration]
            said = {"iteration": iteration, "objective": value}
            if scheduler.on_trial_result(None, names[number], said) == "STOP":
                ended.add(number)
            done.append(result(number, iteration, value, "stopped" if number in ended else "running"))
        return done

    scheduler = make_scheduler(SEARCH, [])
    undisturbed = run(scheduler, order, "a", set())
    assert 0 < sum(each.state == "stopped" for each in undisturbed) < 8
    ended: set[int] = set()
    before = run(make_scheduler(SEARCH, []), order[:cut], "b", ended)
    after = run(make_scheduler(SEARCH, before), order[cut:], "c", ended)
    assert before + after == undisturbed
    replayed = make_scheduler(SEARCH, undisturbed).debug_string()
    assert replayed.partition(";")[0] == scheduler.debug_string().partition(";")[0]


@pytest.mark.ray
@pytest.mark.parametrize("mode", ["max", "min"])
def test_asha_takes_nan_for_the_worst_value(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a rung had two of them, no number was below its quantile: each later trial was trained to its end."""
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")
    from paceline_tune.ray_adapter import make_scheduler

    search = replace(SEARCH, metric=f"accuracy:{mode}")
    sign = 1 if mode == "max" else -1
    said: dict[int, list[str]] = {}
    restored = []
    for values in ([math.nan] * 3, [math.nan, 0.5, 0.9, 0.1, math.nan, 0.8]):
        scheduler = make_scheduler(search, [])
        said.clear()
        for number, value in enumerate(values):
            trial = Named(str(number), {"number": number})
            scheduler.on_trial_add(None, trial)
            given = {
                "iteration": search.grace_period,
                "objective": sign * value if value == value else -sign * math.inf,
            }
            said.setdefault(number, []).append(scheduler.on_trial_result(None, trial, given))
            restored.append(result(number, search.grace_period, sign * value, "running"))
        assert all(said[n] == ["STOP"] for n, value in enumerate(values) if value != value), (values, said)
    assert said[2] == said[1] == ["CONTINUE"]
    assert said[3] == ["STOP"], "the numbers are compared with each other, as if the others were very bad"
    assert make_scheduler(search, restored[3:]).debug_string() == scheduler.debug_string()


def test_the_status_shows_states_parameters_and_the_best() -> None:
    journal = read_trials(Path("/nowhere"))
    for each in (
        *(result(0, 15, 0.75), result(0, 16, 0.7, "finished")),
        *(result(1, 1, 0.25, "stopped"), result(2, 1, 0.5)),
    ):
        journal.take(each)
    console = Console(file=io.StringIO(), width=140)
    console.print(render(SEARCH, journal, clock_s=75, resources="2/2 CPUs", notes=["80% spent"]))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "Trials: 3/8 (1 running, 5 waiting, 1 finished, 1 stopped); 1 min 15 s" in text
    assert "Resources in use: 2/2 CPUs" in text
    assert "Best: trial 00000, accuracy 0.75" in text
    assert "best accuracy" in text
    assert "80% spent" in text
    row = next(line for line in text.splitlines() if "00001" in line)
    lr = SEARCH.parsed_space.parameters(1)["lr"]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        *("00001", "stopped", "127.0.0.1:7", f"{lr:g}", str(SEARCH.parsed_space.parameters(1)["momentum"])),
        *("0.25", "1", "10", "1.5 s"),
    ]
    best = next(line for line in text.splitlines() if "│ 00000 │" in line)
    assert [cell.strip() for cell in best.split("│")[6:8]] == ["0.75", "16"], "as in the line above the table"


@pytest.mark.parametrize("width", [140, 96, 80])
def test_a_narrow_terminal_shows_every_trial_and_its_parameters(width: int) -> None:
    space = ("lr=log:1e-3:1", "momentum=choice:0.9", "global_batch_size=choice:32,64", "optimizer=choice:adam,sgd")
    search = replace(SEARCH, space=space)
    parameters: dict[str, Value] = {"lr": 0.0625, "global_batch_size": 64, "optimizer": "adam"}
    journal = SearchHistory([Suggestion(trial=7, parameters=parameters)])
    journal.take(result(7, 15, 0.75))
    console = Console(file=io.StringIO(), width=width)
    console.print(render(search, journal, clock_s=75))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    table = "\n".join(lines[2:])
    assert "…" not in table
    words = {"00007", "running", "0.75", "150"}
    words |= {"0.0625", "64", "adam"} if width > 80 else {"lr=0.0625", "global_batch_size=64", "optimizer=adam"}
    assert words <= set(table.split())


def test_the_status_names_the_metric_as_it_is() -> None:
    console = Console(file=io.StringIO(), width=140)
    console.print(
        render(
            replace(SEARCH, metric="accuracy[top]:max"),
            read_trials(Path("/nowhere")),
            clock_s=1,
        )
    )
    assert isinstance(console.file, io.StringIO)
    assert "accuracy[top]" in console.file.getvalue()


def test_the_result_names_the_best_and_its_command(tmp_path: Path) -> None:
    journal = read_trials(tmp_path / "none")
    for each in (
        result(0, 16, 0.75, "finished"),
        result(1, 1, 0.25, "stopped"),
        result(2, 1, None, "diverged"),
    ):
        journal.take(each)
    document = write_result(SEARCH, SearchDirectory(tmp_path), journal, done=False)
    assert (document["steps"], document["steps_without_early_stops"]) == (160 + 10 + 10, 8 * 160)
    assert document["states"] == {"finished": 1, "stopped": 1, "diverged": 1}
    parameters = SEARCH.parsed_space.parameters(0)
    assert document["best"]["command"] == (
        "paceline train fashion-mnist-mlp --run-dir runs/best --set weight_decay=0.1 "
        f"--set lr={parameters['lr']} --set momentum={parameters['momentum']} --threads 1"
    )


def test_configurations_are_ranked_by_the_mean_of_their_seeds(tmp_path: Path) -> None:
    search = replace(SEARCH, repeats=2, scheduler="none", trials=4, options={**SEARCH.options, "seed": 3})
    path = tmp_path / "journal.jsonl"
    writer = SearchJournal(path)
    for number in range(8):
        writer.suggest(number, {"lr": 0.125 * (1 + number // 2)} | ({"momentum": "0.9"} if number < 6 else {}))
    values = {0: 0.99, 1: 0.5, 2: 0.8, 3: 0.7, 4: 0.97, 6: 0.98, 7: 0.97}
    states = {5: "diverged", 7: "failed"}
    for number in range(8):
        writer.add(result(number, 16, values.get(number), states.get(number, "finished")))
    writer.close()
    journal = read_trials(path)
    ranking = journal.ranking("accuracy", "max", 2)
    assert [[trial.number for trial in each.trials] for each in ranking] == [[2, 3], [0, 1]]
    document = write_result(search, SearchDirectory(tmp_path), journal, done=True)
    best = document["best"]
    assert (best["trial"], best["accuracy"], best["values"]) == (2, 0.75, {"00002": 0.8, "00003": 0.7})
    assert best["spread"] == pytest.approx(0.0707107)
    assert best["parameters"] == {"lr": 0.25, "momentum": "0.9"}
    assert "--set lr=0.25 --set momentum=0.9" in best["command"]
    assert "--seed 3" in best["command"]
    assert [each["trial"] for each in document["configurations"]] == [2, 0]
    console = Console(file=io.StringIO(), width=160)
    console.print(render(search, journal, clock_s=1))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "Best: trial 00002, accuracy 0.75 ± 0.071" in text
    row = next(line for line in text.splitlines() if "00007" in line)
    assert [cell.strip() for cell in row.split("│")[4:7]] == ["0.5", "", "4"], "no momentum; the seed is 3 + 1"
    assert [path.name for path in draw(search, journal, tmp_path)] == ["curves.svg", "parallel.svg"]


def test_parameters_keep_their_types(tmp_path: Path) -> None:
    texts = ("lr=log:1e-3:1", "n=choice:32,64", "flag=choice:true,false", "kind=choice:1,x", "clip=choice:none,1")
    choices = {"n": [32, 64], "flag": [True, False], "kind": ["1", "x"], "clip": [None, 1.0]}
    directory = SearchDirectory(tmp_path)
    directory.write(replace(SEARCH, space=texts, choices=choices))
    search = directory.read()
    journal = read_trials(tmp_path / "none")
    for number in range(16):
        journal.take(result(number, 1, 0.5, "finished"))
    write_result(search, directory, journal, done=True)
    trials = json.loads(directory.result.read_text())["trials"]
    for name, values in choices.items():
        written = [trial["parameters"][name] for trial in trials]
        assert {(type(value), value) for value in written} == {(type(value), value) for value in values}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_hparams(search, directory, journal)
    search_itself = EventAccumulator(str(directory.tensorboard))
    search_itself.Reload()
    [best] = search_itself.Scalars("best/val/accuracy")
    ranking = journal.ranking("accuracy", search.mode, search.repeats)
    assert best.value == pytest.approx(ranking[0].mean)
    description = search_itself.summary_metadata["_hparams_/experiment"].plugin_data.content
    assert f"best: trial {ranking[0].trials[0].number:05d}, accuracy".encode() in description


def test_settings_are_read_back_and_damage_is_told(tmp_path: Path) -> None:
    directory = SearchDirectory(tmp_path / "search")
    with pytest.raises(RunDirectoryError, match="contains no search"):
        directory.read()
    directory.write(SEARCH)
    assert directory.read() == SEARCH
    document = json.loads(directory.settings.read_text())
    for damaged in ("{", "[]", json.dumps({**document, "x": 1}), json.dumps({**document, "space": ["lr"]})):
        directory.settings.write_text(damaged)
        with pytest.raises(RunDirectoryError, match="cannot be used"):
            directory.read()


def test_a_trial_that_failed_is_not_the_best(tmp_path: Path) -> None:
    journal = read_trials(tmp_path / "none")
    for each in (result(0, 1, 0.9), result(1, 1, 0.8), result(0, 1, 0.9, "failed"), result(1, 2, 0.7)):
        journal.take(each)
    best = journal.best("accuracy", "max")
    assert best is not None
    assert best.number == 1
    for each in (result(1, 2, 0.7, "diverged"), result(2, 1, None, "finished")):
        journal.take(each)
    assert journal.best("accuracy", "max") is None


def test_a_search_is_not_written_over_another(tmp_path: Path) -> None:
    """Two commands may have looked for one at the same time, and both have found none."""
    directory = SearchDirectory(tmp_path / "search")
    directory.write(SEARCH, new=True)
    with pytest.raises(RunDirectoryError, match="already contains a search"):
        directory.write(replace(SEARCH, trials=9), new=True)
    assert directory.read() == SEARCH


def test_nothing_is_changed_under_a_search_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_tune.search._LOCK_TIMEOUT_S", 0.0)
    directory = SearchDirectory(tmp_path / "search")
    directory.write(SEARCH, new=True)
    with directory.locked(), pytest.raises(RunInUseError, match="in use by another process"):
        directory.write(replace(SEARCH, trials=9))
    assert directory.read() == SEARCH


def test_going_on_needs_the_same_search(tmp_path: Path) -> None:
    directory = SearchDirectory(tmp_path)
    directory.write(replace(SEARCH, options={**SEARCH.options, "best_metric": "accuracy:max"}), new=True)
    there = directory.read()
    require_same(there, replace(SEARCH, trials=20, budget="2h"), directory, "accuracy:max")
    require_same(replace(there, cpus=1, gpus=0), SEARCH, directory, None)
    require_same(there, replace(SEARCH, space=()), directory, None)  # the task's own space
    for asked, metric, says in (
        (replace(SEARCH, space=("lr=log:1e-2:1",)), None, "differs in --search"),
        (replace(SEARCH, options={**SEARCH.options, "epochs": 3}), None, "differs in --epochs"),
        (replace(SEARCH, cpus=2.0, scheduler="none"), None, "--scheduler, --cpus-per-trial"),
        (replace(SEARCH, sampler="tpe", repeats=2), None, "differs in --sampler, --repeats"),
        (replace(SEARCH, constraints=("lr < 1",)), None, "differs in --constraint"),
        (SEARCH, "loss:min", "differs in --metric"),
    ):
        with pytest.raises(ConfigError, match=says):
            require_same(there, asked, directory, metric)


def test_rungs_and_trials_follow_from_the_options() -> None:
    assert SEARCH.rungs == (1, 4)
    assert replace(SEARCH, scheduler="none").rungs == ()
    assert replace(SEARCH, grace_period=2, reduction_factor=2).rungs == (2, 4, 8)
    assert replace(SEARCH, reduction_factor=2.5).rungs == (1, 3, 7)
    assert SEARCH.planned == 8
    assert replace(SEARCH, budget="5trials").planned == 5
    assert replace(SEARCH, space=("momentum=choice:0.5,0.9",)).planned == 2


@pytest.mark.ray
@pytest.mark.parametrize("grace", [1, 3])
@pytest.mark.parametrize("factor", [1.2, 1.5, 2, 2.5, 4])
def test_the_rungs_are_those_at_which_asha_compares(factor: float, grace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # Ray sets it when it is imported
    from paceline_tune.ray_adapter import Asha

    search = replace(SEARCH, grace_period=grace, reduction_factor=factor, evaluations=30)
    scheduler, trial, compared = Asha(search), Named("a", {"number": 0}), []
    scheduler.on_trial_add(None, trial)
    for iteration in range(1, 30):
        before = scheduler.debug_string()
        scheduler.on_trial_result(None, trial, {"iteration": iteration, "objective": 0.5})
        if scheduler.debug_string() != before:
            compared.append(iteration)
    assert search.rungs == tuple(compared)
    assert scheduler.on_trial_result(None, trial, {"iteration": 30, "objective": 0.5}) == "STOP"
    assert scheduler.debug_string().startswith("ASHA: 0 stopped"), "a trial at its last evaluation has ended by itself"
