"""What PowerSGD leaves out, by parameter, while buckets become others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("powersgd_alone.py")


def test_a_bucket_that_stays_keeps_its_memory_while_later_ones_become_others(run_processes: Any) -> None:
    """And three at once do not wait for each other for ever."""
    done = run_processes.run([sys.executable, PROGRAM])
    assert done.returncode == 0, done.stderr
    backwards = [json.loads(line) for line in done.stdout.splitlines()]
    expected = [["a", "bc"], *[["a", "c", "b"]] * 50, ["ac", "b"]]
    assert [backward["buckets"] for backward in backwards] == expected
    for backward in backwards:
        assert backward["wrong"] == [], backward["buckets"]
