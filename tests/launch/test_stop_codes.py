"""The program above a rank in a step of Slurm's, whose signals reach the rank too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

# It saves for longer than others would, and notes each signal that it gets.
SAVES = """
trap 'echo TERM >>heard; saving=1' TERM
trap 'echo USR1 >>heard; saving=1' USR1
touch ready
until [ -n "$saving" ]; do sleep 0.05; done
sleep 0.3
exit "$1"
"""


def start(path: Path, *words: str) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "paceline.launch.stop_codes"]
    env = {**os.environ, "PACELINE_STOP_CODES": str(path / "codes")}
    return subprocess.Popen(
        [*program, *words], cwd=path, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def left(path: Path) -> list[str]:
    return [each.read_text() for each in (path / "codes").iterdir()]


@pytest.mark.parametrize(
    ("command", "code", "codes"),
    [
        ("exit 0", 0, []),
        ("exit 3", 3, []),
        ("kill -KILL $$", 137, []),
        ("exit 75", 0, ["75\n"]),
        ("kill -USR1 $$", 0, ["138\n"]),
    ],
)
def test_a_rank_that_is_not_asked_has_its_own_code(tmp_path: Path, command: str, code: int, codes: list[str]) -> None:
    (tmp_path / "codes").mkdir()
    process = start(tmp_path, "sh", "-c", command)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert left(tmp_path) == codes


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 1), (signal.SIGUSR1, 0)])
def test_a_signal_to_all_is_heard_once_and_ends_no_rank_that_saves(
    tmp_path: Path, wait_until: Callable[..., None], number: signal.Signals, code: int
) -> None:
    (tmp_path / "codes").mkdir()
    process = start(tmp_path, "bash", "-c", SAVES, "rank", str(code))
    wait_until((tmp_path / "ready").exists, "the rank")
    os.killpg(process.pid, number)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert left(tmp_path) == ([f"{code}\n"] if code else [])
    time.sleep(0.1)
    assert (tmp_path / "heard").read_text() == f"{number.name.removeprefix('SIG')}\n"


def test_a_code_that_cannot_be_left_is_the_program_s(tmp_path: Path) -> None:
    process = start(tmp_path, "sh", "-c", "exit 75")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "the exit code 75 could not be left for the job's script" in said
