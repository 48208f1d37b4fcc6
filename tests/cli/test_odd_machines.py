"""Conditions of machines that are not ours: no home, a name that does not resolve, a directory that is gone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_train import PYTHON, TASK, TRAIN
from tests.processes import OWN_FOLDERS

pytestmark = pytest.mark.system  # it needs namespaces of the kernel
_NAMELESS = (
    *("unshare", "--user", "--map-user=12345", "--map-group=12345"),
    *("env", *(f"--unset={name}" for name in ("HOME", "USER", "LOGNAME", *OWN_FOLDERS))),
)


@pytest.fixture
def start(run_processes: Any, tmp_path: Path) -> Callable[..., Any]:
    """Start a command beside the task."""
    (tmp_path / "small.py").write_text(TASK)
    return lambda *words: run_processes.start(words, env={"OMP_NUM_THREADS": "1"})


def _require(run_processes: Any, command: tuple[str, ...]) -> None:
    if run_processes.run((*command, "true")).returncode:
        pytest.skip("a namespace of this kind is not allowed here")


def test_a_user_without_name_and_home_trains_exports_and_starts_jobs(
    start: Callable[..., Any], run_processes: Any, tmp_path: Path
) -> None:
    _require(run_processes, _NAMELESS)
    tiny = [f"--set={field}" for field in ("layers=1", "width=8", "heads=1", "context=8", "held_out=4")]
    size = ("--global-batch-size", "4", "--microbatches", "2", "--max-steps", "2", "--threads", "1", "--quiet")
    for words in (
        ("train", "transformer", *tiny, *size, "--nproc", "2", "--run-dir", "run"),
        ("export", "run", "--name", "tiny"),
        ("registry", "ls"),
        ("launch", "--on", "spawn", "--nproc", "2", "--", "true"),
    ):
        temporary = f"TMPDIR={tmp_path}"
        done = run_processes.finish(start(*_NAMELESS, temporary, *PYTHON, "-m", "paceline", *words))
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
    assert (tmp_path / "paceline-12345/data/registry/packages").is_dir()


def test_torchrun_starts_where_the_name_of_the_machine_does_not_resolve(
    start: Callable[..., Any], run_processes: Any, tmp_path: Path
) -> None:
    _require(run_processes, ("unshare", "--uts"))
    renamed = ("unshare", "--uts", "sh", "-c", 'hostname renamed-laptop.invalid; exec "$@"', "sh")
    done = run_processes.finish(start(*renamed, *PYTHON, *TRAIN, "--nproc", "2", "--on", "torchrun", "--run-dir=run"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/result.json").is_file()


@pytest.mark.parametrize("how", [("--nproc", "1"), ("--nproc", "2"), ("--nproc", "2", "--recover", "none")])
def test_files_named_like_modules_of_python_shadow_nothing(
    how: tuple[str, ...], start: Callable[..., Any], run_processes: Any, tmp_path: Path
) -> None:
    (tmp_path / "tasks").mkdir()
    for name in ("types", "tokenize", "secrets", "random", "queue", "calendar", "statistics", "msgspec"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(f'{__file__} was imported')\n")
    (tmp_path / "mine.py").write_text("LR = 0.1\n")
    (tmp_path / "tasks/small.py").write_text(TASK.replace("import paceline\n", "import mine\nimport paceline\n", 1))
    program = ("-P", *TRAIN[:3], "tasks/small.py:Small", *TRAIN[4:])
    done = run_processes.finish(start(*PYTHON, *program, *how, "--run-dir", "run"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/result.json").is_file()


@pytest.mark.parametrize("command", [TRAIN, ("-m", "paceline", "export"), ("-m", "paceline", "tune", "small.py:Small")])
def test_a_path_that_is_not_text_is_refused_before_anything_starts(
    command: tuple[str, ...], start: Callable[..., Any], run_processes: Any, tmp_path: Path
) -> None:
    named = ("--run-dir", os.fsdecode(b"r\xff")) if "train" in command else (os.fsdecode(b"r\xff"),)
    done = run_processes.finish(start(*PYTHON, *command, *named))
    assert done.returncode == 2
    assert done.stderr.startswith(r"paceline: r\udcff has bytes that are not utf-8. Rename the file or folder,")
    assert [path.name for path in tmp_path.iterdir()] == ["small.py"]


@pytest.mark.parametrize("words", [TRAIN, ("-m", "paceline", "doctor"), ("-m", "paceline", "runs")])
def test_a_current_directory_that_is_gone_is_said_in_one_sentence(
    words: tuple[str, ...], start: Callable[..., Any], run_processes: Any
) -> None:
    gone = ("sh", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$@"', "sh")
    done = run_processes.finish(start(*gone, *PYTHON, *words))
    assert done.returncode == 2
    assert done.stderr.startswith("paceline: the current directory cannot be used (No such file or directory)")
    assert done.stderr.count("\n") == 1


_DROPPING = "table ip f { chain i { type filter hook input priority 0; tcp flags & (syn|ack) == syn drop; }; }"
_OFFLINE = ("unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh")


def test_a_firewall_that_drops_loopback_connections_is_named(
    start: Callable[..., Any], run_processes: Any, tmp_path: Path
) -> None:
    _require(run_processes, (*_OFFLINE[:4], f'nft "{_DROPPING}" && exec "$@"', "sh"))
    three = (*PYTHON, *TRAIN, "--nproc", "3", "--run-dir", "run", "--init-timeout", "5s")
    done = run_processes.finish(start(*_OFFLINE[:4], f'ip link set lo up; nft "{_DROPPING}"; exec "$@"', "sh", *three))
    assert done.returncode == 2
    assert "cannot reach each other over 127.0.0.1: timed out. A firewall of this node drops" in done.stderr

    # While the run lasts, a process is lost: the other two cannot connect to each other again.
    loses = f"""
        if os.environ["RANK"] == "2" and not os.path.exists("dropped"):
            import subprocess

            open("dropped", "x").close()
            subprocess.run(["nft", {_DROPPING!r}], check=True)
            os.kill(os.getpid(), 9)
"""
    (tmp_path / "small.py").write_text(
        TASK.replace("def loss(self, model, batch):", f"def loss(self, model, batch):{loses}")
    )
    done = run_processes.finish(start(*_OFFLINE, *three))
    assert done.returncode == 2, done.stderr
    assert "could not connect to each other at 127.0.0.1 for 5s (--init-timeout)" in done.stderr
    assert "Traceback" not in done.stderr


def test_files_of_another_user_are_named_in_one_sentence(
    start: Callable[..., Any], run_processes: Any, tmp_path: Path
) -> None:
    _require(run_processes, _NAMELESS)
    for path in ("run", "run/logs", "registry/tags"):
        (tmp_path / path).mkdir(parents=True, mode=0o777)
    for path in ("run/run.toml", "run/events.jsonl"):
        (tmp_path / path).touch()
    for path in ("run", "registry"):
        (tmp_path / path).chmod(0)
    variables = (f"TMPDIR={tmp_path}", f"PACELINE_REGISTRY={tmp_path / 'registry'}")
    for words in (("logs", "run"), ("runs", "show", "run"), ("registry", "ls")):
        done = run_processes.finish(start(*_NAMELESS, *variables, *PYTHON, "-m", "paceline", *words))
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("paceline: cannot use "), done.stderr
        assert ": Permission denied. Check its owner" in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_directory_that_is_a_link_to_itself(start: Callable[..., Any], run_processes: Any, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    done = run_processes.finish(start(*PYTHON, *TRAIN, "--run-dir", "loop"))
    assert done.returncode == 2
    assert "paceline: cannot use loop/run.toml: Too many levels of symbolic links." in done.stderr


def test_a_limit_on_open_files_is_named(start: Callable[..., Any], run_processes: Any) -> None:
    limited = ("sh", "-c", 'ulimit -n 10; exec "$@"', "sh")
    done = run_processes.finish(start(*limited, *PYTHON, *TRAIN, "--run-dir", "run"))
    assert done.returncode == 1
    assert "raise the limit (ulimit -n 65536)" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_search_without_the_loopback_interface_is_refused(start: Callable[..., Any], run_processes: Any) -> None:
    _require(run_processes, ("unshare", "--net"))
    done = run_processes.finish(start("unshare", "--net", *PYTHON, "-m", "paceline", "tune", "small.py:Small"))
    assert done.returncode == 2
    assert "cannot reach each other over 127.0.0.1" in done.stderr
