"""What SageMaker's machines get a copy of, and where they find scripts and tasks in it."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.launch.submit import normal_command, remote_task
from paceline_clouds.options import SageMakerOptions
from paceline_clouds.sagemaker import SageMaker, pack

pytestmark = pytest.mark.aws

OPTIONS = {
    "image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/train:1",
    "role": "arn:aws:iam::123456789012:role/training",
    "instance_type": "ml.g5.12xlarge",
    "s3": "s3://bucket/a",
}


def test_a_source_that_cannot_be_packed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--source .*this directory does not exist"):
        pack(tmp_path / "nowhere")
    with (tmp_path / "data.bin").open("wb") as file:
        file.truncate(501 * 2**20)
    with pytest.raises(ConfigError, match=r"has 501 MiB, over 500; the largest file is data.bin"):
        pack(tmp_path)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with files of all kinds, which is the current one."""
    project = tmp_path / "project"
    (tmp_path / "outside.py").touch()
    for file in ("train.py", "src/main.py", "src/run.sh", "src/package/deep.py", "runs/x.py", ".hidden/x.py"):
        (project / file).parent.mkdir(parents=True, exist_ok=True)
        (project / file).touch()
    (project / "src/inner.py").symlink_to("main.py")
    (project / "src/outer.py").symlink_to("../train.py")
    (project / "src/linked").symlink_to("package")
    monkeypatch.chdir(project)
    return project


def from_source(source: str | None) -> Callable[[str], str]:
    """Where the machines find a file, with or without ``--source``."""
    return partial(SageMaker().remote_path, options=SageMakerOptions(**OPTIONS, source=source or "."))


@pytest.mark.parametrize(
    ("source", "words", "runs"),
    [
        (None, "train.py", "python train.py"),
        (None, "src/main.py --lr 1", "python src/main.py --lr 1"),
        (None, "{project}/train.py", "python train.py"),
        ("src", "main.py", "python main.py"),
        ("src", "./package/deep.py", "python package/deep.py"),
        ("src", "{project}/src/main.py", "python main.py"),
        ("src", "inner.py", "python inner.py"),
        ("src", "python3 main.py", "python3 main.py"),
        ("src", "./run.sh main.py", "./run.sh main.py"),
        ("src", "/opt/of-the-image/tool src/main.txt", "/opt/of-the-image/tool src/main.txt"),
        ("src", "-m package.deep", "python -m package.deep"),
    ],
)
def test_a_script_is_named_from_the_source(project: Path, source: str | None, words: str, runs: str) -> None:
    command = normal_command(words.format(project=project).split(), "python", from_source(source))
    assert " ".join(command) == runs
    files = {word.removeprefix("./") for word in runs.split() if word.endswith((".py", ".sh"))}
    assert files <= set(packed_names(source or "."))


@pytest.mark.parametrize(
    ("source", "script", "message"),
    [
        (None, "nowhere.py", "this directory does not contain nowhere.py"),
        (None, "../outside.py", "this directory does not contain ../outside.py"),
        (None, "{project}/../outside.py", "/outside.py, and only its files are copied to the nodes"),
        (None, "runs/x.py", "runs/x.py is not copied to the nodes"),
        (None, ".hidden/x.py", ".hidden/x.py is not copied to the nodes"),
        ("src", "src/main.py", "--source src does not contain src/main.py, .* Its path in it is main.py."),
        ("src", "train.py", "--source src does not contain train.py"),
        ("src", "outer.py", "outer.py is not copied to the nodes: .* links to other places"),
        ("src", "linked/deep.py", "linked/deep.py is not copied to the nodes"),
        ("nowhere", "main.py", "--source .*nowhere: this directory does not exist"),
    ],
)
def test_what_the_machines_would_not_find_is_refused(
    project: Path, source: str | None, script: str, message: str
) -> None:
    script = script.format(project=project)
    with pytest.raises(ConfigError, match=message):
        normal_command([script], "python", from_source(source))
    with pytest.raises(ConfigError, match=message):
        remote_task(f"{script}:Task", from_source(source))


def test_a_task_is_named_from_the_source(project: Path) -> None:
    for task, there in (
        ("main.py:Task", "main.py:Task"),
        ("{project}/src/package/deep.py:Task", "package/deep.py:Task"),
        ("package.deep:Task", "package.deep:Task"),
    ):
        assert remote_task(task.format(project=project), from_source("src")) == there


def test_what_the_commands_start_is_named_from_the_source(project: Path, run_processes: Any) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    shown = ("--on", "sagemaker", "--source", "project/src", "--dry-run", "--json")
    for words, runs in (
        (("launch", *options, *shown, "--", "main.py"), " -- python main.py\n"),
        (("train", "./package/deep.py:Task", *options, *shown), " train package/deep.py:Task --run-dir "),
    ):
        done = run_processes.paceline(*words)
        assert done.returncode == 0, done.stderr
        assert runs in json.loads(done.stdout)["files"]["start.sh"]


def test_links_that_lead_elsewhere_are_not_packed(project: Path) -> None:
    assert packed_names("src") == ["inner.py", "main.py", "package/deep.py", "run.sh"]


def packed_names(directory: str) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(pack(Path(directory)))) as tar:
        return tar.getnames()
