"""A worker that an error ends records the error, and the end of the run if no agent recovers it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    PeerLostError,
    RunDirectoryError,
    RunDirectoryWriteError,
    StopRequested,
)
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import FailureRecord, read_failure, record_worker_failure


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
    expected = [{"rank": 3}] * alone + [{"slot": 4}] * with_agent
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
