"""Text of others cannot rewrite a terminal."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

import pytest
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from paceline.cli import main
from paceline.core.output import Console
from paceline.core.standard_streams import PrintableStream, escape_controls, printable_output
from paceline_serving.serve_command import _LogFormatter

HOSTILE = "a\x1b[2K\x1b]0;t\x07\r\x9b1m\u202eb\u2066\u2028\x7f\U000e0041"
SHOWN = r"a\x1b[2K\x1b]0;t\x07\x0d\x9b1m\u202eb\u2066\u2028\x7f\U000e0041"


def test_controls_are_shown() -> None:
    assert escape_controls(HOSTILE) == SHOWN
    assert escape_controls("a\n\tb", keep="\n\t") == "a\n\tb"
    assert escape_controls("a\n\tb") == r"a\x0a\x09b"
    assert escape_controls("naïve 日本 العربية 👩‍👩‍👧 \u200b") == "naïve 日本 العربية 👩‍👩‍👧 \u200b"


def test_colours_of_output_are_dropped_and_nothing_else() -> None:
    assert printable_output("\x1b[36m(worker)\x1b[0m loss \x1b[1;38:5:2mlow\x1b[m") == "(worker) loss low"
    assert printable_output(HOSTILE) == SHOWN
    assert printable_output("\x1b[2Ka\tb", keep="\t") == "\\x1b[2Ka\tb"


def test_a_stream_shows_them() -> None:
    raw = io.StringIO()
    stream = PrintableStream(raw)
    print(HOSTILE, "b", file=stream)  # type: ignore[arg-type]
    stream.writelines(["c\n"])
    assert raw.getvalue() == f"{SHOWN} b\nc\n"
    assert not stream.isatty()


def test_a_console_shows_them_and_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.StringIO()
    monkeypatch.setattr(sys, "stdout", PrintableStream(raw))
    monkeypatch.setenv("TERM", "xterm")
    console = Console(force_terminal=True, width=200)
    table = Table("name")
    table.add_row(escape(HOSTILE), style="red")
    console.print(table)
    console.print(escape(HOSTILE))
    with Progress(console=console) as progress:
        progress.add_task(escape(HOSTILE))
    written = raw.getvalue()
    assert written.count(r"\x1b[2") >= 3  # rich has measured a table's cell without the escapes
    assert "\x1b[31m" in written, "its own colours"
    for character in "\x9b\u202e\u2066\u2028\x7f\x07":
        assert character not in written


def test_a_message_of_the_server_is_one_line() -> None:
    record = logging.LogRecord("name", logging.INFO, "file", 1, "%s", (f"a\n{HOSTILE}",), None)
    assert _LogFormatter("%(message)s").format(record) == rf"a\x0a{SHOWN}"


def test_every_command_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "x\x1b[2K"
    (directory / "logs").mkdir(parents=True)
    (directory / "logs" / "rank-0.log").write_text(f"{HOSTILE}\n")
    (directory / "run.toml").write_text("")
    stdout = sys.stdout
    for words in (["runs", str(tmp_path)], ["logs", str(directory)], ["audit", str(tmp_path / HOSTILE)]):
        monkeypatch.setattr(sys, "argv", ["paceline", *words])
        main()
        captured = capsys.readouterr()
        assert r"\x" in captured.out + captured.err
        assert "\x1b" not in captured.out + captured.err
    assert sys.stdout is stdout
