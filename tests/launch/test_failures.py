"""Who failed first, and what is said about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError, PeerLostError, StopRequested
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import (
    ProcessExit,
    describe,
    exit_code_of,
    expand,
    first_failure,
    read_failure,
    record_failure,
)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def _record(directory: RunDirectory, rank: int, error: BaseException) -> int:
    try:
        raise error
    except BaseException as raised:
        return record_failure(directory, rank, raised)


def test_the_culprit_is_told_from_its_victims(directory: RunDirectory) -> None:
    _record(directory, 0, PeerLostError("gone", rank=2))
    _record(directory, 2, ValueError("boom"))
    _record(directory, 1, PeerLostError("gone", rank=2))
    failure = first_failure(directory, [ProcessExit(0, 1, 1.0), ProcessExit(1, 1, 2.0, True), ProcessExit(2, 1, 3.0)])
    assert failure is not None
    assert (failure.rank, failure.victim, failure.exit_code) == (2, False, 1)
    message = describe(failure, directory)
    assert message.startswith("rank 2 failed first: ValueError: boom\n  File ")
    assert message.endswith(f"log: {directory.log_of(2)}")
    assert "Traceback" not in message


def test_among_culprits_the_earliest_wins(directory: RunDirectory) -> None:
    _record(directory, 3, ValueError("first"))
    _record(directory, 0, ValueError("second"))
    failure = first_failure(directory, [ProcessExit(0, 1, 1.0), ProcessExit(3, 1, 1.0)])
    assert failure is not None
    assert failure.message == "first"


def test_a_killed_rank_is_a_culprit(directory: RunDirectory) -> None:
    _record(directory, 0, PeerLostError("gone"))
    failure = first_failure(directory, [ProcessExit(0, 1, 1.0), ProcessExit(2, -9, 2.0)])
    assert failure is not None
    assert describe(failure, directory) == (
        f"rank 2 was killed by SIGKILL (out of memory?).\n  log: {directory.log_of(2)}"
    )


def test_what_the_launcher_stopped_is_no_culprit(directory: RunDirectory) -> None:
    assert first_failure(directory, [ProcessExit(0, -15, 1.0, True), ProcessExit(1, 0, 1.0)]) is None
    assert first_failure(directory, [ProcessExit(0, 75, 1.0), ProcessExit(1, 130, 1.0)]) is None


def test_only_victims_are_better_than_nothing(directory: RunDirectory) -> None:
    _record(directory, 1, PeerLostError("gone"))
    failure = first_failure(directory, [ProcessExit(1, 1, 1.0)])
    assert failure is not None
    assert failure.victim


def test_a_users_error_is_shown_as_it_is(directory: RunDirectory) -> None:
    assert _record(directory, 1, ConfigError("--x must be 1.")) == 2
    failure = first_failure(directory, [ProcessExit(1, 2, 1.0)])
    assert failure is not None
    assert describe(failure, directory) == "--x must be 1."
    assert failure.exit_code == 2


def test_a_script_that_records_nothing_is_quoted(directory: RunDirectory) -> None:
    directory.create()
    directory.log_of(1).write_text("Traceback ...\nKeyError: 'x'\n\n")
    failure = first_failure(directory, [ProcessExit(1, 3, 1.0)])
    assert failure is not None
    assert describe(failure, directory).startswith("rank 1 exited with status 3: KeyError: 'x'.\n")
    assert failure.exit_code == 3


def test_an_agents_code_is_replaced_by_its_ranks(directory: RunDirectory) -> None:
    agent = ProcessExit(None, 1, 9.0, starter="torchrun")
    assert expand(agent, directory) == [agent]
    _record(directory, 0, PeerLostError("gone"))
    assert [e.rank for e in expand(agent, directory)] == [0, None]
    failure = first_failure(directory, expand(agent, directory))
    assert failure is not None
    assert describe(failure, directory).startswith("torchrun ended with exit code 1; see the")
    _record(directory, 1, StopRequested("saved", exit_code=75))
    assert [(e.rank, e.code) for e in expand(agent, directory)] == [(0, 1), (1, 75)]
    assert expand(ProcessExit(None, 0, 9.0), directory) == [ProcessExit(None, 0, 9.0)]


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", json.dumps({"rank": 1}), json.dumps({"rank": "1"}), b"\xff\xfe"],
)
def test_a_damaged_record_is_none(directory: RunDirectory, content: str | bytes) -> None:
    directory.create()
    path = directory.error_of(1)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert read_failure(path) is None


def test_a_record_of_the_wrong_types_is_none(directory: RunDirectory) -> None:
    _record(directory, 1, ValueError("x"))
    document = json.loads(directory.error_of(1).read_text())
    assert read_failure(directory.error_of(1)) is not None
    directory.error_of(1).write_text(json.dumps({**document, "message": 5}))
    assert read_failure(directory.error_of(1)) is None


def test_a_record_that_cannot_be_written_hides_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").write_text("a file in the way")
    assert _record(RunDirectory(tmp_path), 0, ConfigError("x")) == 2
    assert capsys.readouterr().err.startswith("x\nThis could not be recorded: ")


def test_exit_codes() -> None:
    codes = [
        exit_code_of(e)
        for e in (
            ValueError(),
            ConfigError(),
            KeyboardInterrupt(),
            SystemExit(4),
            SystemExit(),
            SystemExit("no"),
        )
    ]
    assert codes == [1, 2, 130, 4, 0, 1]
