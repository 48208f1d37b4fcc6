"""What a test prints of a command that does not end."""

from __future__ import annotations

import sys

import pytest
from tests.processes import Processes


def test_a_command_that_does_not_end_fails_with_the_stacks_of_its_processes(run_processes: Processes) -> None:
    for_ever = "import time\ndef wait_for_ever():\n    time.sleep(600)\n"
    popen = run_processes.start([sys.executable, "-c", f"{for_ever}print('begun', flush=True)\nwait_for_ever()"])
    with pytest.raises(pytest.fail.Exception, match=r"took over 3 s[\s\S]*begun[\s\S]*wait_for_ever"):
        run_processes.finish(popen, timeout_s=3)
    assert popen.returncode == -9


def test_a_process_that_keeps_a_pipe_of_an_ended_command_is_described(run_processes: Processes) -> None:
    sleeper = [sys.executable, "-c", "import time; name_of_the_sleeper = time.sleep; name_of_the_sleeper(600)"]
    code = f"import subprocess; print(subprocess.Popen({sleeper!r}).pid, flush=True)"
    popen = run_processes.start([sys.executable, "-c", code])
    with pytest.raises(pytest.fail.Exception, match=r"--- process \d+, sleeping[\s\S]*<module>") as raised:
        run_processes.finish(popen, timeout_s=3)
    assert popen.returncode == 0
    printed = str(raised.value).partition("--- stdout\n")[2].split()[0]
    assert f"--- process {printed}, " in str(raised.value)
