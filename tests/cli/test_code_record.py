"""The record of a run's code: what it has and leaves out, what a resume asks for. In this process, with real git."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline import cli
from paceline.runs.code_record import read_code
from paceline.runs.directory import RunDirectory
from paceline.runs.trackers import RunInfo

TASK = """
from dataclasses import dataclass
from pathlib import Path

import torch
from slopes import SLOPE
from torch import nn
from torch.utils.data import TensorDataset

import paceline


@dataclass
class Line(paceline.Task):
    defaults = paceline.Defaults(global_batch_size=8, microbatches=2)

    def build_model(self):
        return nn.Linear(1, 1)

    def build_dataset(self, split):
        x = torch.arange(32.0).reshape(32, 1)
        return TensorDataset(x, SLOPE * x) if split == "train" else None

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1e-4)

    def on_batch_begin(self, info):
        if Path("interrupt").exists() and info.step == 2:
            Path("interrupt").unlink()
            raise RuntimeError("interrupted")

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])
"""
TRAIN = ("train", "line.py:Line", "--epochs", "2", "--threads", "1", "--quiet", "--purity", "off", "--run-dir")
pytestmark = [pytest.mark.usefixtures("numerics"), pytest.mark.integration]

Paceline = Callable[..., tuple[int, str]]


@pytest.fixture
def paceline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Paceline:
    """Run ``paceline ARGUMENTS`` in a project's folder: exit code, and what it printed."""
    (tmp_path / "line.py").write_text(TASK)
    (tmp_path / "slopes.py").write_text("SLOPE = 2\n")
    (tmp_path / ".gitignore").write_text("secrets.toml\n.env\n")
    (tmp_path / "secrets.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "slopes", raising=False)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        code = cli.main()
        return code, "".join(capfd.readouterr())

    return run


def _git(*arguments: str) -> str:
    identity = ("-c", "user.name=x", "-c", "user.email=x@x")
    return subprocess.run(["git", *identity, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def _commit() -> str:
    _git("init", "-q")
    _git("add", "line.py", "slopes.py", ".gitignore")
    _git("add", "-f", "secrets.toml")
    _git("commit", "-q", "-m", "A line")
    return _git("rev-parse", "HEAD")


def test_a_run_records_commit_changes_modules_and_packages_and_no_ignored_file(paceline: Paceline) -> None:
    commit = _commit()
    Path("slopes.py").write_text("SLOPE = 3\n")
    Path("secrets.toml").write_text("token = 'hidden'\n")
    Path(".env").write_text("TOKEN=hidden\n")
    assert paceline(*TRAIN, "a")[0] == 0
    run = RunDirectory(Path("a"))
    code = read_code(run)
    assert code["commit"] == commit
    assert {"line.py", "slopes.py"} <= code["modules"].keys()
    assert not [name for name in code["modules"] if "/torch/" in name or "src/paceline" in name]
    assert code["packages"]["torch"]
    patch = run.path / code["patch"]
    assert "+SLOPE = 3" in patch.read_text()
    assert patch.stat().st_mode & 0o077 == 0
    assert not [file for file in run.path.rglob("*") if file.is_file() and b"hidden" in file.read_bytes()]
    assert RunInfo.read(run).tags["paceline.commit"] == commit


def test_a_resume_names_changed_files_and_asks_and_a_restart_warns(
    paceline: Paceline, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        Path("interrupt").touch()
        assert paceline(*TRAIN, name, "--checkpoint-every", "1step")[0] == 1
    assert "commit" not in read_code(RunDirectory(Path("a")))  # there is no repository
    Path("slopes.py").write_text("SLOPE = 4\n")
    code, printed = paceline("resume", "a", "--quiet")
    assert code == 2
    assert "slopes.py" in printed
    assert "line.py" not in printed
    assert "--accept-code-changes" in printed

    assert paceline("resume", "a", "--quiet", "--accept-code-changes")[0] == 0
    changes = [event["files"] for event in RunDirectory(Path("a")).read_events() if event["event"] == "code changed"]
    assert changes == [["slopes.py"]]
    assert [
        {*line} & {"packages", "modules"} for line in map(json.loads, Path("a/code.jsonl").read_text().splitlines())
    ] == [
        {"packages", "modules"},
        {"modules"},
    ]
    _, printed = paceline("runs", "--compare", "a", "b", "--json")
    assert list(json.loads(printed)["differing_code"]) == ["code slopes.py"]

    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert paceline("resume", "b", "--quiet")[0] == 0
    assert "has changed" in Path("b/logs/rank-0.log").read_text()


def test_code_is_recorded_without_git_and_in_a_directory_that_takes_no_record(
    paceline: Paceline, monkeypatch: pytest.MonkeyPatch
) -> None:
    _commit()
    monkeypatch.setenv("PATH", "/nonexistent")
    assert paceline(*TRAIN, "a")[0] == 0
    assert {"modules", "packages"} <= read_code(RunDirectory(Path("a"))).keys()
    Path("b/code.jsonl").mkdir(parents=True)
    assert paceline(*TRAIN, "b")[0] == 0
