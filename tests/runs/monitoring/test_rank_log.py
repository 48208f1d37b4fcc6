from __future__ import annotations

import gc
import io
import logging
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.core.errors import RunDirectoryError, TaskError
from paceline.core.standard_streams import LastingStream
from paceline.runs.directory import RunDirectory
from paceline.runs.rank_log import Tee, capture_rank_output, open_rank_log, plain, show_on

LOUD = """
import os, subprocess, sys, warnings
from pathlib import Path
from paceline.runs.rank_log import capture_rank_output
from paceline.runs.directory import RunDirectory

class Bad:
    def __del__(self):
        raise ValueError("unraisable")

with capture_rank_output(RunDirectory(Path(sys.argv[1])), int(sys.argv[2]), 2):
    print("from print")
    warnings.warn("from warnings")
    os.write(2, b"from descriptor 2\\n")
    subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    bad = Bad()
    del bad
    if sys.argv[3:]:
        exec(sys.argv[3])
print("after")
"""


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


def run_loud(directory: RunDirectory, rank: int, *code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LOUD, str(directory.path), str(rank), *code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.integration
def test_a_rank_above_zero_prints_into_its_log_only(directory: RunDirectory) -> None:
    done = run_loud(directory, 1)
    assert (done.stdout, done.stderr) == ("after\n", "")
    log = directory.log_of(1).read_text()
    assert log.startswith("--- rank 1 of 2, pid ")
    for text in (
        "from print\n",
        "UserWarning: from warnings",
        "from descriptor 2\n",
        "from a child\n",
        "unraisable",
    ):
        assert text in log
    assert "after" not in log
    # Line by line, and in the order in which it happened.
    assert log.index("from print") < log.index("from warnings") < log.index("from descriptor") < log.index("child")


@pytest.mark.integration
def test_rank_zero_prints_to_the_terminal_and_the_log(directory: RunDirectory) -> None:
    done = run_loud(directory, 0)
    assert sorted(done.stdout.splitlines()) == ["after", "from a child", "from print"]
    for text in ("UserWarning: from warnings", "unraisable"):
        assert text in done.stderr
        assert text in directory.log_of(0).read_text()
    assert "from print\n" in directory.log_of(0).read_text()


@pytest.mark.integration
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_is_in_the_log(directory: RunDirectory, rank: int) -> None:
    done = run_loud(directory, rank, "1 / 0")
    assert done.returncode == 1
    log = directory.log_of(rank).read_text()
    assert "Traceback" in log
    assert "ZeroDivisionError: division by zero" in log


def test_a_deliberate_error_is_one_line_in_the_log(directory: RunDirectory) -> None:
    with pytest.raises(TaskError), capture_rank_output(directory, 0, 1):
        raise TaskError("there is no field 'lrr'.")
    assert directory.log_of(0).read_text().splitlines()[1:] == ["TaskError: there is no field 'lrr'."]


def test_a_restart_appends(directory: RunDirectory) -> None:
    for text in ("one", "two"):
        with capture_rank_output(directory, 0, 1):
            print(text)
    lines = directory.log_of(0).read_text().splitlines()
    assert [line for line in lines if not line.startswith("---")] == ["one", "two"]
    assert len(lines) == 4


@pytest.mark.integration
def test_a_log_that_a_launcher_already_connected_is_left_alone(directory: RunDirectory) -> None:
    with directory.log_of(0).open("a") as log:
        command = [sys.executable, "-c", LOUD, str(directory.path), "0"]
        subprocess.run(command, stdout=log, stderr=log, timeout=60, check=True)
    text = directory.log_of(0).read_text()
    assert text.count("from print") == 1
    assert text.count("from descriptor 2") == 1


@pytest.mark.integration
def test_descriptors_and_streams_come_back(directory: RunDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    gc.collect()  # what others have left may hold descriptors
    before = (sys.stdout, sys.stderr, len(os.listdir("/proc/self/fd")))
    with capture_rank_output(directory, 1, 2):
        os.write(1, b"inside\n")
        os.write(2, b"inside too\n")
    os.write(1, b"outside\n")
    os.write(2, b"outside too\n")
    assert capfd.readouterr() == ("outside\n", "outside too\n")
    assert "inside\ninside too\n" in directory.log_of(1).read_text()
    assert (sys.stdout, sys.stderr, len(os.listdir("/proc/self/fd"))) == before


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(RunDirectoryError, match=r"cannot write .*rank-1\.log: No such file"),
        capture_rank_output(RunDirectory(tmp_path / "absent"), 1, 2),
    ):
        pytest.fail("the block must not run")


def test_messages_of_the_core_and_of_plug_ins_are_shown(
    directory: RunDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    loggers = [logging.getLogger(name) for name in ("paceline.runs.anything", "paceline_more_strategies.anything")]
    for quiet in (False, True):
        with open_rank_log(directory, 0, 1, quiet=quiet):
            for logger in loggers:
                logger.info("advice")
                logger.warning("a warning")
    shown = ["paceline: advice", "paceline: a warning"] * 2 + ["paceline: a warning"] * 2
    assert capfd.readouterr().err.splitlines() == shown


def test_the_tee_logs_lines_as_a_reader_sees_them() -> None:
    terminal, log = io.StringIO(), io.StringIO()
    tee = Tee(terminal, log)
    for part in ("10%\r", "50%\r", "100%\n", "\x1b[1;31mred", "\x1b[0m\n", "windows\r\n", "no end"):
        tee.write(part)
    assert log.getvalue() == "100%\nred\nwindows\n"
    tee.end_line()
    tee.end_line()
    assert log.getvalue() == "100%\nred\nwindows\nno end\n"
    assert terminal.getvalue().startswith("10%\r50%\r100%\n\x1b[1;31mred")


def test_a_log_in_the_terminals_place_has_what_was_flushed(directory: RunDirectory) -> None:
    log = directory.log_of(1)
    with capture_rank_output(directory, 1, 2) as (tee, _):
        print("loading ...", end="", flush=True)
        assert log.read_bytes().endswith(b"\nloading ...")
        print("\x1b[1m done")
        for percent in (10, 50):
            print(f"\r{percent}%", end="", flush=True)
        assert log.read_bytes().endswith(b"\nloading ... done\n\r10%\r50%")
        for percent in range(1000):
            print(f"\r{percent}%", end="")
        assert tee._line == "\r999%"
        print("\nend", end="", flush=True)
    assert log.read_bytes().endswith(b"50%\r999%\nend\n")


def test_a_terminal_is_taken_away_before_it_is_closed(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def close(self) -> None:
            print("a thread prints", file=streams[0])
            super().close()

    monkeypatch.setattr("paceline.runs.rank_log.open", lambda *args, **options: Terminal(), raising=False)
    with capture_rank_output(directory, 1, 2) as streams:
        with ExitStack() as stack:
            show_on((1, 2), streams, stack)
            assert isinstance(streams[0].terminal, LastingStream)
        assert streams[0].terminal is streams[0].log


def test_plain_removes_titles_and_links() -> None:
    assert plain("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\x1b[2K") == "alink"
