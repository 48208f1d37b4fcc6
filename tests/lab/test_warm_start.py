"""Processes that are forked from a template are as those that are started from nothing."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.lab.warm_start import START_NONE, Program, is_template, parse
from tests.processes import _warm_starts, runs

from paceline.core import parent_death

pytestmark = [pytest.mark.integration, pytest.mark.warm]

ABOUT = """
import json, os, resource, signal, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(),
    "name": __name__, "file": globals().get("__file__"),
    "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "group": os.getpgid(0),
    "shown": open("/proc/self/environ", "rb").read().decode().split("\\0"), "env": dict(os.environ),
    "fds": sorted(fd for fd in map(int, os.listdir("/proc/self/fd")) if fd < 500),
    "ignored": sorted(n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN),
    "umask": os.umask(0), "nice": os.nice(0), "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "cpus": sorted(os.sched_getaffinity(0)), "warm": "torch" in sys.modules,
}))
"""


def about(argv: list[str | Path], **options: Any) -> dict[str, Any]:
    """What a program says of itself that runs ``ABOUT``."""
    done = subprocess.run(
        [sys.executable, *map(str, argv)], capture_output=True, text=True, check=True, timeout=60, **options
    )
    return dict(json.loads(done.stdout))


def test_a_warm_process_says_of_itself_what_a_cold_one_does(tmp_path: Path) -> None:
    script = tmp_path / "about.py"
    script.write_text(ABOUT)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "about.py").write_text(ABOUT)
    options = {
        "cwd": tmp_path,
        "env": {**os.environ, "GREETING": "hello", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    }
    for argv in ([script, "a", "b"], ["-c", ABOUT, "a"], ["-m", "package.about", "--a"], ["-P", script, "a"]):
        warm = about(argv, **options)
        with _warm_starts.resting():
            cold = about(argv, **options)
        assert (warm.pop("warm"), cold.pop("warm")) == (True, False)
        assert warm.pop("pid") != cold.pop("pid")
        assert set(cold.pop("shown")) <= set(warm.pop("shown"))
        assert warm == cold
        assert warm["parent"] == os.getpid()


def test_it_has_the_session_the_descriptors_and_the_priority_that_were_asked_for() -> None:
    reader, writer = os.pipe()
    try:
        said = about(["-c", ABOUT], start_new_session=True, pass_fds=(writer,))
    finally:
        os.close(reader)
        os.close(writer)
    assert said["warm"]
    assert said["session"] == said["group"] == said["pid"]
    assert writer in said["fds"]
    assert reader not in said["fds"]
    before = os.sched_getaffinity(0)
    mine = min(before)
    handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.sched_setaffinity(0, {mine})
    try:
        said = about(["-c", ABOUT])
    finally:
        os.sched_setaffinity(0, before)
        signal.signal(signal.SIGUSR1, handler)
    assert (said["warm"], said["cpus"]) == (True, [mine])
    assert signal.SIGUSR1 in said["ignored"]


def test_the_kernel_shows_its_arguments(run_processes: Any) -> None:
    popen = run_processes.start([sys.executable, "-c", "print('ready', flush=True); input()", "one", "two"])
    assert popen.stdout.readline() == "ready\n"
    command = psutil.Process(popen.pid).cmdline()
    assert command[:2] == [sys.executable, "-c"]
    assert command[3:5] == ["one", "two"]


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no such thing')", 1, "no such thing\n"),
        ("import atexit; atexit.register(print, 'done'); raise SystemExit", 0, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import threading; threading.Thread(target=lambda: print('done')).start()", 0, ""),
    ],
)
def test_it_ends_as_the_interpreter_does(code: str, status: int, error: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == status
    assert done.stderr.endswith(error)
    assert "warm_start.py" not in done.stderr
    assert done.stdout == ("done\n" if "done" in code else "")


@pytest.mark.parametrize(("options", "variable"), [([], ""), (["-u"], ""), ([], "1")])
def test_a_killed_program_has_printed_what_a_cold_one_has(options: list[str], variable: str) -> None:
    code = "import os, sys; print('a', end=''); sys.stdout.write('b'); os.kill(os.getpid(), 9)"
    command = [sys.executable, *options, "-c", code]
    env = {**os.environ, "PYTHONUNBUFFERED": variable}
    warm = subprocess.run(command, stdout=subprocess.PIPE, timeout=60, env=env).stdout
    with _warm_starts.resting():
        cold = subprocess.run(command, stdout=subprocess.PIPE, timeout=60, env=env).stdout
    assert warm == cold == (b"ab" if options or variable else b"")


def test_output_that_cannot_be_written_fails_it_at_its_end_as_a_cold_one() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-c", "print('lost')"]
        codes = [subprocess.call(command, stdout=writer, stderr=subprocess.DEVNULL, timeout=60)]
        with _warm_starts.resting():
            codes.append(subprocess.call(command, stdout=writer, stderr=subprocess.DEVNULL, timeout=60))
    finally:
        os.close(writer)
    assert codes == [120, 120]


def test_code_has_no_future_of_this_file() -> None:
    subprocess.run([sys.executable, "-c", "def f(x: int): ...\nassert f.__annotations__ == {'x': int}"], check=True)


NESTED = f"""
import subprocess, sys
done = subprocess.run([sys.executable, "-c", {ABOUT!r}], capture_output=True, text=True, check=True)
print(done.stdout)
"""


def test_a_program_starts_others_warm_and_is_their_parent() -> None:
    popen = subprocess.Popen([sys.executable, "-c", NESTED], stdout=subprocess.PIPE, text=True)
    said = json.loads(popen.communicate(timeout=60)[0])
    assert said["warm"]
    assert said["parent"] == popen.pid


def test_a_template_dies_with_its_program(run_processes: Any, wait_until: Callable[..., None]) -> None:
    popen = run_processes.start([sys.executable, "-c", "print('ready', flush=True); input()"])
    assert popen.stdout.readline() == "ready\n"
    [template] = psutil.Process(popen.pid).children()
    assert is_template(template)
    popen.kill()
    wait_until(lambda: not runs(template), "the end of the template")


def test_a_tethered_process_dies_with_its_parent(run_processes: Any, wait_until: Callable[..., None]) -> None:
    starts = (
        "import subprocess, sys\n"
        "from paceline.core.parent_death import kill_with_parent_command\n"
        "child = subprocess.Popen(kill_with_parent_command([sys.executable, '-c', 'import time; time.sleep(600)']))\n"
        "print(child.pid, flush=True)\n"
        "input()\n"
    )
    popen = run_processes.start([sys.executable, "-c", starts])
    child = psutil.Process(int(popen.stdout.readline()))
    popen.kill()
    wait_until(lambda: not runs(child), "the end of the child")


@pytest.mark.cold
def test_a_cold_test_starts_from_nothing() -> None:
    assert not about(["-c", ABOUT])["warm"]


def test_a_start_with_other_limits_is_from_nothing() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        assert not about(["-c", ABOUT])["warm"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not about(["-c", ABOUT], env={**os.environ, "PYTHONHASHSEED": "7"})["warm"]


TETHER = parent_death.__file__


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["-m", "m", "a"], Program("module", "m", ["a"])),
        (["-c", "pass"], Program("code", "pass", [])),
        (["/s.py", "-x"], Program("script", "/s.py", ["-x"])),
        (["-I", "-S", TETHER, "9", "1", sys.executable, "-m", "m"], Program("module", "m", [], (9, 1))),
        (["-I", "-S", TETHER, "9", "1", "true"], None),
        (["-u", "s.py", "-u"], Program("script", "s.py", ["-u"], unbuffered=True)),
        (["-u", "-I", "s.py"], None),
        (["-P", "-m", "m", "-P"], Program("module", "m", ["-P"], safe_path=True)),
        (["-P", "-u", "s.py"], Program("script", "s.py", [], unbuffered=True, safe_path=True)),
        (["-I", "-m", "m"], None),
        (["-X", "importtime", "-c", "pass"], None),
        (["s.py"], Program("script", "s.py", [])),
        (["program"], None),
        ([], None),
    ],
)
def test_commands_that_are_understood(words: list[str], program: Program | None) -> None:
    assert parse([sys.executable, *words]) == program
    assert parse(["python", *words]) is None


def test_the_programs_that_need_no_template_are_there() -> None:
    assert all(find_spec(name) for name in START_NONE)
