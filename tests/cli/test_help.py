"""``--help`` names everything, at once: without torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from cyclopts import App

from paceline.cli import app, main
from paceline.cli.options import relevant_launchers
from paceline.core.config import all_options
from paceline.core.options import flag
from paceline.launch.launcher import LAUNCHER_NAMES

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
GROUPS = {
    "Start": ("train", "resume", "fork", "launch", "show-task", "join", "scale", "plan", "doctor"),
    "Look": ("runs", "logs", "dashboard", "report", "jobs", "status", "cancel"),
    "Prove": ("audit", "verify", "chaos", "bench"),
    "Tune": ("tune",),
    "Serve": ("export", "registry", "serve", "deploy", "predict"),
    "Keep clean": ("gc", "checkpoint"),
    "Other": ("config", "version"),
}
COMMANDS = tuple(command for commands in GROUPS.values() for command in commands)
SUBCOMMANDS = (*("runs show", "runs pipeline", "bench comm", "registry pull", "checkpoint ls"),)
WITH_RUN_OPTIONS = ("train", "resume", "tune", "chaos", "verify")
COMMON_OF_TRAIN = (
    *("--set", "--epochs", "--max-steps", "--global-batch-size", "--precision", "--seed", "--nproc"),
    *("--nodes", "--on", "--strategy", "--device", "--checkpoint-every", "--run-dir", "--config", "--dry-run"),
)
WITH_LAUNCHERS = ("train", "resume", "launch", "doctor")
HELPS = [
    [],
    *([command] for command in COMMANDS),
    *(command.split() for command in SUBCOMMANDS),
    *([*command.split(), "--on", name] for command in WITH_LAUNCHERS for name in LAUNCHER_NAMES),
    *(["serve", "--on", name] for name in ("embedded", "ray", "kserve")),
]
CALLS = [
    *([*words, "--help"] for words in HELPS),
    *([*command.split(), "--help-all"] for command in (*WITH_RUN_OPTIONS, "launch", "serve")),
    *(
        ["--version"],
        ["version"],
        ["train", "-h", "--json"],
    ),
]
_TWO_SCREENS = 60


@pytest.fixture(scope="module")
def said() -> dict[str, tuple[int, str]]:
    """What each call of ``CALLS`` answered, all in one process that has not imported torch."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(CALLS)],
        env={**os.environ, "COLUMNS": "80"},
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


def _groups(text: str) -> dict[str, list[str]]:
    """The groups of a help page in their order, and the first words of their lines."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if title := re.match("╭─ (.*?) ─", line):
            names = found.setdefault(title[1], [])
        elif entry := re.match(r"│ (?:\*  |   )?(\S+)", line):
            names.append(entry[1])
    return found


def test_the_commands_are_grouped_by_what_one_does(said: dict[str, tuple[int, str]]) -> None:
    found = _groups(said["--help"][1])
    assert {name: tuple(commands) for name, commands in found.items()} == GROUPS
    assert list(found) == list(GROUPS)
    assert "--help-all" in said["--help"][1]


@pytest.mark.parametrize("words", [" ".join(words) for words in HELPS])
def test_help_fits_two_screens(said: dict[str, tuple[int, str]], words: str) -> None:
    lines = said[f"{words} --help".strip()][1].splitlines()
    assert len(lines) <= _TWO_SCREENS
    assert max(map(len, lines)) <= 80


def test_the_help_of_train_begins_with_what_nearly_everybody_uses(said: dict[str, tuple[int, str]]) -> None:
    text = said["train --help"][1]
    found = _groups(text)
    assert list(found) == ["Arguments", "Common"]
    assert [word for word in found["Common"] if word.startswith("--")] == list(COMMON_OF_TRAIN)
    closing = " ".join(text.rpartition("╯")[2].split())
    assert closing.startswith("More options, shown by --help-all: Training, Data, Evaluation, ")
    assert "paceline train --on NAME --help" in closing


def test_all_groups_follow_in_the_order_in_which_they_are_met(said: dict[str, tuple[int, str]]) -> None:
    groups = list(_groups(said["train --help-all"][1]))
    assert groups[:5] == ["Arguments", "Common", "Training", "Data", "Evaluation"]
    assert groups.index("Parallelism") < groups.index("Recovery") < groups.index("Job") < groups.index("FSDP")
    own = [name for name in groups if name.startswith("--on ")]
    assert own == groups[-len(own) :]


@pytest.mark.parametrize("command", WITH_RUN_OPTIONS)
def test_every_option_is_explained(said: dict[str, tuple[int, str]], command: str) -> None:
    words = said[f"{command} --help-all"][1].split()
    own = {"tune": ("resume", "metrics_port", "metrics_host", "metrics_token_file")}
    for name in all_options():
        if name not in ("task", "run_dir", *own.get(command, ())):
            assert words.count(flag(name)) >= 1, name
    for group in ("Processes", "Parallelism", "Training", "Data", "Evaluation", "Run"):
        assert group in words
    if command in ("train", "resume"):
        assert {"--dry-run", "--json", "--quiet"} <= set(words)
    # Options are switched on, not off again.
    assert not {f"--no-{name.replace('_', '-')}" for name in all_options()} & set(words)


@pytest.mark.parametrize("command", ["tune", "chaos", "verify"])
def test_the_options_of_train_are_named_in_a_line(said: dict[str, tuple[int, str]], command: str) -> None:
    text = said[f"{command} --help"][1]
    assert "Options of paceline train, shown by --help-all: " in text
    assert "Training" not in _groups(text)
    assert "--fsdp-wrap" not in text


def test_a_servers_common_options_come_first(said: dict[str, tuple[int, str]]) -> None:
    short = _groups(said["serve --help"][1])
    assert [word for word in short["Common"] if word.startswith("--")] == [
        *("--host", "--port", "--replicas", "--devices", "--token-file", "--max-batch", "--max-queue"),
        *("--timeout", "--exact", "--trust", "--on", "--engine", "--json"),
    ]
    whole = said["serve --help-all"][1]
    command = app["serve"]
    for option in command.assemble_argument_collection():
        assert all(name in whole for name in option.names if name != "*")


def test_the_help_of_a_program_that_is_launched_is_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", "--on", "spawn", "--dry-run", "--", "/bin/true", "--help"]
    monkeypatch.setattr(sys, "argv", ["paceline", *words])
    assert main() == 0
    printed = capsys.readouterr().out
    assert "/bin/true --help" in printed
    assert "Usage: paceline" not in printed


def test_help_anywhere_is_help(said: dict[str, tuple[int, str]]) -> None:
    assert said["train -h --json"] == said["train --help"]


@pytest.mark.parametrize(
    ("command", "arguments"),
    [("train", "TASK"), ("resume", "RUN"), ("tune", "TASK"), ("launch", "-- COMMAND...")],
)
def test_the_usage_names_the_arguments(said: dict[str, tuple[int, str]], command: str, arguments: str) -> None:
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
    assert "--wait" in done.stdout
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
    assert tuple(relevant_launchers(words.split())) == tuple(launchers)


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
    assert {"train", "tune", "bench comm"} <= set(found)
    for words, command in found.items():
        names = Counter(name for option in command.assemble_argument_collection() for name in option.names)
        assert [name for name, count in names.items() if count > 1 and name != "*"] == [], words
