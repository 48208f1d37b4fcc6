"""``paceline report --check RUN``: do the recorded numbers still hold?"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from tests.processes import Processes

from paceline.core.errors import ConfigError, RunDirectoryError
from paceline_pages.report_command import report

check = partial(report, check=True)


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
    assert check([run], json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["holds"] is True
    assert {(each["name"], each["verdict"]) for each in found["findings"]} == {
        (name, "bitwise equal") for name in ("val.accuracy", "val.loss", "test.accuracy", "test.loss", "weights")
    }
    assert found["then"].items() >= found["now"].items()
    assert check([run]) == 0
    assert "holds after step 10." in capsys.readouterr().out
    assert not (run / "report.html").exists()


def test_a_number_that_does_not(reported_runs: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    true = json.loads((run / "result.json").read_text())["metrics"]["test"]
    changed(run, accuracy=true["accuracy"] + 0.01, loss=true["loss"] * (1 + 1e-8))
    assert check([run, reported_runs / "seed"], json=True) == 1
    damaged, whole = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (damaged["holds"], whole["holds"]) == (False, True)
    verdicts = {each["name"]: each["verdict"] for each in damaged["findings"]}
    assert verdicts["test.accuracy"] == "differs"
    assert verdicts["test.loss"] == "equal within rounding"
    assert check([run], tolerance=0.02) == 0
    assert "within --tolerance" in capsys.readouterr().out


def test_a_metric_that_the_task_no_longer_has(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(run, recall=0.5)
    assert check([run]) == 1
    text = capsys.readouterr().out
    assert "test.recall" in text
    assert "does not hold: 1 of 6 differ." in text


def test_other_weights_than_the_recorded_ones(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, "model_sha256": "0" * 64}))
    assert check([run]) == 1
    assert "differ from the recorded hash" in capsys.readouterr().out


def test_other_versions_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (run / "run.toml").read_text()
    version = next(line for line in text.splitlines() if line.startswith("torch ="))
    (run / "run.toml").write_text(text.replace(version, 'torch = "2.0.0"', 1))
    assert check([run]) == 0
    assert "torch: 2.0.0 recorded, " in capsys.readouterr().out


def test_what_cannot_be_checked(run: Path) -> None:
    with pytest.raises(ConfigError, match="takes a --tolerance of at least 0"):
        check([run], tolerance=-1)
    (run / "result.json").unlink()
    with pytest.raises(RunDirectoryError, match="has recorded no metrics to check"):
        check([run])


def test_the_former_command_says_what_to_type(run_processes: Processes) -> None:
    done = run_processes.paceline("revalidate", "runs/first")
    assert done.returncode == 2
    assert "paceline report RUN|PACKAGE --check" in done.stderr
