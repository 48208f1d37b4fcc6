"""``--help`` names everything, at once: without torch."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from cyclopts import App

from paceline.cli import app
from paceline.cli.launcher_options import in_question
from paceline.config import RunConfig, flag
from paceline.launchers.names import LAUNCHER_NAMES

pytestmark = [pytest.mark.integration, pytest.mark.cold]

SCRIPT = """
import contextlib, io, json, sys
from paceline.cli import main
said = {}
for words in json.loads(sys.argv[1]):
    sys.argv = ["paceline", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main()
    said[" ".join(words)] = [code, out.getvalue()]
print(json.dumps([said, "torch" in sys.modules]))
"""
COMMANDS = (
    *("train", "resume", "tune", "launch", "jobs", "status", "cancel", "doctor"),
    *(
        "runs",
        "dashboard",
        "logs",
        "audit",
        "report",
        "check",
        "checkpoint",
        "bench",
        "scan",
        "plan",
        "version",
    ),
    *("export", "registry", "serve", "predict"),
)
CALLS = [["--help"], *([command, "--help"] for command in COMMANDS), ["--version"], ["version"]]


@pytest.fixture(scope="module")
def said() -> dict[str, tuple[int, str]]:
    """What each call of ``CALLS`` answered, all in one process that has not imported torch."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(CALLS)],
        env=None,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answers, imported_torch = json.loads(done.stdout)
    assert not imported_torch
    return {call: (code, text) for call, (code, text) in answers.items()}


def test_every_call_succeeds(said: dict[str, tuple[int, str]]) -> None:
    assert len(said) == len(CALLS)
    assert {code for code, _ in said.values()} == {0}


def test_the_commands_are_listed_with_what_they_do(said: dict[str, tuple[int, str]]) -> None:
    text = said["--help"][1]
    for command in COMMANDS:
        assert any(line.split()[1:2] == [command] for line in text.splitlines()), command


@pytest.mark.parametrize("command", ["train", "resume"])
def test_every_option_is_explained(said: dict[str, tuple[int, str]], command: str) -> None:
    words = said[f"{command} --help"][1].split()
    for field in dataclasses.fields(RunConfig):
        if field.name not in ("task", "run"):
            assert flag(field.name) in words, field.name
    for group in ("Processes", "Parallelism", "Training", "Data", "Evaluation", "Run"):
        assert group in words
    assert {"--dry-run", "--json", "--quiet"} <= set(words)
    # Options are switched on, not off again.
    assert not {f"--no-{field.name.replace('_', '-')}" for field in dataclasses.fields(RunConfig)} & set(
        words
    )


@pytest.mark.parametrize(
    ("command", "arguments"),
    [("train", "TASK"), ("resume", "RUN"), ("tune", "TASK"), ("launch", "-- COMMAND..."), ("scan", "TASK")],
)
def test_the_usage_names_the_arguments(
    said: dict[str, tuple[int, str]], command: str, arguments: str
) -> None:
    first = said[f"{command} --help"][1].splitlines()[0]
    assert first.startswith(f"Usage: paceline {command} ")
    assert first.endswith(arguments)


def test_versions_are_printed(said: dict[str, tuple[int, str]]) -> None:
    from paceline import __version__

    assert said["--version"][1].strip() == __version__
    assert said["version"][1].startswith(f"paceline {__version__}\npython ")


def test_a_launchers_own_options_are_shown_with_its_name(said: dict[str, tuple[int, str]]) -> None:
    assert "--partition" not in said["train --help"][1]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "train", "--on", "slurm", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "--partition" in done.stdout
    assert "--image" not in done.stdout


@pytest.mark.parametrize(
    ("words", "launchers"),
    [
        ("paceline train task.py:Task --on slurm", ("slurm",)),
        ("/bin/paceline launch --on=ray -- x", ("ray",)),
        ("paceline/__main__.py doctor --nodes 2", ("spawn", "torchrun")),
        ("paceline train task.py:Task --on nothing", ("spawn", "torchrun")),
        ("paceline train task.py:Task --config options.toml", LAUNCHER_NAMES),
        ("pytest tests", LAUNCHER_NAMES),
    ],
)
def test_only_the_launchers_in_question_are_imported(words: str, launchers: tuple[str, ...]) -> None:
    assert tuple(in_question(words.split())) == tuple(launchers)


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "paceline", "runs", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def _commands(app: App, words: str = "") -> Iterator[tuple[str, App]]:
    if app.default_command is not None:
        yield words, app
    for name in app:
        if not name.startswith("-"):
            yield from _commands(app[name], f"{words} {name}".strip())


def test_no_name_means_two_options() -> None:
    found = dict(_commands(app))
    assert {"train", "tune", "bench serve"} <= set(found)
    for words, command in found.items():
        names = Counter(name for option in command.assemble_argument_collection() for name in option.names)
        assert [name for name, count in names.items() if count > 1 and name != "*"] == [], words
