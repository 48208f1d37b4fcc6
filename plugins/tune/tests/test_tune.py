"""``paceline tune`` on a real Ray cluster: stops, a kill and what follows, the command, refusals."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.processes import Processes

from paceline.core.files import read_json_lines
from paceline.runs.checkpoint_store import parse_name, scan
from paceline.runs.directory import RunDirectory
from paceline_tune.history import ENDED, read_trials

pytestmark = pytest.mark.ray

TASK = f"{Path(__file__).parent / 'tasks.py'}:Line"
LENGTH = ("--max-steps", "16", "--eval-every", "4steps", "--checkpoint-every", "4steps")
TIME_LIMIT_S = 240


def tune(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "paceline", "tune", *map(str, words)]


@dataclass(frozen=True)
class Searched:
    path: Path
    result: dict[str, Any]
    before: list[dict[str, Any]]
    output: str


@pytest.fixture(scope="module")
def searched(module_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Searched:
    """A search that was killed with -9 in the middle, and went on with one trial more."""
    path = tmp_path_factory.mktemp("search") / "search"
    # Of these, the first two are good and the third is bad: whoever comes first, one is stopped.
    texts = ("kind=choice:tanh,relu", "lr=log:1e-4:0.3", "width=int:2:8 if kind=tanh", "global_batch_size=choice:24,48")
    space = [word for text in texts for word in ("--search", text)]
    words = tune(TASK, *space, "--sampler", "tpe", "--seed", "11", "--constraint", "width < 9", *LENGTH)
    words += ["--trials", "5", "--reduction-factor", "2", "--run-dir", str(path)]
    first = module_processes.start(words, cwd=path.parent)
    journal = path / "journal.jsonl"
    wait_for_lines(first, journal, 7)
    os.kill(first.pid, signal.SIGKILL)
    module_processes.finish(first, timeout_s=TIME_LIMIT_S)
    before = read_json_lines(journal)
    home = path.parent / "home"
    home.mkdir()
    more = tune("--resume", path, "--trials", "6", "--json")
    again = module_processes.run(more, cwd=path.parent, env={"HOME": str(home)}, timeout_s=TIME_LIMIT_S)
    assert again.returncode == 0, again.stderr
    return Searched(path, json.loads(again.stdout.splitlines()[-1]), before, again.stderr)


def wait_for_lines(process: subprocess.Popen[str], path: Path, lines: int) -> None:
    import time

    deadline = time.monotonic() + TIME_LIMIT_S
    while not path.exists() or len(path.read_text().splitlines()) < lines:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)


def test_all_trials_end_and_the_best_is_found(searched: Searched) -> None:
    result = searched.result
    assert result["done"]
    assert len(result["trials"]) == 6
    left = re.search(r"(\d) of 6 trials are left, each of 4 evaluations", searched.output)
    assert left is not None, searched.output
    assert 1 <= int(left[1]) <= 6 - sum(record.get("state") in ENDED for record in searched.before)
    assert set(result["states"]) <= {"finished", "stopped"}
    assert result["states"]["stopped"] >= 1
    assert result["steps"] < result["steps_without_early_stops"] == 6 * 16
    losses = [trial["loss"] for trial in result["trials"]]
    assert result["best"]["loss"] == min(losses)
    assert json.loads((searched.path / "result.json").read_text()) == result


def test_its_parameters_are_recorded_as_they_were_chosen(searched: Searched) -> None:
    trials = read_trials(searched.path / "journal.jsonl").trials
    for trial in searched.result["trials"]:
        parameters = trial["parameters"]
        assert parameters == trials[trial["trial"]].suggested
        assert ("width" in parameters) == (parameters["kind"] == "tanh")
        run = RunDirectory(searched.path / trial["run"]).read_complete_manifest()
        assert run["config"]["global_batch_size"] == parameters["global_batch_size"]
    assert {type(trial["parameters"]["global_batch_size"]) for trial in searched.result["trials"]} == {int}


def test_nothing_of_rays_is_printed_or_left_behind(searched: Searched) -> None:
    assert all(line.startswith("paceline: ") for line in searched.output.splitlines()), searched.output
    home = searched.path.parent / "home"
    assert [path for path in home.rglob("*ray*") if "matplotlib" not in path.parts] == []
    known = {"tune.json", "tune.lock", "journal.jsonl", "result.json", "curves.svg", "parallel.svg"}
    assert {path.name for path in searched.path.iterdir()} == known | {"trials", "tensorboard"}


def test_finished_trials_are_not_run_again(searched: Searched) -> None:
    ended = {r["trial"] for r in searched.before if r.get("state") in ("finished", "stopped")}
    journal = read_json_lines(searched.path / "journal.jsonl")
    assert journal[: len(searched.before)] == searched.before
    assert not [r for r in journal[len(searched.before) :] if r.get("trial") in ended]
    for number in ended:
        events = RunDirectory(searched.path / "trials" / f"{number:05d}").read_events()
        assert sum(event["event"] == "started" for event in events) == 1


def test_no_evaluation_is_told_twice_and_each_is_exact(searched: Searched) -> None:
    for trial in read_trials(searched.path / "journal.jsonl").trials.values():
        steps = [result.step for result in trial.results]
        assert steps == [4 * (i + 1) for i in range(len(steps))]
        assert [result.iteration for result in trial.results] == list(range(1, len(steps) + 1))
        run = RunDirectory(searched.path / "trials" / f"{trial.number:05d}")
        recorded = [r for r in read_json_lines(run.metrics) if r["kind"] == "eval"]
        assert [r["metrics"] for r in recorded] == [dict(result.metrics) for result in trial.results]


def test_each_trial_has_a_checkpoint_of_the_step_at_which_it_ended(searched: Searched) -> None:
    for trial in searched.result["trials"]:
        newest = scan(RunDirectory(searched.path / trial["run"]).checkpoints)[0]
        assert parse_name(newest.name)[0] == trial["steps"]


def test_the_printed_command_trains_the_best_trial_again(
    searched: Searched, run_processes: Processes, tmp_path: Path
) -> None:
    words = shlex.split(searched.result["best"]["command"])
    assert words[:2] == ["paceline", "train"]
    done = run_processes.paceline(*words[1:], "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    best = RunDirectory(searched.path / searched.result["best"]["run"]).read_result()
    assert best is not None, "the best trial went to its end"
    assert json.loads(done.stdout.splitlines()[-1])["model_sha256"] == best["model_sha256"]


def test_pictures_and_tensorboard_files_are_written(searched: Searched) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name in ("curves.svg", "parallel.svg"):
        assert "</svg>" in (searched.path / name).read_text()
    best = EventAccumulator(str(searched.path / searched.result["best"]["run"] / "tensorboard"))
    best.Reload()
    assert "_hparams_/session_start_info" in best.summary_metadata
    assert len(best.Scalars("eval/val/loss")) == 4


def test_a_search_that_is_there_is_not_overwritten(searched: Searched, run_processes: Processes) -> None:
    done = run_processes.paceline("tune", searched.path)
    assert done.returncode == 2
    assert f"is a search. Continue it by paceline tune --resume {searched.path}" in done.stderr
    done = run_processes.paceline("tune", TASK, "--search", "lr=log:1e-3:1", "--run-dir", searched.path)
    assert done.returncode == 2
    assert "already contains a search. Continue it with: paceline tune --resume" in done.stderr


def test_a_search_that_was_copied_finds_its_task_where_it_continues(
    searched: Searched, run_processes: Processes, tmp_path: Path
) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(searched.path, copied)
    settings = json.loads((copied / "tune.json").read_text())
    settings["workdir"], settings["options"]["task"] = "/nowhere", "line.py:Line"
    (copied / "tune.json").write_text(json.dumps(settings))
    journal = (copied / "journal.jsonl").read_bytes()
    words = tune("--resume", copied, "--trials", "7", "--json")
    done = run_processes.run(words, cwd=tmp_path, timeout_s=TIME_LIMIT_S)
    assert done.returncode == 2, done.stderr
    assert "there is no file /nowhere/line.py" in done.stderr
    assert (copied / "journal.jsonl").read_bytes() == journal, "no trial has failed by that"
    shutil.copyfile(TASK.partition(":")[0], tmp_path / "line.py")
    done = run_processes.run(words, cwd=tmp_path, timeout_s=TIME_LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.splitlines()[-1])["trials"]) == 7


@pytest.mark.slow
def test_a_spent_budget_begins_nothing_more(searched: Searched, run_processes: Processes) -> None:
    """The search has taken longer than this already, so that two more trials have no room."""
    results = read_trials(searched.path / "journal.jsonl").results
    words = ("tune", "--resume", "--run-dir", searched.path, "--trials", "8", "--budget", "1s", "--json")
    done = run_processes.paceline(*words, timeout_s=TIME_LIMIT_S)
    if done.returncode == 2:  # where a single trial takes more than that here
        assert "less than the costs of one whole trial" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert "the budget is spent" in done.stderr
        assert not json.loads(done.stdout.splitlines()[-1])["done"]
    assert read_trials(searched.path / "journal.jsonl").results == results


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--search", "lr=lag:1:2"), "unknown kind 'lag'"),
        (("--search", "rate=log:1e-3:1"), "Line has no field 'rate'. Its fields: lr, width, kind"),
        (("--search", "lr=log:1e-3:1", "--metric", "accuracy:max"), "It has: near, loss"),
        (("--search", "lr=log:1e-3:1", "--metric", "near"), "METRIC:min or METRIC:max"),
        (("--search", "lr=log:1e-3:1", "--stop", "near"), "--stop must be NAME=VALUE"),
        (("--search", "lr=log:1e-3:1", "--budget", "much"), "--budget must be such as 2h"),
        (("--search", "lr=log:1e-3:1", "--budget", "0.001s"), "less than the costs of one whole trial"),
        (("--search", "lr=log:1e-3:1", "--set", "with_val=false"), "--val-fraction 0.1"),
        (("--search", "lr=log:1e-3:1", "--trials", "0"), "--trials must be at least 1"),
        (("--search", "lr=log:1e-3:1", "--repeats", "2", "--scheduler", "asha"), "Leave --scheduler out"),
        (("--search", "lr=log:1e-3:1", "--constraint", "rate < 1"), "rate is not searched"),
        (("--search", "lr=log:1e-3:1", "--nodes", "2"), "paceline launch --on slurm --rank-launcher ray"),
        (("--search", "lr=log:1e-3:1", "--ray-address", "head"), "--ray-address must be HOST:PORT"),
        (("--resume",), "--resume needs the search's directory"),
        (("--resume", "a b"), "there is no search in a b. Give it by paceline tune --resume DIR or"),
        ((TASK, "--resume", "a b"), "'a b'. To continue a search: paceline tune --resume SEARCH."),
        (("--resume", "runs/none"), "there is no search in runs/none. Give it by paceline tune --resume DIR or"),
        (("--resume", "--run-dir", "x", "--scheduler", "asha"), "continues the search with its recorded options"),
        (("--resume", "--run-dir", "x", "--grace-period", "1"), "continues the search with its recorded options"),
        (("--resume", "--run-dir", "x", "--reduction-factor", "4"), "continues the search with its recorded options"),
        (("--resume", "--run-dir", "x", "--sampler", "tpe"), "continues the search with its recorded options"),
        (("--resume", "--run-dir", "x", "--gpus-per-trial", "0"), "continues the search with its recorded options"),
        ((), "a search needs at least one field"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    words: tuple[str, ...], says: str, run_processes: Processes, tmp_path: Path
) -> None:
    task = () if "--resume" in words else (TASK,)
    done = run_processes.paceline("tune", *task, *words, *(() if "--resume" in words else LENGTH))
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert not (tmp_path / "runs").exists(), "nothing is left behind"
    assert "Traceback" not in done.stderr
