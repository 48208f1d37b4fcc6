"""Runs that exist, damaged or another's, and places that cannot be written: one clear message each."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.cli.faulty import STEPS, TASKS, Paceline, assert_refused, sha256, train
from tests.small_disk import small_disk as mounted_at

from paceline.data.audit import audit
from paceline.runs import code_record
from paceline.runs.directory import RunDirectory

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("numerics")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run at its end, but without its result; with checkpoints of steps 10, 15 and 20."""
    path = tmp_path_factory.mktemp("trained")
    (path / "tasks.py").write_text(TASKS)
    for run, options in (("run", ()), ("stranger", ("--seed", "9"))):
        subprocess.run(
            [sys.executable, "-m", "paceline", "train", "tasks.py:Good", *STEPS, *options, "--run-dir", run],
            cwd=path,
            check=True,
            timeout=90,
        )
    (path / "sha256").write_text(sha256(path / "run"))
    (path / "run/result.json").unlink()
    return path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(trained / "run", tmp_path / "run", symlinks=True)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ("--set", "lr=0.2"),
            ("created with other hyperparameters", "lr: 0.1 when the run was created, 0.2 now"),
        ),
        (
            ("--microbatches", "3"),
            ("created with other options", "--microbatches: 4 when the run was created, 3 now"),
        ),
        (("--global-batch-size", "48"), ("created with other options", "--global-batch-size: 24 when")),
        (("--seed", "5"), ("created with other options", "--seed: 0 when the run was created, 5 now")),
        (("--resume", "never"), ("--resume never: run holds a run already",)),
    ],
)
def test_a_run_keeps_what_it_was_created_with(
    paceline: Paceline, run: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    before = (run / "run.toml").read_bytes()
    assert_refused(train(paceline, *arguments), *parts, "another --run-dir DIR")
    assert (run / "run.toml").read_bytes() == before
    assert not (run / "result.json").exists()
    assert _events(run)[-1] == "finished", "a refused start is no failure of the run"


def test_a_refused_start_of_several_processes_is_no_failure_of_the_run(paceline: Paceline, run: Path) -> None:
    assert_refused(train(paceline, "--seed", "5", "--nproc", "2"), "created with other options")
    assert _events(run)[-1] == "finished"


def test_a_run_of_another_task(paceline: Paceline, run: Path) -> None:
    assert_refused(train(paceline, task="tasks.py:Other"), "run is a run of tasks.py:Good, not of tasks.py:Other")
    assert _events(run)[-1] == "finished"


def test_a_damaged_newest_checkpoint_is_passed_over(paceline: Paceline, run: Path, trained: Path) -> None:
    _damage(run / "checkpoints/step-00000020-v00000022/model.safetensors")
    said = paceline("resume", "run", "--quiet", "--json")
    assert said.code == 0
    assert "step-00000020-v00000022 cannot be used: model.safetensors is damaged" in said.err
    assert "continuing from step-00000015-v00000016" in said.err
    assert json.loads(said.out)["model_sha256"] == (trained / "sha256").read_text()
    report = audit(RunDirectory(run))
    assert (report.clean, report.recomputed_steps) == (True, 5)


def test_only_damaged_checkpoints_are_not_trained_over(paceline: Paceline, run: Path, trained: Path) -> None:
    for path in run.glob("checkpoints/step-*/model.safetensors"):
        _damage(path)
    said = paceline("resume", "run", "--quiet")
    assert said.code == 1
    assert "no checkpoint in run/checkpoints can be used" in said.err
    assert len(list(run.glob("checkpoints/step-*"))) == 3
    shutil.rmtree(run / "checkpoints")
    assert paceline("resume", "run", "--quiet").code == 0
    assert sha256(run) == (trained / "sha256").read_text()


def test_a_checkpoint_of_another_run_is_refused(paceline: Paceline, run: Path, trained: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(trained / "stranger/checkpoints", run / "checkpoints", symlinks=True)
    assert_refused(paceline("resume", "run", "--quiet"), "was written by another run of 'tasks.py:Good'", code=1)
    assert not (run / "result.json").exists()


@pytest.mark.parametrize("content", ["[config\n", "x = 1\n", '[config]\n[task]\nspec = "tasks.py:Good"\n'])
@pytest.mark.parametrize("command", [("resume", "run"), ("train", "tasks.py:Good", "--run-dir", "run")])
def test_a_damaged_run_toml(paceline: Paceline, run: Path, content: str, command: tuple[str, ...]) -> None:
    (run / "run.toml").write_text(content)
    assert_refused(paceline(*command), "run/run.toml", "Restore it from a copy, or choose another --run-dir DIR.")


def test_a_directory_in_use(paceline: Paceline, run: Path) -> None:
    job = (run / "job.toml").read_bytes()
    with (run / "run.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        two = ("--on", "torchrun", "--nodes", "2", "--recover", "none", "--rdzv-endpoint", "127.0.0.1:9")
        for more in (("--nproc", "1"), ("--nproc", "2"), (*two, "--nproc", "1")):
            said = train(paceline, *more)
            assert_refused(said, "run is in use by another process. Wait for it to end")
    assert (run / "job.toml").read_bytes() == job
    assert not list(run.glob("job-*.toml"))
    assert RunDirectory(run).read_events()[-1]["event"] == "finished"


@pytest.mark.parametrize("place", ["tasks.py", "tasks.py/run", "/dev/null/run"])
def test_a_run_directory_that_cannot_be(paceline: Paceline, place: str) -> None:
    assert_refused(train(paceline, run=place), f"cannot write to the run directory {place}: Not a directory")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """A file system of its own under ``disk``, of which the options can be changed."""
    disk = tmp_path / "disk"

    def remount(options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", disk], check=True)

    with mounted_at(disk, "60k"):
        yield remount


@pytest.mark.chaos
def test_a_full_disk_and_a_read_only_one(
    paceline: Paceline,
    tmp_path: Path,
    trained: Path,
    small_disk: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # This process has imported all tests, whose digests would leave no space for a checkpoint.
    monkeypatch.setattr(code_record, "_local_modules", dict)
    said = train(paceline, run="disk/run")
    assert said.code == 1
    assert "cannot save the checkpoint of step" in said.err
    assert "No space left on device. Earlier checkpoints are untouched." in said.err
    assert "the newest checkpoint kept is step-00000005-v00000005, after step 5" in said.err
    assert [path.name for path in (tmp_path / "disk/run/checkpoints").glob("step-*")] == ["step-00000005-v00000005"]
    with suppress(OSError), (tmp_path / "disk/rest").open("wb", buffering=0) as rest:
        while True:  # a page may be left, too few for a checkpoint
            rest.write(bytes(512))
    assert_refused(paceline("resume", "disk/run"), "cannot write to the run directory disk/run: No space left")
    small_disk("size=4m,ro")
    assert_refused(paceline("resume", "disk/run"), "cannot write to the run directory disk/run: Read-only")
    small_disk("rw")
    assert paceline("resume", "disk/run", "--quiet").code == 0
    assert sha256(tmp_path / "disk/run") == (trained / "sha256").read_text()
    report = audit(RunDirectory(tmp_path / "disk/run"))
    assert report.clean
    assert report.steps == 20
    assert report.recomputed_steps > 0


def _events(run: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]


def _damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
