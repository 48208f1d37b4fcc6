"""One trial, without Ray: it waits at each evaluation, stops there, and goes on after a kill."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paceline.runs.checkpoint_store import parse_name, scan
from paceline.runs.directory import RunDirectory
from paceline_tune.trial import RunningTrial, TrialCommand, TrialDiedError, TrialReport, TrialServer

pytestmark = pytest.mark.integration

TASK = f"{Path(__file__).parent / 'tasks.py'}:Line"


@pytest.fixture
def server() -> Iterator[TrialServer]:
    server = TrialServer()
    try:
        yield server
    finally:
        server.close()


def options(run: Path, *fields: str, **others: Any) -> dict[str, Any]:
    return {
        "task": TASK,
        "run_dir": str(run),
        "set": list(fields),
        "threads": 1,
        "max_steps": 12,
        "eval_every": "3steps",
        "checkpoint_every": ["2steps"],
        **others,
    }


def start(server: TrialServer, of: dict[str, Any], told: TrialReport | None = None) -> RunningTrial:
    known = (0, 0) if told is None else (told.iteration, told.step)
    stop_file = Path(of["run_dir"]).with_name("stop")
    return RunningTrial(server, TrialCommand(options=of, iteration=known[0], step=known[1], stop_file=stop_file))


def test_it_stops_at_the_step_that_was_judged_and_can_be_resumed(
    server: TrialServer, tmp_path: Path, run_processes: Any
) -> None:
    trial = start(server, options(tmp_path / "a"))
    first, second = trial.next(), trial.next()
    assert [(t.iteration, t.step, t.state) for t in (first, second)] == [(1, 3, "running"), (2, 6, "running")]
    trial.end()
    run = RunDirectory(tmp_path / "a")
    assert run.read_events()[-1] | {"time": 0} == {
        "time": 0,
        "event": "stopped",
        "cause": "the search",
        "step": 6,
    }
    assert run.read_result() is None

    whole = start(server, options(tmp_path / "b"))
    said = [whole.next() for _ in range(4)]
    whole.end()
    assert said[:2] == [first, second]
    assert [t.state for t in said] == ["running"] * 3 + ["finished"]
    assert [(t.iteration, t.step) for t in said] == [(1, 3), (2, 6), (3, 9), (4, 12)]

    done = run_processes.paceline("resume", tmp_path / "a", "--json")
    assert done.returncode == 0, done.stderr
    result = RunDirectory(tmp_path / "b").read_result()
    assert result is not None
    assert json.loads(done.stdout.splitlines()[-1])["model_sha256"] == result["model_sha256"]


def test_a_killed_trial_goes_on_and_tells_nothing_twice(server: TrialServer, tmp_path: Path) -> None:
    fields = ("killed_at=8", f"mark={tmp_path / 'killed'}")
    trial = start(server, options(tmp_path / "a", *fields))
    trial.next()
    told = trial.next()
    log = tmp_path / "a/logs/output.log"
    with log.open("a") as file:
        file.write("the last words\n")
    with pytest.raises(TrialDiedError) as lost:
        trial.next()
    assert str(lost.value) == f"it was killed by SIGKILL, after it printed: the last words; see {log}"
    trial.end()
    assert (tmp_path / "killed").exists()
    again = start(server, options(tmp_path / "a", *fields), told)
    assert [(t.iteration, t.step, t.state) for t in (again.next(), again.next())] == [
        (3, 9, "running"),
        (4, 12, "finished"),
    ]
    again.end()
    undisturbed = start(server, options(tmp_path / "b"))
    while undisturbed.next().state == "running":
        pass
    undisturbed.end()
    hashes = [(RunDirectory(tmp_path / name).read_result() or {})["model_sha256"] for name in "ab"]
    assert hashes[0] == hashes[1]


def test_a_trial_of_two_processes_stops_together(server: TrialServer, tmp_path: Path) -> None:
    trial = start(server, options(tmp_path / "a", nproc=2, microbatches=2))
    assert trial.next().step == 3
    trial.end()
    events = RunDirectory(tmp_path / "a").read_events()
    assert [e["step"] for e in events if e["event"] == "stopped"] == [3]
    newest = scan(RunDirectory(tmp_path / "a").checkpoints)[0]
    assert parse_name(newest.name)[0] == 3


def test_a_trial_with_a_killed_rank_is_lost_and_not_failed(server: TrialServer, tmp_path: Path) -> None:
    fields = ("killed_at=5", f"mark={tmp_path / 'killed'}")
    of = options(tmp_path / "a", *fields, nproc=2, microbatches=2, recover="none")
    trial = start(server, of)
    told = trial.next()
    assert told.step == 3
    with pytest.raises(TrialDiedError, match="was killed"):
        trial.next()
    trial.end()
    again = start(server, of, told)
    assert [again.next().step for _ in range(2)] == [6, 9]
    again.end()


def test_a_trial_is_no_rank_of_the_step_that_starts_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"ID": "0", "NUM_TASKS": "2", "TASKS_PER_NODE": "1(x2)", "NODELIST": "node[1-2]"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_STEP_{name}", value)
    for name, value in (("NODEID", "1"), ("PROCID", "1"), ("LOCALID", "0")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    with closing(TrialServer()) as server:
        trial = start(server, options(tmp_path / "a", init_timeout="1min"))
        assert trial.next().step == 3
        trial.end()


def test_a_stop_file_ends_it_so_that_it_can_go_on(server: TrialServer, tmp_path: Path) -> None:
    trial = start(server, options(tmp_path / "a"))
    assert trial.next().step == 3
    (tmp_path / "stop").touch()
    told = trial.next()
    # The signal comes while it trains on, or not before its next evaluation.
    while told.state == "running":
        told = trial.next()
    assert told.state in ("waiting", "finished")
    trial.end()


def test_failures_are_told_apart(server: TrialServer, tmp_path: Path) -> None:
    failing = start(server, options(tmp_path / "a", "lr=2.0", "fail_above=1.0"))
    failed = failing.next()
    failing.end()
    assert failed.state == "failed"
    assert "no model for lr 2.0" in failed.message
    diverging = start(server, options(tmp_path / "b", "lr=1e30", "kind=relu", max_steps=50))
    told = diverging.next()
    while told.state == "running":
        told = diverging.next()
    diverging.end()
    assert (told.state, told.step) == ("diverged", 0), told.message


def test_a_killed_server_takes_its_trial_along(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    server = TrialServer()
    try:
        trial = start(server, options(tmp_path / "a"))
        trial.next()
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not RunDirectory(tmp_path / "a").is_running(), "the trial ends")
        with pytest.raises(TrialDiedError):
            trial.next()
        trial.end()
    finally:
        server.close()
