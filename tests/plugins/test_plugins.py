"""The plugins that ``make test`` runs pytest with, tried on small test files of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


def outcomes(
    directory: Path, plugin: str, ci: bool, *, workers: int = 0, **files: str
) -> tuple[int, dict[str, int], str]:
    """Exit status, counts of the summary line, and output of pytest on these files."""
    for name, text in files.items():
        (directory / f"test_{name}.py").write_text(text, encoding="utf-8")
    (directory / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n", encoding="utf-8")
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
    status, counts, _ = outcomes(tmp_path, "gpu", True, gpu=NEEDS_A_GPU)
    assert status == 0
    assert counts["passed"] == (2 if torch.cuda.is_available() else 1)
    assert counts.get("deselected", 0) == (0 if torch.cuda.is_available() else 1)
