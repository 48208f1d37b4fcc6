"""The program above a rank in a step of Slurm's, whose signals reach the rank too."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.processes import children

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


def start(path: Path, *words: str, env: Mapping[str, str] | None = None, **more: Any) -> subprocess.Popen[str]:
    program = [sys.executable, "-P", "-m", "paceline.launch.stop_codes"]
    env = {**os.environ, "PACELINE_STOP_CODES": str(path / "codes"), **(env or {})}
    return subprocess.Popen(
        [*program, *words], cwd=path, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True, **more
    )


def left(path: Path) -> dict[str, str]:
    """The kinds of files that ranks have left, and what is in them."""
    return {each.name.partition("-")[0]: each.read_text() for each in (path / "codes").iterdir()}


@pytest.mark.parametrize("mode", [(), ("--shield",)])
def test_a_program_that_cannot_be_run_is_named(tmp_path: Path, mode: tuple[str, ...]) -> None:
    (tmp_path / "codes").mkdir()
    process = start(tmp_path, *mode, "no-such-program", "--epochs", "1")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 127
    assert said == "paceline: no-such-program cannot be run: No such file or directory.\n"


@pytest.mark.parametrize(
    ("command", "code", "files"),
    [
        ("exit 0", 0, {}),
        ("exit 3", 3, {"failed": "3\n"}),
        ("kill -KILL $$", 137, {"failed": "137\n"}),
        ("exit 75", 0, {"code": "75\n"}),
        ("kill -USR1 $$", 0, {"code": "138\n"}),
    ],
)
def test_a_rank_that_is_not_asked_has_its_own_code(
    tmp_path: Path, command: str, code: int, files: dict[str, str]
) -> None:
    (tmp_path / "codes").mkdir()
    process = start(tmp_path, "sh", "-c", command)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert left(tmp_path) == files


def test_the_code_of_the_rank_that_fails_first_is_kept(tmp_path: Path) -> None:
    (tmp_path / "codes").mkdir()
    for code in (3, 4):
        start(tmp_path, "sh", "-c", f"exit {code}").communicate(timeout=60)
    assert left(tmp_path) == {"failed": "3\n"}


def test_a_rank_that_is_started_again_has_not_stopped(tmp_path: Path) -> None:
    """torchrun asks the others to stop when one rank fails, and starts all of them again."""
    (tmp_path / "codes").mkdir()
    for rank, command in ((0, "kill -TERM $$"), (1, "exit 75"), (0, "exit 0")):
        start(tmp_path, "sh", "-c", command, env={"LOCAL_RANK": str(rank)}).communicate(timeout=60)
    assert left(tmp_path) == {"code": "75\n"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize(
    ("send", "code"),
    [
        pytest.param(os.killpg, 75, id="each process, by linuxproc"),
        pytest.param(os.kill, 1, id="the step's own program, by cgroup"),
    ],
)
def test_a_signal_is_heard_once_and_ends_no_rank_that_saves(
    tmp_path: Path, wait_until: Callable[..., None], number: signal.Signals, send: Callable[..., None], code: int
) -> None:
    (tmp_path / "codes").mkdir()
    process = start(tmp_path, "bash", "-c", SAVES, "rank", str(code))
    wait_until((tmp_path / "ready").exists, "the rank")
    # The process by which it learns what the signals have reached has to hear them.
    wait_until(lambda: "sleep" in [child.name() for child in children(process.pid)], "the canary")
    send(process.pid, number)
    os.kill(process.pid, number)  # it passes a signal on once
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert left(tmp_path) == {"code": f"{code}\n"}
    assert (tmp_path / "heard").read_text() == f"{number.name.removeprefix('SIG')}\n"


def test_a_listener_tells_the_ranks_below_a_program_that_does_not_hear(
    tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    (tmp_path / "codes").mkdir()
    program = f"{sys.executable} -P -m paceline.launch.stop_codes"
    mpirun = start(tmp_path, "--shield", "sh", "-c", f"{program} bash saves.sh 75; echo $? >code; touch saved")
    (tmp_path / "saves.sh").write_text(SAVES)
    listener = start(tmp_path, "--listen", stdin=subprocess.PIPE)
    wait_until((tmp_path / "ready").exists, "the rank")
    os.kill(mpirun.pid, signal.SIGTERM)  # a shell would end, and a daemon of MPI's kill its ranks
    wait_until(lambda: hears_sigterm(listener), "the listener")
    listener.terminate()
    mpirun.communicate(timeout=60)
    assert mpirun.returncode == 0
    assert (tmp_path / "heard").read_text() == "TERM\n"
    assert left(tmp_path) == {"code": "75\n"}
    assert listener.poll() is None
    listener.communicate(timeout=60)
    assert listener.returncode == 0


def hears_sigterm(process: subprocess.Popen[str]) -> bool:
    caught = re.search(r"SigCgt:\t(.*)", Path(f"/proc/{process.pid}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) & 1 << signal.SIGTERM - 1)


def test_a_code_that_cannot_be_left_is_the_program_s(tmp_path: Path) -> None:
    process = start(tmp_path, "sh", "-c", "exit 75")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "the exit code 75 could not be left for the job's script" in said
