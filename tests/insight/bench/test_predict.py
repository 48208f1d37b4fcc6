"""A round of predictions in ``paceline bench serve``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.insight.bench.serving import round as serving_round
from paceline.insight.bench.workload import REPORT


@pytest.mark.slow
def test_a_file_is_predicted_by_two_processes(tmp_path: Path) -> None:
    serving_round.main("predict-2", tmp_path, 0.02)
    report = json.loads((tmp_path / REPORT).read_text())
    assert report["rows_per_s"] > 0
