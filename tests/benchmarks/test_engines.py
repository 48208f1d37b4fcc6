"""A round of ``python -m benchmarks engines``, of each engine, and how the suite prints it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.processes import Processes

from benchmarks.engine_processes import ENGINES
from benchmarks.engines import TITLES, bench_engines
from paceline.core.errors import ConfigError

ROOT = Path(__file__).parents[2]
IDLE_S = "0.1"  # a figure as true as that of the 4 s by default, but not as exact


def test_every_engine_has_a_title() -> None:
    assert TITLES.keys() == ENGINES.keys()


def test_a_number_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--processes must be between 1 and 1024, but is 0"):
        bench_engines(engines=["paceline"], processes=[0], rounds=1, idle_s=0.0, progress=print)


@pytest.mark.parametrize(
    "engine",
    [
        "paceline",
        "mesh",
        pytest.param("ray", marks=pytest.mark.ray),
        pytest.param("monarch", marks=pytest.mark.monarch),
        pytest.param("monarch-1s", marks=pytest.mark.monarch),
    ],
)
def test_an_engine_is_measured_and_leaves_nothing(run_processes: Processes, tmp_path: Path, engine: str) -> None:
    program = [sys.executable, "-m", "benchmarks.engine_processes", engine, "2", tmp_path / "report.json", IDLE_S]
    done = run_processes.run(program, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report.keys() == {"start_s", "message_ms", "memory_mib", "idle_percent", "known_ms"}
    assert all(report[name] > 0 for name in ("start_s", "message_ms", "memory_mib", "known_ms"))


def test_engines_are_compared(run_processes: Processes) -> None:
    words = ("--engines", "paceline", "mesh", "--processes", "1", "2", "--rounds", "1")
    done = run_processes.run(
        [sys.executable, "-m", "benchmarks", "engines", *words, "--seconds", IDLE_S, "--json"], cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    comparisons = json.loads(done.stdout)["comparisons"]
    assert [comparison["title"] for comparison in comparisons] == ["1 processes", "2 processes"]
    assert [[row["name"] for row in comparison["rows"]] for comparison in comparisons] == [["paceline", "mesh"]] * 2
