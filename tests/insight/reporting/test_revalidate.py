"""``paceline revalidate``: do the numbers still hold?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.revalidate import revalidate
from paceline.core.errors import ConfigError, RunDirectoryError


@pytest.fixture
def run(reported_runs: Path, tmp_path: Path) -> Path:
    """A copy of a run, to be changed."""
    copy = tmp_path / "run"
    shutil.copytree(reported_runs / "seed", copy, symlinks=True)
    return copy


def changed(run: Path, **values: float | None) -> None:
    """Let the run have recorded other numbers of the test split."""
    result = json.loads((run / "result.json").read_text())
    result["metrics"]["test"] |= values
    (run / "result.json").write_text(json.dumps(result))


def test_numbers_that_hold(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert revalidate(run, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["holds"] is True
    assert found["weights_hold"] is True
    assert {(n["split"], n["name"], n["finding"]) for n in found["numbers"]} == {
        (split, name, "same") for split in ("val", "test") for name in ("accuracy", "loss")
    }
    assert found["versions"]["then"] == found["versions"]["now"]
    assert revalidate(run) == 0
    assert "holds: 4 metrics of the model after step 10." in capsys.readouterr().out


def test_a_number_that_does_not(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    true = json.loads((run / "result.json").read_text())["metrics"]["test"]
    changed(run, accuracy=true["accuracy"] + 0.01, loss=true["loss"] * (1 + 1e-8))
    assert revalidate(run, json=True) == 1
    numbers: dict[str, Any] = {
        n["name"]: n for n in json.loads(capsys.readouterr().out)["numbers"] if n["split"] == "test"
    }
    assert numbers["accuracy"]["finding"] == "differs"
    assert numbers["accuracy"]["difference"] == pytest.approx(-0.01)
    assert numbers["loss"]["finding"] == "rounding"
    assert revalidate(run, tolerance=0.02) == 0
    assert "within --tolerance" in capsys.readouterr().out


def test_a_metric_that_the_task_no_longer_has(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(run, recall=0.5)
    assert revalidate(run) == 1
    text = capsys.readouterr().out
    assert "test.recall" in text
    assert "does not hold: 1 of 5 metrics differ." in text


def test_other_weights_than_the_recorded_ones(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, "model_sha256": "0" * 64}))
    assert revalidate(run) == 1
    assert "weights are not equal to the recorded ones" in capsys.readouterr().out


def test_other_versions_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (run / "run.toml").read_text()
    version = next(line for line in text.splitlines() if line.startswith("torch ="))
    (run / "run.toml").write_text(text.replace(version, 'torch = "2.0.0"', 1))
    assert revalidate(run) == 0
    assert "torch: 2.0.0 recorded, " in capsys.readouterr().out


def test_what_cannot_be_checked(run: Path) -> None:
    with pytest.raises(ConfigError, match="--tolerance must be at least 0, but is -1"):
        revalidate(run, tolerance=-1)
    (run / "result.json").unlink()
    with pytest.raises(RunDirectoryError, match="has recorded no metrics to check"):
        revalidate(run)
