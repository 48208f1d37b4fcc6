"""``paceline verify`` compares the strategies of this plug-in."""

from __future__ import annotations

import json
from pathlib import Path

from tests.processes import Processes

TASKS = Path(__file__).parents[2] / "checks/tests/verify/tasks.py"


def test_threads_have_the_bits_of_one_process(run_processes: Processes) -> None:
    options = ("--worlds", "1", "--strategies", "single,dp", "--steps", "2", "--json")
    done = run_processes.paceline("verify", f"{TASKS}:Right", *options, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert {row["method"]: row["verdict"] for row in json.loads(done.stdout)["rows"]} == {
        "single": "equal",
        "dp": "equal",
    }
