"""``--help`` names everything, at once: without torch."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from paceline.config import RunConfig, flag

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
COMMANDS = ("train", "resume", "runs", "logs", "audit", "checkpoint", "bench", "version")
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
    assert not any(word.startswith("--no-") for word in words)


def test_versions_are_printed(said: dict[str, tuple[int, str]]) -> None:
    from paceline import __version__

    assert said["--version"][1].strip() == __version__
    assert said["version"][1].startswith(f"paceline {__version__}\npython ")
