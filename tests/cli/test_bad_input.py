"""Bad input: one clear message, exit code 2, and no damaged run. Everything runs in this process."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from paceline import cli
from paceline.api import fit
from paceline.data.audit import audit
from paceline.errors import ConfigError
from paceline.recipes.fashion_mnist import FashionMNIST
from paceline.run_directory import RunDirectory

TASKS = """
from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import paceline


class Items(Dataset):
    def __init__(self, fault):
        self.fault = fault

    def __len__(self):
        return 96

    def __getitem__(self, i):
        if i == 77 and self.fault == "raise":
            raise OSError("no such picture")
        if i == 77 and self.fault == "die":
            os._exit(3)
        return torch.full((9 if i == 77 and self.fault == "shape" else 8,), i / 96), i % 3


@dataclass
class Good(paceline.Task):
    lr: float = 0.1
    fault: str = "none"
    defaults = paceline.Defaults(global_batch_size=24, shards=4)

    def build_model(self):
        if self.fault == "no model":
            return "a model"
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        return nn.Flatten() if self.fault == "no parameters" else model

    def build_dataset(self, split):
        if split != "train":
            return None
        if self.fault == "no data":
            return None
        if self.fault == "empty":
            return TensorDataset(torch.zeros(0, 8))
        if self.fault == "number":
            return 17
        if self.fault in ("raise", "die", "shape"):
            return Items(self.fault)
        data = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(240, 8, generator=data), torch.randint(0, 3, (240,), generator=data))

    def build_optimizer(self, model):
        return None if self.fault == "no optimizer" else torch.optim.AdamW(model.parameters(), lr=self.lr)

    def loss(self, model, batch):
        inputs, labels = batch
        losses = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
        if self.fault == "vector":
            return losses
        if self.fault == "float":
            return 1.0
        if self.fault == "detached":
            return losses.mean().detach()
        if self.fault == "bug":
            return nn.functional.cross_entropy(model(inputs[:, :4]), labels)
        if self.fault == "nan" and not Path("mended").exists():
            self.calls = getattr(self, "calls", 0) + 1
            return losses.mean() * (float("nan") if self.calls > 4 * 11 + 1 else 1)
        return losses.mean()


@dataclass
class Other(Good):
    pass


@dataclass
class NoMethods(paceline.Task):
    pass


class Bare(Good):
    width: int = 3


@dataclass
class Needs(Good):
    width: int = None

    def __init__(self, width):
        self.width = width
"""
STEPS = ("--max-steps", "20", "--threads", "1", "--checkpoint-every", "5steps", "--quiet")


class Said(NamedTuple):
    code: int
    out: str
    err: str


pytestmark = pytest.mark.usefixtures("numerics")

Paceline = Callable[..., Said]


@pytest.fixture
def paceline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Paceline:
    """Run ``paceline ARGUMENTS`` here, in a directory with ``tasks.py``."""
    (tmp_path / "tasks.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def run(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        code = cli.main()
        said = capfd.readouterr()
        assert "Traceback" not in said.err
        return Said(code, said.out, said.err)

    return run


def _train(paceline: Paceline, *arguments: str, task: str = "tasks.py:Good", run: str = "run") -> Said:
    return paceline("train", task, *STEPS, "--run", run, *arguments)


def _assert_refused(said: Said, *parts: str, code: int = 2) -> None:
    assert said.code == code, said
    assert said.out == ""
    assert said.err.startswith("paceline: ")
    for part in parts:
        assert part in said.err
    assert said.err.count(parts[0]) == 1


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("trian",), ('Unknown command "trian". Did you mean "train"?', "See: paceline --help")),
        (
            ("train", "tasks.py:Good", "--nprocs", "2"),
            ("--nprocs. Did you mean --nproc?", "paceline train --help"),
        ),
        (("train", "tasks.py:Good", "again"), ("nothing to do with 'again'",)),
        (
            ("train", "tasks.py:Good", "--nproc", "two"),
            ("--nproc must be a whole number, auto, or a list such as 8,4, but is 'two'.",),
        ),
        (("train", "tasks.py:Good", "--reduction", "fst"), ("--reduction must be exact, fast or torch",)),
        (("train", "tasks.py:Good", "--seed", "-1"), ("--seed must be between 0 and 2**63 - 1, but is -1.",)),
        (("train", "tasks.py:Good", "--nproc", "0"), ("--nproc must be at least 1, but is 0.",)),
        (
            ("train", "tasks.py:Good", "--epochs", "1", "--max-steps", "1"),
            ("--epochs or --max-steps, not both",),
        ),
        (
            ("train", "tasks.py:Good", "--init-timeout", "5m"),
            ("--init-timeout must be a duration such as 90s",),
        ),
        (
            ("train", "tasks.py:Good", "--checkpoint-every", "5"),
            ("must be such as 50steps, 1epoch, 5min or never",),
        ),
        (
            ("train", "tasks.py:Good", "--eval-every", "5min"),
            ("--eval-every must be such as 50steps, 1epoch or never",),
        ),
        (("train", "tasks.py:Good", "--best", "accuracy"), ("--best must be METRIC:min or METRIC:max",)),
        (("train", "tasks.py:Good", "--early-stop", "loss:0"), ("--early-stop must be METRIC:PATIENCE",)),
        (("train", "tasks.py:Good", "--nodes", "2"), ("--rdzv-endpoint HOST:PORT",)),
        (("train", "--config", "no.toml"), ("--config no.toml: there is no such file.",)),
        (("train",), ("no task was given. Write paceline train TASK",)),
        (("train", "fashon-mnist"), ("'fashon-mnist' is not a recipe", "fashion-mnist-mlp")),
        (("train", "no.py:Good"), ("there is no file", "no.py")),
        (("resume", "nowhere"), ("nowhere is not a run directory: it has no run.toml.",)),
    ],
)
def test_a_wrong_command_line_starts_nothing(
    paceline: Paceline, tmp_path: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    _assert_refused(paceline(*arguments), *parts)
    assert [path.name for path in tmp_path.iterdir()] == ["tasks.py"]


MPI = {f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")} | {
    f"OMPI_COMM_WORLD_{name}": "1" for name in ("SIZE", "LOCAL_SIZE")
}
VARIABLES = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
TORCHRUN = {**VARIABLES, "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("recover", "variables", "parts"),
    [
        ("inplace", MPI, ("where mpirun has started the processes", "Use --recover none here")),
        ("restart", MPI, ("where mpirun has started the processes", "Use --recover none here")),
        ("restart", VARIABLES, ("where a launcher that sets RANK has started",)),
        ("inplace", TORCHRUN, ("where torchrun has started", "--recover restart and torchrun's own")),
    ],
)
def test_a_recovery_that_another_launcher_does_not_do_is_refused(
    paceline: Paceline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recover: str,
    variables: dict[str, str],
    parts: tuple[str, ...],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    said = paceline("train", "tasks.py:Good", "--recover", recover)
    _assert_refused(said, f"--recover {recover} does not work", *parts)
    with pytest.raises(ConfigError, match=f"--recover {recover} does not work"):
        fit(FashionMNIST(), recover=recover)
    assert [path.name for path in tmp_path.iterdir()] == ["tasks.py"]


@pytest.mark.parametrize("variables", [{}, MPI, VARIABLES], ids=["plain", "mpirun", "variables"])
def test_the_default_recovery_is_none_where_nobody_recovers(
    paceline: Paceline, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert _train(paceline).code == 0


def test_fit_in_this_process_refuses_a_recovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--recover inplace does not work with --on inprocess"):
        fit(FashionMNIST(), nproc=1, recover="inplace")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--set", "lrr=0.1"), ("Good has no field 'lrr'. Its fields: lr, fault.",)),
        (("--set", "lr=fast"), ("Good.lr must be", "'fast'")),
        (("--set", "lr"), ("--set 'lr': write it as field=value",)),
        (
            ("--global-batch-size", "7"),
            ("too small for 4 shards", "--global-batch-size 8 or more", "--shards 3"),
        ),
        (("--resume", "must"), ("--resume must: run holds no run",)),
        (
            ("--set", "fault=no model"),
            ("Good.build_model returned a str; it must return a torch.nn.Module.",),
        ),
        (("--set", "fault=no parameters"), ("without a trainable parameter",)),
        (("--set", "fault=no optimizer"), ("build_optimizer returned a NoneType", "torch.optim.Optimizer")),
        (("--set", "fault=no data"), ('build_dataset("train") returned None',)),
        (("--set", "fault=empty"), ("the training data has 0 samples",)),
        (("--set", "fault=number"), ("the train dataset (int) has no length",)),
    ],
)
def test_what_cannot_begin_creates_no_run(
    paceline: Paceline, tmp_path: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    _assert_refused(_train(paceline, *arguments), *parts)
    assert not RunDirectory(tmp_path / "run").exists()
    assert _train(paceline).code == 0  # the same directory serves once the mistake is mended


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there(paceline: Paceline) -> None:
    _assert_refused(_train(paceline, "--device", "cuda"), "torch sees no GPU here. Use --device cpu or auto.")


@pytest.mark.parametrize(
    ("task", "parts"),
    [
        ("tasks.py:Godo", ("tasks.py has no 'Godo'. It defines: Good, Other",)),
        ("tasks.py:Items", ("Items is not a task; it must be a dataclass that extends paceline.Task",)),
        ("no.such.module:Good", ("there is no module 'no'",)),
        ("broken.py:Good", ("syntax error in", "broken.py, line 2", "def f(:")),
        ("imports.py:Good", ("imports 'no_such_package', which is not installed",)),
        ("tasks.py:NoMethods", ("NoMethods must define build_dataset(self, split).",)),
        (
            "tasks.py:Bare",
            ("Bare has fields (width) but is no dataclass. Write @dataclass above class Bare.",),
        ),
    ],
)
def test_a_wrong_task(paceline: Paceline, tmp_path: Path, task: str, parts: tuple[str, ...]) -> None:
    (tmp_path / "broken.py").write_text("# a task\ndef f(:\n    pass\n")
    (tmp_path / "imports.py").write_text("import no_such_package\n")
    _assert_refused(_train(paceline, task=task), *parts)


def test_an_error_in_a_task_file_is_shown_with_its_place(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text("data = {}\ndata['x']\n")
    said = _train(paceline, task="raises.py:Good")
    _assert_refused(
        said, "KeyError: 'x'", f'File "{tmp_path}/raises.py", line 2', "log: run/logs/rank-0.log", code=1
    )


@pytest.mark.parametrize(
    ("fault", "code", "parts"),
    [
        ("vector", 2, ("Good.loss returned a tensor of shape (6,)", "paceline.Loss(sum, weight)")),
        ("float", 2, ("Good.loss returned float",)),
        ("detached", 2, ("Good.loss does not depend on the model's parameters",)),
        ("bug", 1, ("mat1 and mat2 shapes cannot be multiplied", "tasks.py", "in loss")),
    ],
)
def test_a_wrong_loss(paceline: Paceline, fault: str, code: int, parts: tuple[str, ...]) -> None:
    _assert_refused(_train(paceline, "--set", f"fault={fault}"), *parts, code=code)


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(
    ("fault", "part"),
    [
        ("raise", "train dataset, sample 77 cannot be read: OSError: no such picture"),
        ("shape", "different shapes: sample 77 has ((9,), int)"),
    ],
)
def test_a_bad_sample(paceline: Paceline, tmp_path: Path, fault: str, part: str, workers: str) -> None:
    said = _train(paceline, "--set", f"fault={fault}", "--workers", workers)
    _assert_refused(said, part, "log: run/logs/rank-0.log")
    assert len(said.err.splitlines()) == 2
    assert "Traceback" in (tmp_path / "run/logs/rank-0.log").read_text()


def test_a_data_worker_that_dies(paceline: Paceline) -> None:
    said = _train(paceline, "--set", "fault=die", "--workers", "1")
    _assert_refused(said, "a worker process of the train dataset died", "--workers 0")


def test_a_loss_that_is_nan_stops_the_run_which_can_continue(paceline: Paceline, tmp_path: Path) -> None:
    said = _train(paceline, "--set", "fault=nan")
    _assert_refused(said, "the loss of step 12 (epoch 2, step 2 in it) is NaN or infinite in shard 1", code=1)
    assert "positions 30 to 35 of the epoch (samples " in said.err
    assert "paceline resume run" in said.err
    events = RunDirectory(tmp_path / "run").read_events()
    assert events[-1]["event"] == "failed"
    assert (tmp_path / "run/checkpoints/step-00000010-v00000011").is_dir()
    (tmp_path / "mended").touch()
    assert _train(paceline, "--set", "fault=nan", run="other").code == 0
    assert paceline("resume", "run", "--quiet").code == 0
    assert _sha256(tmp_path / "run") == _sha256(tmp_path / "other")
    assert audit(RunDirectory(tmp_path / "run")).clean


def _sha256(run: Path) -> str:
    return str(json.loads((run / "result.json").read_text())["model_sha256"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run at its end, but without its result; with checkpoints of steps 10, 15 and 20."""
    path = tmp_path_factory.mktemp("trained")
    (path / "tasks.py").write_text(TASKS)
    for run, options in (("run", ()), ("stranger", ("--seed", "9"))):
        subprocess.run(
            [sys.executable, "-m", "paceline", "train", "tasks.py:Good", *STEPS, *options, "--run", run],
            cwd=path,
            check=True,
            timeout=90,
        )
    (path / "sha256").write_text(_sha256(path / "run"))
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
        (("--shards", "3"), ("created with other options", "--shards: 4 when the run was created, 3 now")),
        (("--global-batch-size", "48"), ("created with other options", "--global-batch-size: 24 when")),
        (("--seed", "5"), ("created with other options", "--seed: 0 when the run was created, 5 now")),
        (("--resume", "never"), ("--resume never: run holds a run already",)),
    ],
)
def test_a_run_keeps_what_it_was_created_with(
    paceline: Paceline, run: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    before = (run / "run.toml").read_bytes()
    _assert_refused(_train(paceline, *arguments), *parts, "another --run DIR")
    assert (run / "run.toml").read_bytes() == before
    assert not (run / "result.json").exists()


def test_a_run_of_another_task(paceline: Paceline, run: Path) -> None:
    _assert_refused(
        _train(paceline, task="tasks.py:Other"), "run is a run of tasks.py:Good, not of tasks.py:Other"
    )


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
    assert _sha256(run) == (trained / "sha256").read_text()


def test_a_checkpoint_of_another_run_is_refused(paceline: Paceline, run: Path, trained: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(trained / "stranger/checkpoints", run / "checkpoints", symlinks=True)
    _assert_refused(
        paceline("resume", "run", "--quiet"), "was written by another run of 'tasks.py:Good'", code=1
    )
    assert not (run / "result.json").exists()


@pytest.mark.parametrize("content", ["[config\n", "x = 1\n", '[config]\n[task]\nspec = "tasks.py:Good"\n'])
@pytest.mark.parametrize("command", [("resume", "run"), ("train", "tasks.py:Good", "--run", "run")])
def test_a_damaged_run_toml(paceline: Paceline, run: Path, content: str, command: tuple[str, ...]) -> None:
    (run / "run.toml").write_text(content)
    _assert_refused(
        paceline(*command), "run/run.toml", "Restore it from a copy, or choose another --run DIR."
    )


def test_a_directory_in_use(paceline: Paceline, run: Path) -> None:
    job = (run / "job.toml").read_bytes()
    with (run / "run.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for nproc in ("1", "2"):
            said = _train(paceline, "--nproc", nproc)
            _assert_refused(said, "run is in use by another process. Wait for it to end")
    assert (run / "job.toml").read_bytes() == job
    assert RunDirectory(run).read_events()[-1]["event"] == "finished"


@pytest.mark.parametrize("place", ["tasks.py", "tasks.py/run", "/dev/null/run"])
def test_a_run_directory_that_cannot_be(paceline: Paceline, place: str) -> None:
    _assert_refused(
        _train(paceline, run=place), f"cannot write to the run directory {place}: Not a directory"
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """A file system of its own under ``disk``, of which the options can be changed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48k", "none", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")

    def remount(options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", disk], check=True)

    try:
        yield remount
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_full_disk_and_a_read_only_one(
    paceline: Paceline, tmp_path: Path, trained: Path, small_disk: Callable[[str], None]
) -> None:
    said = _train(paceline, run="disk/run")
    assert said.code == 1
    assert "cannot save the checkpoint of step" in said.err
    assert "No space left on device. Earlier checkpoints are untouched." in said.err
    assert "the newest checkpoint kept is step-00000005-v00000005, after step 5" in said.err
    assert [path.name for path in (tmp_path / "disk/run/checkpoints").glob("step-*")] == [
        "step-00000005-v00000005"
    ]
    _assert_refused(
        paceline("resume", "disk/run"), "cannot write to the run directory disk/run: No space left"
    )
    small_disk("size=4m,ro")
    _assert_refused(paceline("resume", "disk/run"), "cannot write to the run directory disk/run: Read-only")
    small_disk("rw")
    assert paceline("resume", "disk/run", "--quiet").code == 0
    assert _sha256(tmp_path / "disk/run") == (trained / "sha256").read_text()
    report = audit(RunDirectory(tmp_path / "disk/run"))
    assert report.clean
    assert report.steps == 20
    assert report.recomputed_steps > 0


def _damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
