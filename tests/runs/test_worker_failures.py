"""A worker that an error ends records the error, and the end of the run if no agent recovers it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from tests.small_disk import small_disk

from paceline.core.config import RunConfig
from paceline.core.environment import Environment
from paceline.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    PeerLostError,
    RunDirectoryError,
    RunDirectoryWriteError,
    StopRequested,
)
from paceline.core.job import WorkerConfig
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import (
    FailureRecord,
    SupersededError,
    describe,
    explain_disk_error,
    failure_of,
    read_failure,
    record_worker_failure,
)
from paceline.training.worker import run_reported


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """Return the directory of a run that has a manifest."""
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    directory.manifest.write_text("")
    assert directory.exists()
    return directory


@pytest.mark.parametrize(
    ("error", "existed", "alone", "with_agent"),
    [
        (DataError("a sample is missing"), True, True, True),
        (CheckpointError("the disk is full"), True, True, True),
        (ValueError("a bug"), True, True, False),  # an agent starts the worker again
        (PeerLostError("rank 1 is gone"), True, False, False),
        (StopRequested("stopped", exit_code=75), True, False, False),
        (SupersededError("the run continued without it"), True, False, False),  # it may have finished
        (ConfigError("--seed differs"), True, False, False),  # the start is refused, and the run is as it was
        (RunDirectoryError("the run has finished"), True, False, False),
        (RunDirectoryWriteError("the disk is full"), True, True, True),
        (ConfigError("--clip-norm must be positive"), False, True, True),
    ],
)
def test_an_error_that_nobody_recovers_ends_the_run(
    directory: RunDirectory, error: Exception, existed: bool, alone: bool, with_agent: bool
) -> None:
    reports: list[FailureRecord] = []
    codes = [
        record_worker_failure(directory, 3, error, existed=existed),
        record_worker_failure(directory, 4, error, existed=existed, tell_agent=reports.append),
    ]
    expected = [{"rank": 3}] * alone + [{"local_index": 4}] * with_agent
    events = [{k: v for k, v in event.items() if k != "time"} for event in directory.read_events()]
    assert events == [{"event": "failed", **process, "error": str(error)} for process in expected]
    recorded = [read_failure(directory.error_of(rank)) for rank in (3, 4)]
    assert [record and (record.message, record.exit_code) for record in recorded] == [
        (str(error), code) for code in codes
    ]
    assert reports == []  # the disk took the records


def test_a_run_that_has_not_begun_gets_no_event(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    record_worker_failure(directory, 0, ConfigError("an option is wrong"), existed=False)
    assert directory.read_events() == []
    assert read_failure(directory.error_of(0)) is not None


def raised(error: OSError) -> OSError:
    """Return the error with a traceback, as it is caught."""
    try:
        raise error
    except OSError as caught:
        return caught


def test_the_disk_that_failed_is_named(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    full = explain_disk_error(OSError(errno.ENOSPC, "No space left on device", "/scratch/cache"), directory)
    assert str(full).startswith(
        "cannot write /scratch/cache: No space left on device. Everything that was saved before"
    )
    stale = explain_disk_error(OSError(errno.ESTALE, "Stale file handle", str(directory.metrics)), directory)
    assert str(stale).startswith(f"cannot write {directory.metrics}: Stale file handle. ")
    broken = explain_disk_error(raised(OSError(errno.EIO, "Input/output error")), directory)
    assert f"cannot write a file (in {__file__}, line " in str(broken)
    assert str(directory.path) not in str(broken)
    # A file of the task's own is not the run's.
    private = PermissionError(errno.EACCES, "Permission denied", "/data/private.csv")
    assert explain_disk_error(private, directory) is private


@pytest.mark.integration
def test_shared_memory_that_is_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared_memory = tmp_path / "shm"
    monkeypatch.setattr("paceline.runs.failures.SHARED_MEMORY", shared_memory)
    error = OSError(errno.ENOSPC, "No space left on device")  # as sem_open() has it, without a path
    with small_disk(shared_memory, "64k"):
        text = str(explain_disk_error(error, RunDirectory(tmp_path / "run")))
    assert text.startswith(f"cannot write {shared_memory}: No space left on device. ")
    assert "Give more shared memory (docker run --shm-size=8g" in text


def test_a_limit_on_processes_is_explained() -> None:
    failure = failure_of(0, RuntimeError("can't start new thread"))
    assert "(ulimit -u, pids.max)" in describe(failure, None)
    assert "ulimit" not in describe(failure_of(0, RuntimeError("no such thread")), None)


def test_a_disk_that_does_not_answer_hides_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").symlink_to("long" * 100)  # each call fails, with ENAMETOOLONG instead of ENOENT
    directory = RunDirectory(tmp_path / "run")
    with pytest.raises(OSError, match="name too long"):
        directory.exists()
    assert record_worker_failure(directory, 0, DataError("a sample is missing"), existed=True) != 0
    shown = capsys.readouterr().err
    assert "a sample is missing" in shown
    assert "This could not be recorded" in shown


@pytest.mark.parametrize("at", ["run", "run/run.toml"])
def test_a_worker_reports_that_the_disk_does_not_answer(
    tmp_path: Path, at: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / at
    path.parent.mkdir(exist_ok=True)
    path.symlink_to("long" * 100)
    config = RunConfig(run_dir=str(tmp_path / "run"), task=f"{__file__}:Missing", device="cpu")
    environment = Environment(rank=0, world_size=1, local_rank=0, local_world_size=1, source="variables")
    code, result = run_reported(WorkerConfig(config=config), environment)
    assert (code != 0, result) == (True, None)
    assert "File name too long" in capsys.readouterr().err
