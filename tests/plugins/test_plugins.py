"""The plugins that ``make test`` runs pytest with, tried on small test files of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.plugins import layers

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]

SKIPS = """
import pytest

def test_passes():
    pass

def test_skips():
    pytest.skip("no such server")

@pytest.mark.skipif(True, reason="never here")
def test_is_marked():
    pass

@pytest.mark.xfail(strict=True, reason="known")
def test_expected_failure():
    assert False
"""
SKIPS_AS_A_FILE = 'import pytest\npytest.skip("not on this machine", allow_module_level=True)\n'
NEEDS_A_GPU = """
import pytest
import torch

@pytest.mark.gpu
def test_on_a_gpu():
    assert torch.cuda.is_available()

def test_anywhere():
    pass
"""


LAYERS = """
import subprocess
import sys
import time

import pytest

@pytest.fixture
def run_processes():
    return subprocess.run

def test_unit():
    pass

def test_by_fixture(run_processes):
    run_processes([sys.executable, "-c", "pass"], check=True)

@pytest.mark.integration
def test_by_mark():
    subprocess.run([sys.executable, "-c", "pass"], check=True)

@pytest.mark.slurm
def test_system():
    pass

@pytest.mark.parametrize("way", ["spawn", pytest.param("ray", marks=pytest.mark.ray)])
def test_of_two_layers(way):
    pass
"""
DISHONEST = """
import subprocess
import sys

def test_starts_a_process():
    subprocess.run([sys.executable, "-c", "pass"], check=True)
"""
STEADY_THE_SECOND_TIME = """
from pathlib import Path

def test_steady():
    pass

def test_unsteady():
    assert Path("seen").exists() or Path("seen").write_text("") is None and False
"""


def outcomes(
    directory: Path, plugin: str, ci: bool, *more: str, workers: int = 0, **files: str
) -> tuple[int, dict[str, int], str]:
    """Exit status, counts of the summary line, and output of pytest on these files."""
    for name, text in files.items():
        (directory / f"test_{name}.py").write_text(text, encoding="utf-8")
    (directory / "pytest.ini").write_text("[pytest]\nmarkers = gpu\naddopts = --strict-markers\n", encoding="utf-8")
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            f"tests.plugins.{plugin}",
            "-q",
            "-rs",
            f"-n{workers}",
            *more,
            directory,
        ],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CI": "true" if ci else ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    counts = {word: int(n) for n, word in re.findall(r"(\d+) ([a-z]+)", finished.stdout.splitlines()[-1])}
    return finished.returncode, counts, finished.stdout


def test_every_run_uses_them(pytestconfig: pytest.Config) -> None:
    for name in ("ci_skips", "gpu", "layers"):
        assert pytestconfig.pluginmanager.has_plugin(f"tests.plugins.{name}")


@pytest.mark.parametrize("workers", [0, 2])
def test_skips_are_failures_in_ci(tmp_path: Path, workers: int) -> None:
    status, counts, output = outcomes(tmp_path, "ci_skips", True, workers=workers, one=SKIPS)
    assert status == 1
    assert counts["passed"] == 1
    assert counts["xfailed"] == 1
    assert counts.get("failed", 0) + counts.get("errors", 0) + counts.get("error", 0) == 2
    assert "skipped" not in counts
    assert "no such server" in output
    assert "never here" in output


def test_a_file_that_skips_itself_is_an_error_in_ci(tmp_path: Path) -> None:
    status, counts, output = outcomes(tmp_path, "ci_skips", True, whole=SKIPS_AS_A_FILE)
    assert status != 0
    assert "skipped" not in counts
    assert "not on this machine" in output


def test_skips_stay_skips_elsewhere(tmp_path: Path) -> None:
    status, counts, _ = outcomes(tmp_path, "ci_skips", False, one=SKIPS, whole=SKIPS_AS_A_FILE)
    assert status == 0
    assert (counts["passed"], counts["skipped"], counts["xfailed"]) == (1, 3, 1)


def test_gpu_tests_are_deselected_where_there_is_none(tmp_path: Path) -> None:
    status, counts, output = outcomes(tmp_path, "gpu", True, gpu=NEEDS_A_GPU)
    assert status == 0, output
    assert counts["passed"] == (2 if torch.cuda.is_available() else 1)
    assert counts.get("deselected", 0) == (0 if torch.cuda.is_available() else 1)


@pytest.mark.parametrize(
    ("layer", "passed"), [("unit", 2), ("integration", 2), ("system", 2), ("not system", 4), ("slurm", 1)]
)
def test_what_a_test_uses_decides_its_layer(tmp_path: Path, layer: str, passed: int) -> None:
    status, counts, output = outcomes(tmp_path, "layers", True, "-m", layer, layers=LAYERS)
    assert (status, counts["passed"]) == (0, passed), output


@pytest.mark.parametrize("workers", [0, 2])
def test_a_unit_test_that_starts_a_process_fails(tmp_path: Path, workers: int) -> None:
    status, counts, output = outcomes(tmp_path, "layers", True, workers=workers, dishonest=DISHONEST)
    assert (status, counts["failed"]) == (1, 1)
    assert "a unit test starts a process; mark it `integration`" in output


def report(when: str, duration_s: float) -> pytest.TestReport:
    return pytest.TestReport("a", ("a", 0, "a"), {}, "passed", None, when, duration=duration_s)  # type: ignore[arg-type]


def test_budgets_grow_with_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    reports = [report("setup", 1.9), report("call", 0.2), report("teardown", 60.0)]
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert "setup took 1.9 s" in layers.time_over(reports, "unit")  # there is always one process: this one
    assert layers.time_over(reports, "integration") == ""
    monkeypatch.setattr(os, "getloadavg", lambda: (2.0, 0.0, 0.0))
    assert layers.time_over(reports, "unit") == ""
    assert "unit tests may take 1 s, 2.0 s at this load" in layers.time_over([report("call", 9.0)], "unit")
    assert layers.time_over([report("call", 9.0)], "unit", waited_s=7.5) == ""


@pytest.mark.parametrize("workers", [0, 2])
def test_the_summary_names_slow_tests_which_pass(tmp_path: Path, workers: int) -> None:
    slow = """
import time

def test_fast():
    pass

def test_slow():
    time.sleep(2)
"""
    (tmp_path / "conftest.py").write_text(
        "import os\nfrom tests.plugins import layers\nlayers.BUDGETS_S['unit'] = 0.5\n"
        "os.getloadavg = lambda: (0.0, 0.0, 0.0)\n"
    )
    status, counts, output = outcomes(tmp_path, "layers", True, workers=workers, slow=slow)
    assert (status, counts) == (0, {"passed": 2}), output
    [line] = [line for line in output.splitlines() if "unit tests may take 0.5 s" in line]
    assert line.startswith("test_slow.py::test_slow: call took 2.")


def test_the_long_files_are_there() -> None:
    assert [name for name in layers.LONG_FILES if not (ROOT / name).is_file()] == []


def test_the_layers_need_no_cache(tmp_path: Path) -> None:
    some = "def test_fails():\n    assert 0\n\n\ndef test_passes(): ...\n"
    status, counts, output = outcomes(tmp_path, "layers", True, "-p", "no:cacheprovider", "-x", some=some)
    assert (status, counts) == (1, {"failed": 1}), output


def test_what_passes_the_second_time_is_named(tmp_path: Path) -> None:
    status, counts, _ = outcomes(tmp_path, "layers", True, unsteady=STEADY_THE_SECOND_TIME)
    assert (status, counts) == (1, {"failed": 1, "passed": 1})
    again = ("--last-failed", "--last-failed-no-failures=none")
    status, counts, output = outcomes(tmp_path, "layers", True, *again, unsteady=STEADY_THE_SECOND_TIME)
    assert (status, counts["passed"]) == (0, 1)
    assert "unsteady: failed, and passed when run again alone" in output
    assert "test_unsteady.py::test_unsteady\n" in output
    status, _, _ = outcomes(tmp_path, "layers", True, *again, unsteady=STEADY_THE_SECOND_TIME)
    assert status == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.parametrize("workers", [0, 2])
def test_where_tests_were_not_run_there_is_no_second_try(tmp_path: Path, workers: int) -> None:
    failing = "".join(f"def test_{n}():\n    assert False\n\n" for n in range(40))
    status, _, _ = outcomes(tmp_path, "layers", True, "--maxfail=1", workers=workers, failing=failing)
    assert status != 0
    again = ("--last-failed", "--last-failed-no-failures=none")
    status, _, output = outcomes(tmp_path, "layers", True, *again, failing=failing)
    assert status == pytest.ExitCode.NO_TESTS_COLLECTED, output
