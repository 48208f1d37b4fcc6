"""Jobs as processes: success, failure, signals, and nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.processes import children, runs

from paceline.core.errors import ConfigError, LaunchError
from paceline.core.job import Placement, RecoveryPolicy
from paceline.launch.launcher import LaunchSpec, get_launcher
from paceline.runs.directory import RunDirectory

DRIVER = """
import sys
from pathlib import Path
from paceline.core.job import Placement, RecoveryPolicy
from paceline.launch.launcher import LaunchSpec, get_launcher
from paceline.runs.directory import RunDirectory
launcher, nproc, *command = sys.argv[1:]
launcher = get_launcher(launcher)
run = RunDirectory(Path("run"))
placement, recovery = Placement(log_directory=run), RecoveryPolicy(grace_s=5)
command, nproc = (sys.executable, *command), (int(nproc),)
spec = LaunchSpec(command=command, nproc=nproc, placement=placement, recovery=recovery, threads=1)
sys.exit(launcher.submit(launcher.render(spec)).wait())
"""

HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
from paceline.core.environment import detect_environment
from paceline.core.signals import dump_stacks_on_signal
from paceline.runs.failures import record_failure
from paceline.core.errors import ConfigError, StopRequested
from paceline.runs.directory import RunDirectory
dump_stacks_on_signal()
environment = detect_environment()
rank = environment.rank
def say(text): print(text, rank, os.getpid(), flush=True)
def end(error): sys.exit(record_failure(RunDirectory(Path("run")), rank, error))
def sleep():  # in turns: a signal that comes just before a wait is handled only after it
    while True: time.sleep(0.1)
def wait(): Path(f"ready-{rank}").touch(); sleep()
"""

STOPS_WHEN_ASKED = """
asked = []
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, lambda n, f: asked.append(n))
Path(f"ready-{rank}").touch()
while not asked: time.sleep(0.1)
Path(f"asked-{rank}").write_text(" ".join(str(int(n)) for n in asked))
end(StopRequested("saved", exit_code=130 if asked[0] == signal.SIGINT else 75))
"""


class Job:
    """A launcher in a process of its own, run on a script."""

    def __init__(self, processes: Any, tmp_path: Path, wait_until: Callable[..., None]) -> None:
        self._processes, self.path, self._wait_until = processes, tmp_path, wait_until

    def start(self, script: str, nproc: int = 2, launcher: str = "spawn") -> subprocess.Popen[str]:
        (self.path / "driver.py").write_text(DRIVER)
        (self.path / "script.py").write_text(HEAD + script)
        started: subprocess.Popen[str] = self._processes.start(
            [sys.executable, "driver.py", launcher, str(nproc), "script.py"]
        )
        return started

    def finish(self, popen: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = self._processes.finish(popen)
        return done

    def run(self, script: str, nproc: int = 2, launcher: str = "spawn") -> subprocess.CompletedProcess[str]:
        return self.finish(self.start(script, nproc, launcher))

    def wait_for(self, popen: subprocess.Popen[str], *names: str) -> None:
        def there() -> bool:
            assert popen.poll() is None, popen.communicate()
            return all((self.path / name).exists() for name in names)

        self._wait_until(there, f"files {names}")

    def wait_gone(self, pids: list[int]) -> None:
        self._wait_until(lambda: not any(map(runs, pids)), f"the end of {pids}")


@pytest.fixture
def job(run_processes: Any, tmp_path: Path, wait_until: Callable[..., None]) -> Job:
    return Job(run_processes, tmp_path, wait_until)


def _descendants(popen: subprocess.Popen[str]) -> list[int]:
    return [child.pid for child in children(popen.pid, recursive=True)]


def test_rank_0_prints_here_and_the_others_into_their_logs(job: Job) -> None:
    done = job.run("say('hello')", nproc=3)
    assert done.returncode == 0
    assert done.stdout.split()[:2] == ["hello", "0"]
    assert len(done.stdout.splitlines()) == 1
    for rank in (1, 2):
        assert (job.path / f"run/logs/rank-{rank}.log").read_text().startswith(f"hello {rank} ")
    assert done.stderr == ""


def test_a_failure_ends_the_others_and_is_told_once(job: Job) -> None:
    done = job.run(
        """
if rank == 1:
    try: raise ValueError("boom")
    except ValueError as error: end(error)
wait()
""",
        nproc=3,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("paceline: rank 1 failed first: ValueError: boom\n")
    assert done.stderr.count("boom") == 1
    assert done.stderr.strip().endswith("log: run/logs/rank-1.log")


def test_a_users_error_of_all_ranks_is_shown_once(job: Job) -> None:
    done = job.run("end(ConfigError('--lr must be positive.'))")
    assert (done.returncode, done.stderr) == (2, "paceline: --lr must be positive.\n")


def test_a_killed_rank_is_named(job: Job) -> None:
    done = job.run("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nwait()")
    assert done.returncode == 1
    assert done.stderr.startswith("paceline: rank 1 was killed by SIGKILL (out of memory?).")


@pytest.mark.integration
def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "ready = pathlib.Path(sys.argv[1])\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not ready.exists(): time.sleep(0.01)\n"
        "    sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "ready.with_name('pid').write_text(str(os.getpid()))\n"
        "ready.touch()\n"
        "while True: signal.pause()\n"
    )
    spec = LaunchSpec(
        command=(sys.executable, str(script), str(tmp_path / "ready")),
        nproc=(2,),
        placement=Placement(log_directory=RunDirectory(tmp_path / "run")),
        recovery=RecoveryPolicy(grace_s=0.2),
    )
    spawn = get_launcher("spawn")
    handle = spawn.submit(spawn.render(spec))
    assert handle.wait() == 7
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_is_passed_on_once_and_the_workers_stop(job: Job, launcher: str, number: int, code: int) -> None:
    popen = job.start(STOPS_WHEN_ASKED, launcher=launcher)
    job.wait_for(popen, "ready-0", "ready-1")
    # To the whole group, as Ctrl-C in a terminal does.
    os.killpg(popen.pid, number)
    done = job.finish(popen)
    assert done.returncode == code, done.stderr
    if launcher == "spawn":
        assert done.stderr == ""
    assert [(job.path / f"asked-{rank}").read_text() for rank in (0, 1)] == [str(int(number))] * 2


def test_a_second_signal_kills_at_once(job: Job, wait_until: Callable[..., None]) -> None:
    popen = job.start(
        """
signal.signal(signal.SIGINT, lambda n, f: Path(f"asked-{rank}").touch())
wait()
"""
    )
    job.wait_for(popen, "ready-0", "ready-1")
    popen.send_signal(signal.SIGINT)
    job.wait_for(popen, "asked-0", "asked-1")
    popen.send_signal(signal.SIGINT)
    assert job.finish(popen).returncode == 130


def test_scripts_that_know_no_signals_die_of_them_without_a_failure(job: Job) -> None:
    popen = job.start("wait()")
    job.wait_for(popen, "ready-0", "ready-1")
    popen.send_signal(signal.SIGTERM)
    done = job.finish(popen)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")


def test_grandchildren_end_with_their_rank(job: Job) -> None:
    done = job.run("child = subprocess.Popen(['sleep', '1000'])\nprint(child.pid, flush=True)\nif rank: sys.exit(0)")
    children = [int(done.stdout), int((job.path / "run/logs/rank-1.log").read_text())]
    assert done.returncode == 0
    job.wait_gone(children)


@pytest.mark.cold
@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
def test_workers_do_not_survive_a_launcher_that_is_killed(job: Job, launcher: str) -> None:
    popen = job.start("wait()", launcher=launcher)
    job.wait_for(popen, "ready-0", "ready-1")
    workers = _descendants(popen)
    assert len(workers) == (2 if launcher == "spawn" else 3)
    popen.kill()
    job.wait_gone(workers)


def test_workers_do_not_survive_a_torchrun_agent_that_is_killed(job: Job) -> None:
    popen = job.start(
        "from paceline.core.signals import die_with_parent\ndie_with_parent()\nwait()",
        launcher="torchrun",
    )
    job.wait_for(popen, "ready-0", "ready-1")
    agent, *workers = _descendants(popen)
    os.kill(agent, signal.SIGKILL)
    done = job.finish(popen)
    assert done.returncode == 1
    assert done.stderr.strip() == "paceline: torchrun was killed by SIGKILL (out of memory?)."
    job.wait_gone(workers)


@pytest.mark.integration
def test_a_cancelled_job_ends(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import signal; signal.pause()")
    spawn = get_launcher("spawn")
    handle = spawn.submit(spawn.render(LaunchSpec(command=(sys.executable, str(script)), nproc=(2,))))
    handle.cancel()
    assert handle.wait() == 128 + signal.SIGTERM


@pytest.mark.integration
def test_a_port_taken_after_rendering_is_no_failure(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(os.environ['MASTER_PORT'])")
    spawn = get_launcher("spawn")
    spec = LaunchSpec(command=(sys.executable, str(script), str(tmp_path / "port")))
    rendered = spawn.render(spec)
    port = int(rendered.commands[0].env["MASTER_PORT"])
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        assert spawn.submit(rendered).wait() == 0
        assert int((tmp_path / "port").read_text()) != port
        with pytest.raises(ConfigError, match=f"port {port} is taken"):
            spawn.submit(replace(rendered, spec=replace(spec, master_port=port)))


def test_an_interpreter_that_is_not_there_is_reported(tmp_path: Path) -> None:
    spawn = get_launcher("spawn")
    spec = LaunchSpec(command=(str(tmp_path / "no-python"), "x.py"), nproc=(2,))
    with pytest.raises(LaunchError, match="no-python: command not found"):
        spawn.submit(spawn.render(spec))


@pytest.mark.integration
def test_where_one_process_cannot_be_started_none_is_left(tmp_path: Path) -> None:
    before = set(children(os.getpid()))
    script = tmp_path / "script.py"
    script.write_text("import signal; signal.pause()")
    directory = RunDirectory(tmp_path / "run")
    directory.log_of(1).mkdir(parents=True)
    spawn = get_launcher("spawn")
    spec = LaunchSpec(
        command=(sys.executable, str(script)),
        nproc=(2,),
        placement=Placement(log_directory=directory),
    )
    with pytest.raises(LaunchError, match=r"could not be started: .*rank-1\.log"):
        spawn.submit(spawn.render(spec))
    assert set(children(os.getpid())) <= before


def test_inprocess_runs_here_and_returns_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nprint(os.getpid(), sys.argv[1:], os.environ['EXTRA'])\nsys.exit(int(sys.argv[1]))"
    )
    inprocess = get_launcher("inprocess")
    argv = list(sys.argv)
    for code in (0, 3):
        spec = LaunchSpec(command=(sys.executable, str(script), str(code)), env={"EXTRA": "x"})
        assert inprocess.submit(inprocess.render(spec)).wait() == code
        assert capsys.readouterr().out == f"{os.getpid()} ['{code}'] x\n"
    assert sys.argv == argv
    assert "EXTRA" not in os.environ
    module = LaunchSpec(command=(sys.executable, "-m", "this"))
    assert inprocess.submit(inprocess.render(module)).wait() == 0
    assert "Namespaces" in capsys.readouterr().out


def test_inprocess_imports_from_where_python_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside/neighbour_of_script.py").write_text("said = 'beside the script'")
    (tmp_path / "beside/script.py").write_text("import neighbour_of_script as n; print(n.said)")
    (tmp_path / "module_of_directory.py").write_text("print('in the working directory')")
    (tmp_path / "link.py").symlink_to("beside/script.py")
    monkeypatch.chdir(tmp_path)
    inprocess = get_launcher("inprocess")
    path = list(sys.path)
    for command in (("beside/script.py",), ("link.py",), ("-m", "module_of_directory")):
        assert inprocess.submit(inprocess.render(LaunchSpec(command=(sys.executable, *command)))).wait() == 0
        sys.modules.pop("neighbour_of_script", None)
    assert capsys.readouterr().out.splitlines() == [
        *["beside the script"] * 2,
        "in the working directory",
    ]
    assert sys.path == path
