"""Runs of each released version are shown, audited, loaded and continued."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.processes import Processes

import paceline
from paceline.core.errors import RunDirectoryError
from paceline.runs.directory import RUN_FORMAT, RunDirectory

RELEASED = Path(__file__).with_name("released")
VERSIONS = sorted(path.parent.name for path in RELEASED.glob("*/run.toml"))


@pytest.fixture
def released(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of a version's run, next to its task."""
    shutil.copyfile(RELEASED / "task.py", tmp_path / "task.py")
    shutil.copytree(RELEASED / request.param, tmp_path / "run")
    return tmp_path / "run"


def test_this_version_has_one() -> None:
    """Made by released/make.py before the release."""
    assert paceline.__version__ in VERSIONS


@pytest.mark.parametrize("released", VERSIONS, indirect=True)
def test_it_is_read_and_continued(
    released: Path, run_processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def paceline_of(*words: str) -> str:
        done = run_processes.paceline(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "finished" in paceline_of("runs", "show", "run")
    assert "Clean" in paceline_of("audit", "run")
    monkeypatch.chdir(tmp_path)
    assert paceline.load("run")(torch.zeros(2, 4)).shape == (2, 4)
    paceline_of("fork", "run", "--epochs", "3", "--run-dir", "longer")
    paceline_of("resume", "longer", "--quiet")
    weights = paceline.load("longer").state_dict()
    for name, values in json.loads((released / "expected.json").read_text()).items():
        torch.testing.assert_close(weights[name].double().flatten(), torch.tensor(values).double(), rtol=0, atol=1e-5)
    assert "Clean: every sample of 3 epochs seen exactly once" in paceline_of("audit", "longer")


@pytest.mark.parametrize("released", VERSIONS[-1:], indirect=True)
def test_a_run_of_a_newer_version_is_refused(released: Path) -> None:
    text = (released / "run.toml").read_text()
    (released / "run.toml").write_text(text.replace(f"format = {RUN_FORMAT}", f"format = {RUN_FORMAT + 1}", 1))
    with pytest.raises(RunDirectoryError, match=rf"has format {RUN_FORMAT + 1}, .* a newer one wrote it"):
        RunDirectory(released).read_manifest()
