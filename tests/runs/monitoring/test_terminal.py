from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from paceline.runs import console
from paceline.runs.console import duration, number, summary
from paceline.runs.directory import EpochSteps, RunDirectory
from paceline.runs.metric_writers import RankStatus
from paceline.runs.monitor import Monitor
from paceline.runs.rank_log import capture_rank_output, open_rank_log, plain

RESULT: dict[str, Any] = {
    "steps": 40,
    "samples": 2560,
    "samples_per_s": 12345.6,
    "seconds": 3723.4,
    "restarts": 0,
    "metrics": {"val": {"loss": 0.25, "accuracy": 0.9123}, "test": {"accuracy": 0.905}},
    "model_sha256": "0123456789abcdef" * 4,
}


OPTIONS: dict[str, Any] = {
    "rank": 0,
    "world_size": 1,
    "total_steps": 40,
    "epochs": EpochSteps(20),
    "first_step": 0,
    "log_every": 10,
    "quiet": False,
    "device": "cpu",
}


class FakeTerminal(io.StringIO):
    """Says that it is a terminal."""

    def isatty(self) -> bool:
        return True

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Be stdout and stderr."""
        with redirect_stdout(self), redirect_stderr(self):
            yield


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "my run")
    directory.create()
    return directory


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    """A terminal of 80 columns."""
    screen = FakeTerminal()
    for name, value in (("TERM", "xterm-256color"), ("COLUMNS", "80"), ("LINES", "30")):
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    # Every step is drawn, a second after the one before: what is on the screen depends on no clock.
    monkeypatch.setattr(console, "REFRESH_S", 0.0)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=map(float, count()).__next__))
    return screen


def train(
    directory: RunDirectory,
    *,
    quiet: bool = False,
    rows: Any = (),
    total_steps: int | None = 40,
    log_format: str = "text",
) -> None:
    options = OPTIONS | {"quiet": quiet, "total_steps": total_steps, "world_size": len(rows) or 1}
    options["log_format"] = log_format
    with Monitor(directory, **options) as monitor:
        monitor.note("a note")
        for step in range(1, 41):
            monitor.timer.seconds["forward"] += 0.01
            monitor.on_step_end(step, (step - 1) // 20, 64, 1.0 / step, lambda: (0.1,), lambda: rows)
            if step % 20 == 0:
                monitor.set_status("evaluating val")
                monitor.on_eval_end("val", step, (step - 1) // 20, {"accuracy": 0.5})
            if step == 30:
                print("printed by the task")
        monitor.finish(RESULT)


def lines_of(screen: FakeTerminal) -> list[str]:
    """Everything that was ever drawn, a line each, without control codes."""
    return [plain(line).rstrip() for line in re.split(r"\n|\r", screen.getvalue())]


def test_the_bar_shows_step_epoch_loss_speed_metrics_and_time_left(
    directory: RunDirectory, screen: FakeTerminal
) -> None:
    with screen.in_use():
        train(directory)
    lines = lines_of(screen)
    assert any(re.search(r"epoch 2/2 .* step 31/40 +0:00:09 left", line) for line in lines)
    assert "loss 0.03226  6,400 samples/s  val accuracy 0.5" in lines
    assert any(line.endswith("evaluating val") for line in lines)


def test_lines_printed_meanwhile_stay_whole(directory: RunDirectory, screen: FakeTerminal) -> None:
    with screen.in_use():
        train(directory)
    lines = lines_of(screen)
    for whole in ("a note", "printed by the task", "epoch 1/2  step 20  val accuracy 0.5"):
        assert lines.count(whole) == 1


def test_what_is_drawn_is_no_wider_than_the_terminal(directory: RunDirectory, screen: FakeTerminal) -> None:
    row = RankStatus(0.01, 0.1, 1.0, 1.0)
    with screen.in_use():
        train(directory, rows=[row, row, row, row._replace(busy_fraction=1.0)])
    drawn = [line for line in lines_of(screen) if str(directory.path) not in line]
    assert max(map(len, drawn)) <= 80


def test_a_slow_rank_is_named(directory: RunDirectory, screen: FakeTerminal) -> None:
    row = RankStatus(0.01, 0.5, 1.0, 1.0)
    with screen.in_use():
        train(directory, rows=[row, row, row, row._replace(busy_fraction=0.9)])
    assert "rank 3 is 1.5x slower than the mean" in screen.getvalue()


def test_small_differences_between_ranks_are_not_shown(directory: RunDirectory, screen: FakeTerminal) -> None:
    row = RankStatus(0.01, 0.8, 1.0, 1.0)
    with screen.in_use():
        train(directory, rows=[row, row._replace(busy_fraction=0.9)])
    assert "slower" not in screen.getvalue()


def test_a_run_without_a_known_end_has_a_bar_too(directory: RunDirectory, screen: FakeTerminal) -> None:
    with screen.in_use():
        train(directory, total_steps=None)
    assert any(re.search(r"epoch 1 .* step 7$", line) for line in lines_of(screen))


def test_the_terminal_is_given_back(directory: RunDirectory, screen: FakeTerminal) -> None:
    with screen.in_use():
        train(directory)
        assert sys.stdout is screen
        assert sys.stderr is screen
    # The cursor was hidden, and is shown at the end.
    assert screen.getvalue().rindex("\x1b[?25h") > screen.getvalue().rindex("\x1b[?25l")


def test_the_terminal_is_given_back_after_an_error(directory: RunDirectory, screen: FakeTerminal) -> None:
    def fail() -> None:
        with Monitor(directory, **OPTIONS) as monitor:
            monitor.on_step_end(1, 0, 64, 0.5, lambda: (0.1,))
            print("no line end yet", end="")
            raise RuntimeError("boom")

    with screen.in_use(), pytest.raises(RuntimeError, match="boom"):
        fail()
    assert screen.getvalue().endswith("\x1b[?25h")
    assert "no line end yet" in lines_of(screen)


def test_the_log_gets_the_lines_but_neither_bar_nor_codes(directory: RunDirectory, screen: FakeTerminal) -> None:
    with screen.in_use(), capture_rank_output(directory, 0, 1):
        assert sys.stderr.isatty()
        train(directory)
    log = directory.log_of(0).read_text()
    assert "a note\n" in log
    assert "printed by the task\n" in log
    assert "epoch 2/2  step 40  val accuracy 0.5\n" in log
    assert log.count("val accuracy") == 2
    assert "\x1b" not in log
    assert "━" not in log


def test_in_a_notebook_the_log_is_a_file_and_quiet_is_quiet(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with capture_rank_output(directory, 0, 1):
        terminal = console.Terminal(total_steps=4, epochs=EpochSteps(2), quiet=True)
        terminal.print("a line of the run")
        terminal.close()
    assert capsys.readouterr() == ("", "")
    assert "a line of the run\n" in directory.log_of(0).read_text()


def test_the_summary_names_metrics_as_they_are(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=100).print(summary({"metrics": {"[/val]": {"accuracy[top]": 0.5}}}, directory))
    out = capsys.readouterr().out
    assert "[/val]" in out
    assert "accuracy[top]" in out


def test_a_pipe_gets_a_dated_line_an_epoch_and_evaluation_and_the_summary(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_LEAST_LINE_S", 0.0)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    train(directory)
    out, err = capsys.readouterr()
    assert out == "printed by the task\n"
    lines = err.splitlines()[:5]
    assert lines[0] == "a note"
    assert all(re.match(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d  epoch", line) for line in lines[1:])
    assert [re.sub(r"  \S+ left$", "", line[21:]) for line in lines[1:]] == [
        "epoch 1/2  step 20/40  loss 0.05  lr 0.1  6,400 samples/s",
        "epoch 1/2  step 20/40  val accuracy 0.5",
        "epoch 2/2  step 40/40  loss 0.025  lr 0.1  6,400 samples/s",
        "epoch 2/2  step 40/40  val accuracy 0.5",
    ]


def test_a_pipe_gets_a_line_every_30_seconds_within_a_long_epoch(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    minutes = SimpleNamespace(monotonic=count(0.0, 60.0).__next__, strftime=lambda form: "2026-11-27 22:30:00")
    monkeypatch.setattr(console, "time", minutes)
    monkeypatch.setattr("paceline.runs.monitor.perf_counter", count(0.0, 16.0).__next__)
    with Monitor(directory, **{**OPTIONS, "epochs": None, "total_steps": 1000, "log_every": 500}) as monitor:
        for step in range(1, 9):
            monitor.timer.seconds["forward"] += 0.01
            monitor.on_step_end(step, 0, 64, 1.0 / step, lambda: (0.1,))
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) < 8
    assert lines[-1].startswith("2026-11-27 22:30:00  epoch 1  step ")
    assert re.search(r"/1000  loss 0\.\d+  lr 0\.1  6,400 samples/s  \S+ left$", lines[-1])


def test_json_lines_are_progress_evaluations_messages_and_the_result_and_a_terminal_keeps_its_bar(
    directory: RunDirectory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    screen: FakeTerminal,
) -> None:
    monkeypatch.setattr(console, "_LEAST_LINE_S", 0.0)
    with open_rank_log(directory, 0, 1, quiet=False, log_format="json"):
        logging.getLogger("paceline.runs.anything").warning("a warning")
        train(directory, log_format="json")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert all(line.pop("time") > 0 for line in lines)
    assert [line["kind"] for line in lines] == ["message", "message", *["progress", "eval"] * 2, "result"]
    assert lines[0] == {"kind": "message", "level": "warning", "message": "a warning"}
    assert lines[1]["message"] == "a note"
    assert {**lines[4], "seconds_left": 0} == {
        "kind": "progress",
        "step": 40,
        "total_steps": 40,
        "epoch": 1,
        "loss": 0.025,
        "lr": 0.1,
        "samples_per_s": 6400.0,
        "seconds_left": 0,
    }
    assert lines[5] == {"kind": "eval", "step": 40, "epoch": 1, "split": "val", "metrics": {"accuracy": 0.5}}
    assert lines[6] == {"kind": "result", **RESULT}

    with screen.in_use():
        train(directory, log_format="json")
    assert not [line for line in lines_of(screen) if line.startswith("{")]


def test_quiet_shows_nothing_and_still_logs(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    with capture_rank_output(directory, 0, 1):
        train(directory, quiet=True)
    assert capsys.readouterr() == ("printed by the task\n", "")
    assert "val accuracy 0.5\n" in directory.log_of(0).read_text()


def test_the_summary_has_what_a_user_looks_for(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    train(directory)
    text = " ".join(capsys.readouterr().err.split())
    assert "split loss accuracy" in text
    assert "val 0.25 0.9123 test 0.905" in text
    assert "steps 40 samples 2,560 speed 12,346 samples/s time 1:02:03" in text
    assert f"model sha256 {RESULT['model_sha256']}" in text
    assert f"paceline audit '{directory.path}'" in text
    assert f"tensorboard --logdir '{directory.tensorboard}'" in text


def test_without_tensorboard_a_run_has_no_files_for_it(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    train(directory)
    assert not directory.tensorboard.exists()
    assert "curves" not in capsys.readouterr().err
    assert directory.metrics.read_text().count("\n") > 2


@pytest.mark.parametrize(
    ("value", "shown"), [(3, "3"), (12345, "12,345"), (0.123456, "0.1235"), (1e-7, "1e-07"), ("x", "x")]
)
def test_numbers_for_people(value: Any, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0:00:00"), (59.6, "0:01:00"), (3723, "1:02:03"), (180000, "2d 2:00:00")]
)
def test_durations_for_people(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
