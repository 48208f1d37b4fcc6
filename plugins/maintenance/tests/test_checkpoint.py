"""``paceline checkpoint ls|verify|prune`` and ``--backup-to``, as a user meets them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.data.audit import audit
from paceline.runs.directory import RunDirectory

TASK = Path(__file__).parents[3] / "tests" / "runs" / "checkpoint" / "disk_task.py"
pytestmark = pytest.mark.usefixtures("numerics")
Paceline = Callable[..., tuple[int, str, str]]


@pytest.fixture
def paceline(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Paceline:
    """Run ``paceline ARGUMENTS`` in this process; its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as training sets it

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["paceline", *arguments])
        code = cli.main()
        said = capfd.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def trained(paceline: Paceline, tmp_path: Path) -> Path:
    code, _, err = paceline(
        *("train", f"{TASK}:Small", "--max-steps", "40", "--eval-every", "7steps", "--threads", "1"),
        *(
            "--checkpoint-every",
            "10steps",
            "--keep-checkpoints",
            "3",
            "--backup-to",
            "backups",
            "--run-dir",
            "run",
            "--quiet",
        ),
    )
    assert code == 0, err
    return tmp_path / "run"


def flip(path: Path, position: int = 400) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def newest(run: Path) -> Path:
    return max(run.glob("checkpoints/step-*"))


def backups(run: Path) -> list[str]:
    (folder,) = (run.parent / "backups").iterdir()
    return sorted(path.name for path in folder.glob("step-*"))


def test_ls_shows_each_with_its_marks(paceline: Paceline, trained: Path) -> None:
    flip(max(trained.glob("checkpoints/step-00000030-*")) / "manifest.json", 10)
    code, out, _ = paceline("checkpoint", "ls", "run", "--json")
    listed = json.loads(out)
    assert code == 0
    own = [entry for entry in listed if not entry["in_backup"]]
    assert [entry["step"] for entry in own][-2:] == [30, 40]
    assert {"latest", "backed up"} <= set(own[-1]["marks"])
    assert "damaged" in own[-2]["marks"]
    assert "manifest.json is damaged" in own[-2]["problem"]
    assert sum("best" in entry["marks"] for entry in own) == 1
    assert all(entry["size_bytes"] > 0 for entry in own if entry["problem"] is None)
    code, out, _ = paceline("checkpoint", "ls", "run")
    assert code == 0
    assert "latest, backed up" in out


def test_verify_names_each_problem_and_exits_1(paceline: Paceline, trained: Path) -> None:
    assert paceline("checkpoint", "verify", "run")[0] == 0
    path = newest(trained)
    flip(path / "model.safetensors")
    (path / "optimizers.safetensors").unlink()
    (path / "state.json").write_bytes(b"")
    (path / "more").touch()
    code, out, _ = paceline("checkpoint", "verify", "run")
    assert code == 1
    assert f"{path.name}: damaged" in out
    for said in (
        "model.safetensors is damaged: its SHA-256 is",
        "optimizers.safetensors is missing",
        "state.json has 0 bytes, but its manifest.json says",
        "'more' is not in its manifest.json",
        "1 damaged",
    ):
        assert said in out
    (folder,) = (trained.parent / "backups").iterdir()
    flip(max(folder.glob("step-*")) / "state.json")
    code, out, _ = paceline("checkpoint", "verify", "run", "--json")
    damaged = [entry for entry in json.loads(out) if entry["problems"]]
    assert code == 1
    assert [entry["in_backup"] for entry in damaged] == [False, True]


def test_verify_is_not_content_with_nothing(paceline: Paceline, trained: Path) -> None:
    for folder in (trained / "checkpoints", trained.parent / "backups"):
        shutil.rmtree(folder)
    code, out, _ = paceline("checkpoint", "verify", "run")
    assert (code, out) == (1, "run has no checkpoint.\n")


def test_prune_keeps_the_newest_good_one_and_the_best(paceline: Paceline, trained: Path) -> None:
    before = sorted(path.name for path in trained.glob("checkpoints/step-*"))
    flip(newest(trained) / "model.safetensors")
    code, out, _ = paceline("checkpoint", "prune", "run", "--keep", "1", "--dry-run", "--json")
    planned = json.loads(out)
    assert code == 0
    assert sorted(path.name for path in trained.glob("checkpoints/step-*")) == before
    code, out, _ = paceline("checkpoint", "prune", "run", "--keep", "1")
    assert code == 0
    assert "1 damaged kept; --damaged removes them." in out
    left = {path.name for path in trained.glob("checkpoints/step-*")}
    assert left == set(before) - set(planned["removed"])
    assert any(name.startswith("step-00000030-") for name in left)
    assert before[-1] in left
    assert paceline("checkpoint", "prune", "run", "--damaged")[0] == 0
    assert {path.name for path in trained.glob("checkpoints/step-*")} == left - {before[-1]}
    assert (trained / "checkpoints" / "LATEST").resolve().name in left


def test_prune_leaves_all_where_none_is_good(paceline: Paceline, trained: Path) -> None:
    before = sorted(trained.glob("checkpoints/step-*"))
    for path in before:
        flip(path / "model.safetensors")
    code, out, _ = paceline("checkpoint", "prune", "run", "--damaged")
    assert code == 0
    assert "No checkpoint is intact, so nothing was removed" in out
    assert sorted(trained.glob("checkpoints/step-*")) == before


def test_prune_is_refused_while_the_run_is_at_work(paceline: Paceline, trained: Path) -> None:
    with RunDirectory(trained).locked():
        code, _, err = paceline("checkpoint", "prune", "run", "--keep", "1")
        assert (code, "is in use by another process" in err) == (2, True)
        assert paceline("checkpoint", "prune", "run", "--keep", "1", "--dry-run")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ls", "absent"), "is not a run directory"),
        (("prune", "run", "--keep", "0"), "--keep must be at least 1, but is 0."),
        (("verify", "run", "--backup-to", "elsewhere"), "elsewhere holds no backup of run"),
    ],
)
def test_bad_input(paceline: Paceline, trained: Path, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = paceline("checkpoint", *arguments)
    assert (code, out) == (2, "")
    assert said in err


def unfinished(run: Path) -> str:
    """Make the run one that has still to go on from a checkpoint; the hash that it ended with."""
    sha256: str = json.loads((run / "result.json").read_bytes())["model_sha256"]
    (run / "result.json").unlink()
    return sha256


@pytest.mark.parametrize("loss", ["all gone", "all damaged"])
def test_a_run_goes_on_from_its_backup(paceline: Paceline, trained: Path, loss: str) -> None:
    sha256 = unfinished(trained)
    assert any(name.startswith("step-00000040-") for name in backups(trained))
    if loss == "all gone":
        shutil.rmtree(trained / "checkpoints")
    else:
        for path in trained.glob("checkpoints/step-*"):
            flip(path / "model.safetensors")
    # Its newest backup is damaged too, so some steps are done again.
    (folder,) = (trained.parent / "backups").iterdir()
    flip(max(folder.glob("step-00000040-*")) / "model.safetensors")
    code, out, err = paceline("resume", "run", "--quiet", "--json")
    assert code == 0, err
    assert "comes back from" in err
    assert json.loads(out)["model_sha256"] == sha256
    assert audit(RunDirectory(trained)).clean


def test_a_backup_named_on_the_command_line_is_used(paceline: Paceline, trained: Path) -> None:
    sha256 = unfinished(trained)
    shutil.rmtree(trained / "checkpoints")
    (trained.parent / "backups").rename(trained.parent / "moved")
    code, out, err = paceline("resume", "run", "--quiet", "--json", "--backup-to", "moved")
    assert code == 0, err
    assert json.loads(out)["model_sha256"] == sha256


def test_a_failing_backup_is_told_and_ends_nothing(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = paceline(
        *("train", f"{TASK}:Small", "--max-steps", "20", "--threads", "1", "--checkpoint-every", "10steps"),
        *("--backup-to", "file", "--run-dir", "run", "--quiet"),
    )
    assert code == 0
    assert "lacks the checkpoint of step 20: its copy failed" in err
    events: list[dict[str, Any]] = RunDirectory(tmp_path / "run").read_events()
    assert {event["event"] for event in events} >= {"checkpoint", "backup failed"}
