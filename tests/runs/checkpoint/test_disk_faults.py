"""A disk that is full or fails, at any call of a save and anywhere in a run: no run is lost."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.core.task_loading import load_task_class
from paceline.data.audit import audit
from paceline.runs.checkpoint_store import newest_verified
from paceline.runs.checkpointer import Checkpointer
from paceline.runs.directory import RunDirectory
from paceline.training import checkpoint_manager

STEPS = 60
MOST_CALLS = 45
MUST_FAIL = {"open", "mkdir", "write", "fsync", "rename"}
TASK = Path(__file__).with_name("disk_task.py")


@pytest.fixture(scope="module", autouse=True)
def numerics() -> Iterator[None]:
    """Runs in this process set torch's threads and determinism for the whole of it."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        yield
    torch.set_num_threads(before[0])
    torch.use_deterministic_algorithms(before[1])


def train(run: Path, **options: Any) -> paceline.Result:
    given: dict[str, Any] = {"max_steps": STEPS, "eval_every": "7steps", "checkpoint_every": "1steps"}
    given |= {"keep_checkpoints": 2}
    task = load_task_class(f"{TASK}:Small")()
    return paceline.fit(task, run_dir=str(run), threads=1, quiet=True, **(given | options))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> paceline.Result:
    return train(tmp_path_factory.mktemp("undisturbed") / "run")


class Faults:
    """Makes calls that change the file system fail, where ``strikes`` says so."""

    CALLS = ("open", "mkdir", "write", "pwrite", "fsync", "rename", "replace", "symlink", "unlink", "rmdir")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.number = number
        self.struck: list[str] = []
        self.strikes: Callable[[str], bool] = lambda call: False
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self._guarded(name, getattr(os, name)))

    def _guarded(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if self.strikes(name):
                self.struck.append(name)
                raise OSError(self.number, os.strerror(self.number))
            return real(*arguments, **named)

        return call


def assert_equal(result: paceline.Result, undisturbed: paceline.Result, run: Path) -> None:
    for name in ("model_sha256", "metrics", "steps", "samples"):
        assert getattr(result, name) == getattr(undisturbed, name), name
    report = audit(RunDirectory(run))
    assert report.clean, report.verdict
    assert report.steps == STEPS
    found = newest_verified(run / "checkpoints")
    assert found.manifest is not None
    assert (found.manifest.info.step, found.skipped) == (STEPS, ())
    assert not list((run / "checkpoints").glob(".tmp-*"))


@pytest.mark.parametrize("then", ["only this call", "all further calls of the save"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_each_call_of_a_save_may_fail(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: paceline.Result,
    number: int,
    then: str,
) -> None:
    """The n-th save of the run fails at its n-th call, up to more calls than a save has.

    Where a call comes depends on what befell the save before, and parts are written side by side: later
    saves fail at a kind of call that was not met.
    """
    faults = Faults(monkeypatch, number)
    write = Checkpointer._write
    save, calls, usual = -1, 0, 0

    def strikes(call: str) -> bool:
        nonlocal calls
        if not threading.current_thread().name.startswith("paceline-checkpoint"):
            return False
        calls += 1
        if save >= MOST_CALLS:
            return call in MUST_FAIL - set(faults.struck)
        return calls - 1 == save if then == "only this call" else calls - 1 >= save

    def counted(self: Checkpointer, job: Any) -> None:
        nonlocal save, calls, usual
        save, calls = save + 1, 0
        write(self, job)
        usual = calls  # of the last save in the end, which nothing befell

    faults.strikes = strikes
    monkeypatch.setattr(Checkpointer, "_write", counted)
    run = tmp_path / "run"
    assert_equal(train(run), undisturbed, run)
    assert set(faults.struck) >= MUST_FAIL
    assert 15 < usual < MOST_CALLS < save
    events = RunDirectory(run).read_events()
    failed = [event for event in events if event["event"] == "checkpoint failed"]
    assert len(failed) >= 10
    assert all(os.strerror(number) in event["error"] for event in failed)
    assert sum(event["event"] == "checkpoint" for event in events) >= 20


@pytest.mark.integration
def test_a_save_that_is_due_waits_for_the_one_before_on_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults(monkeypatch, errno.EIO)

    def delayed(call: str) -> bool:
        if call == "fsync" and threading.current_thread().name.startswith("paceline-checkpoint"):
            time.sleep(0.3)  # a save has more than four
        return False

    faults.strikes = delayed
    result = train(tmp_path / "run", max_steps=2, keep_checkpoints=9, eval_every="never")
    steps = sorted(path.name[:13] for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert steps == [f"step-{step:08}" for step in (1, 2)]
    (message,) = [text for text in caplog.messages if "until the one before was written" in text]
    assert re.match(r"the save after step 2 waited [1-9]\.\d s,", message)
    assert result.record["checkpoint_stall_s"] > 1.0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.ESTALE], ids=["ENOSPC", "EIO", "ESTALE"])
def test_a_disk_that_takes_nothing_for_a_while_costs_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    undisturbed: paceline.Result,
    number: int,
) -> None:
    """All writes fail for twenty steps: checkpoints, ledger, metrics, events, the best model."""
    faults = Faults(monkeypatch, number)
    run, steps = tmp_path / "run", 0
    record_step = checkpoint_manager.CheckpointManager.record_step

    def counted(self: checkpoint_manager.CheckpointManager, *arguments: Any, **named: Any) -> None:
        nonlocal steps
        steps += 1
        faults.strikes = lambda call: call != "open" and 20 <= steps < 40
        record_step(self, *arguments, **named)

    monkeypatch.setattr(checkpoint_manager.CheckpointManager, "record_step", counted)
    with caplog.at_level(logging.WARNING):
        result = train(run, checkpoint_every=("4steps",), log_every=1)
    assert_equal(result, undisturbed, run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, STEPS + 1))
    told = [record.message for record in caplog.records]
    assert any("the next try is after step 24" in message for message in told)
    assert any("metrics.jsonl: " in message and "Training continues" in message for message in told)
    assert any("metrics.jsonl is written again." in message for message in told)
    kinds = [event["event"] for event in RunDirectory(run).read_events()]
    assert kinds.count("checkpoint failed") >= 4
    assert kinds[-1] == "finished"


def test_a_last_save_that_fails_for_good_says_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: paceline.Result
) -> None:
    monkeypatch.setattr(checkpoint_manager, "LAST_TRIES_S", (0.0, 0.0))
    run = tmp_path / "run"
    steps = 0
    record_step = checkpoint_manager.CheckpointManager.record_step
    with monkeypatch.context() as broken:
        faults = Faults(broken, errno.ENOSPC)

        def counted(self: checkpoint_manager.CheckpointManager, *arguments: Any, **named: Any) -> None:
            nonlocal steps
            steps += 1
            if steps == 48:
                self._checkpointer.wait()  # what was saved before is on disk
            faults.strikes = lambda call: call == "mkdir" and steps >= 48
            record_step(self, *arguments, **named)

        broken.setattr(checkpoint_manager.CheckpointManager, "record_step", counted)
        with pytest.raises(paceline.CheckpointError) as error:
            train(run, checkpoint_every=("10steps",))
    assert "No space left on device" in str(error.value)
    assert "tried 3 times" in str(error.value)
    assert "the newest checkpoint kept is step-0000004" in str(error.value)
    assert f"paceline resume {run}" in str(error.value)
    assert not (run / "result.json").exists()
    # With room again, it goes on from there.
    assert_equal(train(run), undisturbed, run)


def test_a_disk_that_is_really_full_for_a_while(
    small_disk: Path, run_processes: Any, undisturbed: paceline.Result
) -> None:
    run = small_disk / "run"
    done = run_processes.paceline(
        *("train", f"{TASK}:Filling", "--set", f"ballast={small_disk / 'ballast'}", "--nproc", "2"),
        *(
            "--max-steps",
            str(STEPS),
            "--eval-every",
            "7steps",
            "--checkpoint-every",
            "2steps",
            "--keep-checkpoints",
            "2",
        ),
        *("--threads", "1", "--run-dir", run, "--log-every", "1", "--set", "free=40", "--microbatches", "4"),
    )
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stderr
    assert "the next try is after step" in done.stderr
    result = paceline.Result.of(json.loads((run / "result.json").read_text()))
    assert_equal(result, undisturbed, run)


def test_a_disk_that_is_really_full_at_the_end_is_one_error(small_disk: Path, run_processes: Any) -> None:
    run = small_disk / "run"
    done = run_processes.paceline(
        *("train", f"{TASK}:Filling", "--set", f"ballast={small_disk / 'ballast'}", "--set", "free=1000"),
        *("--set", "delays_s=(0.1,)", "--set", "committed=run/checkpoints/step-00000004-*", "--nproc", "2"),
        *("--max-steps", "10", "--threads", "1", "--run-dir", run),
    )
    assert done.returncode == 1
    # Not even the error's record had room.
    assert not list((run / "logs").glob("*.error.json"))
    errors = [line for line in done.stderr.splitlines() if "This was the last save" in line]
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith("paceline: cannot save the checkpoint of step 10 in ")
    assert "tried 2 times; the newest checkpoint kept is step-00000004" in errors[0]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    groups = [event["members"] for event in events if event["event"] == "group"]
    # The rank that is left when the first one has given up may have another way to the disk; no replacement tries.
    assert groups in ([], [[1]]), groups
    assert done.stderr.count("Trying again in 0.1 s") == 1 + len(groups)
