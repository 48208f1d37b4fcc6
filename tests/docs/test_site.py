"""The documentation's site is built without a warning: pages, links, and the docstrings of the reference."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.processes import Processes

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]


def test_the_site_is_built(run_processes: Processes, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"]
    built = run_processes.run(command, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"}, timeout_s=240)
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "site" / "reference" / "api" / "index.html").read_text(encoding="utf-8")
    for name in ("paceline.api.fit", "paceline.core.task.Task.train_step", "paceline.core.task.TrainStep.update"):
        assert f'id="{name}"' in reference, name
