"""What ``make quickstart`` runs once all is installed: the whole pipeline, on a model hardly trained."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline_tasks.fashion_mnist import LABELS

pytestmark = pytest.mark.docs

SCRIPT = Path(__file__).parents[1] / "scripts" / "quickstart.py"


@pytest.mark.timeout(300)
def test_a_picture_is_predicted_by_the_model_that_was_trained(run_processes: Any, tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPT), "--max-steps", "20", "--threads", "1"]
    home = {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    done = run_processes.finish(run_processes.start(words, cwd=tmp_path, env=home), timeout_s=240)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "result.json").is_file()
    assert (run / "report.html").is_file()
    (picture,) = run.glob("*.png")
    assert picture.stem.endswith("Ankle-boot")  # the first image of the published test split
    row = re.search(rf"{re.escape(picture.name)} +(.+?) {{2,}}[01]\.\d+", done.stdout)
    assert row is not None, done.stdout
    assert row[1] in LABELS
