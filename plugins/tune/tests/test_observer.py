"""What is said of a search's budget while it is spent, and what follows."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline_tune.history import SearchJournal, TrialResult, read_trials
from paceline_tune.run_search import main
from paceline_tune.search import Search, SearchDirectory

pytestmark = pytest.mark.ray

SEARCH = Search(
    options={"task": "fashion-mnist-mlp"},
    space=("lr=log:1e-3:1",),
    trials=8,
    metric="loss:min",
    gpus=2,
    evaluations=100,
    seconds_per_evaluation=1.0,
)


def said(iteration: int, seconds: float, state: str = "running") -> dict[str, Any]:
    """What a trial's actor returns."""
    return {
        "iteration": iteration,
        "step": 10 * iteration,
        "metrics": {"loss": 1.0},
        "state": state,
        "message": "",
        "seconds": seconds,
        "start_s": 0.0,
    }


def trial(number: int, error_file: str | None = None) -> Any:
    """What Tune has of a trial."""
    return SimpleNamespace(config={"number": number}, error_file=error_file)


def tell(observer: Any, number: int, report: dict[str, Any], *, ended: bool) -> None:
    observer.on_trial_result(0, [], trial(number), report | {"done": ended})


def observe(search: Search, path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # Ray sets it when it is imported
    import ray

    from paceline_tune.run_search import SearchMonitor

    path.mkdir(exist_ok=True)
    directory = SearchDirectory(path)
    observer = SearchMonitor(ray, search, directory, SearchJournal(directory.journal), quiet=False)
    observer._estimated = True  # there is no cluster to ask for its size
    return observer


def test_gpu_hours_are_warned_about_and_enforced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two GPUs for half an hour are a GPU hour."""
    observer = observe(replace(SEARCH, budget="1gpu-h"), tmp_path / "search", monkeypatch)
    noted = []
    for number, seconds in enumerate((880.0, 40.0, 500.0, 20.0, 280.0, 60.0, 40.0)):
        observer.on_trial_start(0, [], trial(number))
        tell(observer, number, said(1, seconds), ended=True)
        observer.poll()
        lines = capsys.readouterr().err.splitlines()
        noted.append([line for line in lines if "budget" in line])
        assert observer.closed == observer.spent == (number == 6)
    assert noted == [
        [],
        ["paceline: 50% of the budget is spent: 0.5111 of 1 gpu-h."],
        [],
        ["paceline: 80% of the budget is spent: 0.8 of 1 gpu-h."],
        ["paceline: 95% of the budget is spent: 0.9556 of 1 gpu-h."],
        [],
        ["paceline: the budget is spent: 1.011 of 1 gpu-h. Running trials save and stop."],
    ]
    assert (tmp_path / "search/stop").exists()


def test_a_running_trials_gpus_count_before_it_says_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observer = observe(replace(SEARCH, budget="1gpu-h"), tmp_path / "search", monkeypatch)
    assert observer.cost.gpu_hours == 0
    observer.on_trial_start(0, [], trial(3))
    assert observer.cost.gpu_hours > 0
    assert observer.cost.trials == 1
    tell(observer, 3, said(0, 0.0, "waiting"), ended=True)
    assert observer.cost.gpu_hours == 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the observer sees."""
    now = [1000.0]
    monkeypatch.setattr("paceline_tune.run_search.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def spent(path: Path) -> tuple[float, float]:
    """Seconds of the clock, and of all trials."""
    trials = read_trials(path / "journal.jsonl")
    return trials.clock_s, trials.cost(trials.clock_s, gpus_per_trial=1).gpu_hours * 3600


def test_what_was_spent_since_the_last_evaluation_counts_in_the_next_start(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    search = replace(SEARCH, budget="2h")
    observer = observe(search, tmp_path, monkeypatch)
    with observer:
        observer.on_trial_start(0, [], trial(0))
        clock[0] += 4800
        tell(observer, 0, said(1, 4800.0), ended=False)
        observer.poll()
        assert not observer.spent
        clock[0] += 2400
        observer.poll()
        assert observer.spent
        tell(observer, 0, said(1, 2400.0, "waiting"), ended=True)
    assert spent(tmp_path) == pytest.approx((7200, 7200))
    assert read_trials(tmp_path / "journal.jsonl").trials[0].curve("loss") == [(10, 1.0)]
    again = observe(search, tmp_path, monkeypatch)
    with again:
        again.poll()
        assert again.spent
        assert again.cost.gpu_hours == pytest.approx(4)


def test_what_a_search_spends_outlives_a_kill_and_counts_once(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for start in (0, 1):
        observer = observe(SEARCH, tmp_path, monkeypatch)
        observer.on_trial_start(0, [], trial(0))
        clock[0] += 100
        observer.poll()
        assert spent(tmp_path) == pytest.approx((100 + 120 * start,) * 2)
        clock[0] += 20
        tell(observer, 0, said(1 + start, 120.0), ended=False)
        assert spent(tmp_path) == pytest.approx((120 + 120 * start,) * 2)
    clock[0] += 50
    observer.poll()
    assert spent(tmp_path) == pytest.approx((290, 290))
    assert observe(SEARCH, tmp_path, monkeypatch).clock_s == pytest.approx(290)


def test_a_lost_trials_time_is_spent(tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    observer = observe(SEARCH, tmp_path, monkeypatch)
    with observer:
        observer.on_trial_start(0, [], trial(0))
        clock[0] += 50
        observer.on_trial_recover(0, [], trial(0))
        clock[0] += 10  # until it has another machine
        observer.on_trial_start(0, [], trial(0))
        clock[0] += 30
        tell(observer, 0, said(1, 30.0), ended=False)
        clock[0] += 5
        observer.on_trial_error(0, [], trial(0))
    assert spent(tmp_path) == pytest.approx((95, 85))


@pytest.mark.parametrize(
    ("spent_s", "warning"),
    [
        (4000, None),
        (5500, "50% of the budget is spent: $5500."),
        (8500, "80% of the budget is spent: $8500."),
        (9700, "95% of the budget is spent: $9700."),
        (10500, "the budget is spent: $10500."),
    ],
)
def test_dollars_are_those_of_the_clock_over_all_starts(
    spent_s: float,
    warning: str | None,
    tmp_path: Path,
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At 3600 dollars an hour, a second is a dollar."""
    journal = SearchJournal(tmp_path / "journal.jsonl")
    earlier = TrialResult(trial=0, state="running", iteration=1, step=10, metrics={}, seconds=spent_s, clock_s=spent_s)
    journal.add(earlier)
    journal.close()
    search = replace(SEARCH, budget="$10000", price_per_hour=3600.0)
    observer = observe(search, tmp_path, monkeypatch)
    observer.poll()
    error = capsys.readouterr().err
    assert (warning or "") in error
    assert ("budget" in error) == (warning is not None)
    assert observer.spent == (spent_s > 10000)


@pytest.mark.parametrize("succeeds", [None, 3])
def test_a_search_stops_when_several_trials_fail_and_none_succeeds(
    succeeds: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    observer = observe(SEARCH, tmp_path, monkeypatch)
    for number in range(8 if succeeds is not None else 5):
        observer.on_trial_start(0, [], trial(number))
        assert not observer.closed
        if number == succeeds:
            tell(observer, number, said(1, 1.0, "finished"), ended=True)
        elif number == 2:
            observer.on_trial_error(0, [], trial(number))
        else:
            state = "diverged" if number % 2 else "failed"
            tell(observer, number, said(0, 1.0, state) | {"metrics": {}, "message": f"bad {number}"}, ended=True)
    assert observer.closed == observer.hopeless == (tmp_path / "stop").exists() == (succeeds is None)
    if succeeds is None:
        assert observer.failures[-1] == f"lr={SEARCH.parameters(4)['lr']}: bad 4"
        reasons = [failure.partition(": ")[2] for failure in observer.failures]
        assert reasons == ["bad 0", "bad 1", observer.failure, "bad 3", "bad 4"]
    assert "trial 00002 failed: it was lost too often" in capsys.readouterr().err


def test_a_lost_trial_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tune keeps the errors of a trial in a file, the last one at its end."""
    observer = observe(SEARCH, tmp_path / "search", monkeypatch)
    errors = tmp_path / "error.txt"
    errors.write_text("Traceback:\n  x\npaceline_tune.trial.TrialDiedError: it was killed by SIGKILL; see LOG\n")
    observer.on_trial_recover(0, [], trial(3, str(errors)))
    errors.write_text(errors.read_text() + "\x1b[31mThe node has gone.\n\n")
    observer.on_trial_error(0, [], trial(3, str(errors)))
    observer.on_trial_recover(0, [], trial(4))
    SearchDirectory(tmp_path / "search").stop.touch()
    observer.on_trial_recover(0, [], trial(5, str(errors)))
    text = capsys.readouterr().err
    assert "trial 00003 was lost, and continues from its last checkpoint: it was killed by SIGKILL; see LOG" in text
    assert "trial 00003 failed: it was lost too often; the last time \\x1b[31mThe node has gone." in text
    assert "trial 00004 was lost, and continues from its last checkpoint: its process or node ended" in text
    assert "trial 00005 ended with the search; --resume continues it" in text, "a signal to all is no loss of one"


@pytest.mark.parametrize(("metrics", "code"), [({}, 1), ({"loss": 1.0}, 0)])
def test_a_budget_that_is_spent_before_there_is_a_best_trial_is_no_success(
    metrics: dict[str, float], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = {"CPU": 1.0, "GPU": 2.0}
    ray = SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": machine}], shutdown=lambda: None)
    monkeypatch.setenv("RAY_CLIENT_MODE", "0")  # Ray sets it when it is imported
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr("paceline_tune.run_search.import_ray", lambda: ray)
    monkeypatch.setattr("paceline_tune.run_search.connect", lambda *arguments: None)
    monkeypatch.setattr("os.environ", dict(os.environ))
    directory = SearchDirectory(tmp_path / "search")
    directory.write(replace(SEARCH, budget="1h"))
    journal = SearchJournal(directory.journal)
    journal.add(
        TrialResult(trial=0, state="running", iteration=1, step=10, metrics=metrics, seconds=1.0, clock_s=3700.0)
    )
    journal.close()
    assert main([str(directory.path), "--quiet"]) == code
    assert not json.loads(directory.result.read_bytes())["done"]
