"""What the machines of a job print, without ssh."""

from __future__ import annotations

import sys
from typing import Any

import pytest

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
