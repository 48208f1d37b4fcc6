"""Bad input: one clear message, exit code 2, and no damaged run. Everything runs in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.faulty import Paceline, assert_refused, sha256, train

from paceline.api import fit
from paceline.core.errors import ConfigError
from paceline.data.audit import audit
from paceline.runs.directory import RunDirectory
from paceline_tasks.fashion_mnist import FashionMNIST

pytestmark = pytest.mark.usefixtures("numerics")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("tune", "--resume", "a", "b"), "To continue a search: paceline tune --resume SEARCH."),
        (("launch", "--nproc_per_node", "2", "--", "x.py"), "--nproc_per_node is torchrun's. Use --nproc."),
        (("launch", "--image", "i", "--", "x.py", "--on", "slurm"), "--image is an option of --on kubernetes"),
    ],
)
def test_an_error_is_explained_by_its_own_command(run_processes: Any, words: tuple[str, ...], says: str) -> None:
    """torch.distributed.launch writes an argument before the user's; options after ``--`` are the program's."""
    done = run_processes.paceline("--local-rank=0", *words, env={"LOCAL_RANK": "0"})
    assert done.returncode == 2
    assert says in done.stderr
    assert "is not supported by --on slurm" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        *(
            ((*words, "s3://bucket/runs"), ("s3://bucket/runs: this takes a path of this machine",))
            for words in (
                ("train", "tasks.py:Good", "--run-dir"),
                ("tune", "tasks.py:Good", "--run-dir"),
                *((command,) for command in ("audit", "export", "report", "gc", "logs", "dashboard")),
                ("checkpoint", "ls"),
                ("runs", "show"),
            )
        ),
        *(
            ((*words, f"{'long' * 70}{end}"), ("a file's name has at most 255 bytes; shorten 'longlong",))
            for words, end in (
                (("train", "tasks.py:Good", "--run-dir"), ""),
                (("train", "tasks.py:Good", "--backup-to"), "/backup"),
                *((("train", "tasks.py:Good", "--init-from"), end) for end in ("", "@best", "/checkpoints/step-1")),
                (("train",), ".py:Good"),
                *(((command,), "") for command in ("resume", "audit", "report", "logs", "fork")),
            )
        ),
        (
            ("train", "tasks.py:Good", "--init-from", "long/" * 820),
            ("--init-from: a path has at most 4,095 bytes; shorten 'long/",),
        ),
        (("trian",), ('Unknown command "trian". Did you mean "train"?', "See: paceline --help")),
        (
            ("train", "tasks.py:Good", "--nprocs", "2"),
            ("--nprocs. Did you mean --nproc?", "paceline train --help"),
        ),
        (("train", "tasks.py:Good", "again"), ("unexpected argument: 'again'",)),
        (
            ("train", "tasks.py:Good", "--nproc", "two"),
            ("--nproc must be a whole number, auto, or a list such as 8,4, but is 'two'.",),
        ),
        (("train", "tasks.py:Good", "--reduction", "fst"), ("--reduction must be exact, allreduce or ddp",)),
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
        (("train", "tasks.py:Good", "--best-metric", "accuracy"), ("--best-metric must be METRIC:min or METRIC:max",)),
        (("train", "tasks.py:Good", "--early-stop", "loss:0"), ("--early-stop must be METRIC:PATIENCE",)),
        (("train", "tasks.py:Good", "--nodes", "2"), ("--rdzv-endpoint HOST:PORT",)),
        (("train", "--config", "no.toml"), ("--config no.toml: there is no such file.",)),
        (("train",), ("no task was given. Write paceline train TASK",)),
        (("audit",), ("RUN is missing. See: paceline audit --help",)),
        (("export", "--checkpoint"), ("--checkpoint needs a value.",)),
        (("launch", "--", "x.py"), ("--on needs a value, one of inprocess, spawn, torchrun, slurm,",)),
        (("train", "fashon-mnist"), ("'fashon-mnist' is not a built-in task", "fashion-mnist-mlp")),
        (("train", "no.py:Good"), ("there is no file", "no.py")),
        (("resume", __file__), ("is not a run directory: it has no run.toml.",)),
        (("resume", "nowhere"), ("nowhere is not a run directory: it has no run.toml.",)),
    ],
)
def test_a_wrong_command_line_starts_nothing(
    paceline: Paceline, tmp_path: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    assert_refused(paceline(*arguments), *parts)
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
    assert_refused(said, f"--recover {recover} does not work", *parts)
    with pytest.raises(ConfigError, match=f"--recover {recover} does not work"):
        fit(FashionMNIST(), recover=recover)
    assert [path.name for path in tmp_path.iterdir()] == ["tasks.py"]


@pytest.mark.parametrize("variables", [{}, MPI, VARIABLES], ids=["plain", "mpirun", "variables"])
def test_the_default_recovery_is_none_where_nobody_recovers(
    paceline: Paceline, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert train(paceline).code == 0


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
            ("too small for 4 micro-batches", "--global-batch-size 8 or more", "--microbatches 3"),
        ),
        (("--resume", "must"), ("--resume must: run holds no run",)),
        (
            ("--set", "fault=no model"),
            ("Good.build_model returned a str; it must return a torch.nn.Module.",),
        ),
        (("--set", "fault=no parameters"), ("without a trainable parameter",)),
        (("--set", "fault=no optimizer"), ("build_optimizer returned a NoneType", "torch.optim.Optimizer")),
        (("--set", "fault=callbacks"), ("build_callback returned a list", "one paceline.Callback, or None.")),
        (("--set", "fault=no data"), ('build_dataset("train") returned None',)),
        (("--set", "fault=empty"), ("the training data has 0 samples",)),
        (("--set", "fault=number"), ("the train dataset (int) has no length",)),
    ],
)
def test_what_cannot_begin_creates_no_run(
    paceline: Paceline, tmp_path: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    assert_refused(train(paceline, *arguments), *parts)
    assert not RunDirectory(tmp_path / "run").exists()
    assert train(paceline).code == 0  # the same directory serves once the mistake is mended


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there(paceline: Paceline) -> None:
    assert_refused(train(paceline, "--device", "cuda"), "sees no GPU on this node", "or use --device cpu.")


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
            ("Bare has fields (width) but is not a dataclass. Write @dataclass above class Bare.",),
        ),
    ],
)
def test_a_wrong_task(paceline: Paceline, tmp_path: Path, task: str, parts: tuple[str, ...]) -> None:
    (tmp_path / "broken.py").write_text("# a task\ndef f(:\n    pass\n")
    (tmp_path / "imports.py").write_text("import no_such_package\n")
    assert_refused(train(paceline, task=task), *parts)


def test_an_error_in_a_task_file_is_shown_with_its_place(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text("data = {}\ndata['x']\n")
    said = train(paceline, task="raises.py:Good")
    assert_refused(said, "KeyError: 'x'", f'File "{tmp_path}/raises.py", line 2', "log: run/logs/rank-0.log", code=1)


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
    assert_refused(train(paceline, "--set", f"fault={fault}"), *parts, code=code)


@pytest.mark.integration
@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(
    ("fault", "part"),
    [
        ("raise", "train dataset, sample 77 cannot be read: OSError: no such picture"),
        ("shape", "different shapes: sample 77 has ((9,), int)"),
    ],
)
def test_a_bad_sample(paceline: Paceline, tmp_path: Path, fault: str, part: str, workers: str) -> None:
    said = train(paceline, "--set", f"fault={fault}", "--num-workers", workers)
    assert_refused(said, part, "log: run/logs/rank-0.log")
    assert len(said.err.splitlines()) == 2
    assert "Traceback" in (tmp_path / "run/logs/rank-0.log").read_text()
    steps = audit(RunDirectory(tmp_path / "run")).steps
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == [f"step-{steps:08}-v{steps:08}"]


@pytest.mark.integration
def test_a_data_worker_that_dies(paceline: Paceline) -> None:
    said = train(paceline, "--set", "fault=die", "--num-workers", "1")
    assert_refused(said, "a worker process of the train dataset died", "--num-workers 0")


def test_a_loss_that_is_nan_stops_the_run_which_can_continue(paceline: Paceline, tmp_path: Path) -> None:
    said = train(paceline, "--set", "fault=nan")
    assert_refused(said, "the loss of step 12 (epoch 2, step 2 in it) is NaN or infinite in micro-batch 1", code=1)
    assert "positions 30 to 35 of the epoch (samples " in said.err
    assert "paceline resume run" in said.err
    events = RunDirectory(tmp_path / "run").read_events()
    assert events[-1]["event"] == "failed"
    assert (tmp_path / "run/checkpoints/step-00000011-v00000012").is_dir()  # not the epoch's alone
    (tmp_path / "mended").touch()
    assert train(paceline, "--set", "fault=nan", run="other").code == 0
    assert paceline("resume", "run", "--quiet").code == 0
    assert sha256(tmp_path / "run") == sha256(tmp_path / "other")
    assert audit(RunDirectory(tmp_path / "run")).clean
