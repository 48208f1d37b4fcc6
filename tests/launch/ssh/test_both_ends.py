"""Both ends of a connection to a machine, without ssh."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import psutil
import pytest

from paceline.launch.ssh_remote import READY

PRINTING = """
import sys
from paceline.core.job import Command
from paceline.launch.ssh import SshMachine
from paceline.launch.ssh_remote import READY
says = "import sys; print('a shell greets'); print(sys.argv[1]); [print(sys.argv[2] * 200_000) for _ in range(20)]"
machines = [
    SshMachine(name, Command(title="", argv=(sys.executable, "-c", says, READY, name)), f"{name} | ", lambda: None)
    for name in "abcd"
]
assert [machine.reap() for machine in machines] == [0] * 4
assert all(machine.ready and machine.said == ["a shell greets"] for machine in machines)
"""


@pytest.mark.integration
def test_lines_longer_than_a_pipe_takes_at_once_stay_whole(run_processes: Any) -> None:
    done = run_processes.run([sys.executable, "-c", PRINTING])
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == [f"{name} | {name * 200_000}" for name in "abcd" for _ in range(20)]


# The daemon has none of the variables by which its origin could be known, and starts others while it is killed.
DAEMON = """
import subprocess, sys, time
loop = f"for i in $(seq 400); do sleep {sys.argv[1]} & sleep 0.002; done"
subprocess.Popen(["env", "-i", "sh", "-c", loop], start_new_session=True)
print("started", flush=True)
time.sleep(0.3)
"""


@pytest.mark.integration
def test_no_daemon_outlives_the_command() -> None:
    seconds = f"8.{os.getpid()}"
    argv = [sys.executable, "-P", "-m", "paceline.launch.ssh_remote", "--", sys.executable, "-c", DAEMON, seconds]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as remote:
        assert remote.stdin is not None
        assert remote.stdout is not None
        remote.stdin.write("go\n")
        remote.stdin.flush()
        assert remote.stdout.read() == f"{READY}\nstarted\n"
        assert remote.wait() == 0
    assert not [p.pid for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", seconds]]
