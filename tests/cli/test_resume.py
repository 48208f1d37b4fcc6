"""``paceline resume`` and ``--resume``: a run goes on with what it was created with. In this process."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.data.audit import audit
from paceline.runs.directory import RunDirectory

TASK = """
from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


@dataclass
class Small(paceline.Task):
    lr: float = 0.1
    defaults = paceline.Defaults(global_batch_size=24, microbatches=4)

    def build_model(self):
        return nn.Linear(8, 3)

    def build_dataset(self, split):
        if split != "train":
            return None
        data = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(100, 8, generator=data), torch.randint(0, 3, (100,), generator=data))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def on_batch_begin(self, info):
        self.info = info

    def loss(self, model, batch):
        if (self.info.step, self.info.number) == (6, 1) and Path("stop").exists():
            Path("stop").unlink()
            os.kill(os.getpid(), signal.SIGTERM)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
TRAIN = ("train", "small.py:Small", "--set", "lr=0.2", "--epochs", "3", "--threads", "1", "--seed", "3")
pytestmark = pytest.mark.usefixtures("numerics")

Paceline = Callable[..., tuple[int, str, str]]


@pytest.fixture
def paceline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Paceline:
    """Run ``paceline ARGUMENTS`` here: exit code, stdout, stderr."""
    (tmp_path / "small.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments, "--quiet"])
        code = cli.main()
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def stopped(paceline: Paceline, tmp_path: Path) -> Path:
    """A run that a signal stopped in its second epoch, after step 7."""
    (tmp_path / "stop").touch()
    code, out, err = paceline(*TRAIN, "--run-dir", "run", "--checkpoint-every", "4steps")
    assert code == 75
    assert "stopped after step 7" in err
    assert out == ""
    return tmp_path / "run"


@pytest.fixture
def sha256(paceline: Paceline) -> str:
    """The hash of the same run, not stopped."""
    code, out, _ = paceline(*TRAIN, "--run-dir", "undisturbed", "--json")
    assert code == 0
    return _sha256(out)


def _sha256(out: str) -> str:
    return str(json.loads(out)["model_sha256"])


def test_resume_continues_at_the_next_sample(paceline: Paceline, stopped: Path, sha256: str) -> None:
    code, out, err = paceline("resume", "run", "--json")
    result: dict[str, Any] = json.loads(out)
    assert (code, err, result["model_sha256"]) == (0, "", sha256)
    assert (result["steps"], result["epochs"], result["samples"], result["restarts"]) == (15, 3, 300, 1)
    report = audit(RunDirectory(stopped))
    assert (report.clean, report.recomputed_steps, report.generations) == (True, 0, 2)
    assert [epoch.once for epoch in report.epochs] == [100, 100, 100]


def test_the_same_command_continues_too(paceline: Paceline, stopped: Path, sha256: str) -> None:
    code, out, _ = paceline(*TRAIN, "--run-dir", "run", "--json")
    assert (code, _sha256(out)) == (0, sha256)


def test_what_decides_no_bit_may_change(paceline: Paceline, stopped: Path, sha256: str) -> None:
    code, out, _ = paceline(
        *("resume", "run", "--json", "--log-every", "1", "--keep-checkpoints", "1", "--checkpoint-every", "2steps")
    )
    assert (code, _sha256(out)) == (0, sha256)
    assert [path.name[:13] for path in (stopped / "checkpoints").glob("step-*")] == ["step-00000015"]
    steps = [json.loads(line)["step"] for line in (stopped / "metrics.jsonl").read_text().splitlines()]
    assert set(range(8, 16)) <= set(steps)


def test_other_threads_are_allowed_and_told(paceline: Paceline, stopped: Path) -> None:
    code, _, err = paceline("resume", "run", "--threads", "2")
    assert code == 0
    assert "equal within rounding, not bit for bit: threads: 1 in the checkpoint, 2 now" in err


def test_a_finished_run_stays_as_it_is(paceline: Paceline, stopped: Path, sha256: str) -> None:
    assert paceline("resume", "run")[0] == 0
    before = (stopped / "result.json").read_bytes()
    code, out, _ = paceline("resume", "run", "--json")
    assert (code, _sha256(out)) == (0, sha256)
    assert (stopped / "result.json").read_bytes() == before
    assert len(list((stopped / "ledger").iterdir())) == 2


def test_a_run_and_its_task_may_be_moved(paceline: Paceline, stopped: Path, sha256: str) -> None:
    shutil.move(stopped, "moved")
    Path("elsewhere").mkdir()
    shutil.move("small.py", "elsewhere/small.py")
    code, _, err = paceline("resume", "moved")
    assert code == 2
    assert "there is no file" in err
    code, out, _ = paceline("train", "elsewhere/small.py:Small", "--run-dir", "moved", "--json")
    assert (code, _sha256(out)) == (0, sha256)


def test_resume_must_and_never(paceline: Paceline, stopped: Path) -> None:
    assert paceline(*TRAIN, "--run-dir", "run", "--resume", "never")[0] == 2
    assert paceline(*TRAIN, "--run-dir", "fresh", "--resume", "must")[0] == 2
    assert paceline(*TRAIN, "--run-dir", "run", "--resume", "must")[0] == 0
    assert paceline(*TRAIN, "--run-dir", "fresh", "--resume", "never")[0] == 0


def test_a_run_toml_configures_a_new_run(paceline: Paceline, stopped: Path, sha256: str) -> None:
    code, out, err = paceline("train", "--config", "run/run.toml", "--run-dir", "again", "--json")
    assert code == 0, err
    assert _sha256(out) == sha256


def test_the_strategy_stays_unless_another_is_asked_for(paceline: Paceline, stopped: Path) -> None:
    manifest = stopped / "run.toml"
    text = manifest.read_text()
    assert 'strategy = "auto"' in text
    manifest.write_text(text.replace('strategy = "auto"', 'strategy = "fsdp"\nmesh = "fsdp=2"'))

    def config(*options: str) -> dict[str, Any]:
        code, out, _ = paceline("resume", "run", "--nproc", "2", "--dry-run", "--json", *options)
        assert code == 0
        (job,) = json.loads(out)["files"].values()
        found: dict[str, Any] = tomllib.loads(job)["config"]
        return found

    assert (config()["strategy"], config()["mesh"]) == ("fsdp", "fsdp=2")
    other = config("--strategy", "zero1")
    assert other["strategy"] == "zero1"
    assert "mesh" not in other


@pytest.mark.parametrize(
    ("created", "asked", "kept"),
    [
        ('strategy = "deepspeed"\nzero_stage = 3', "--strategy zero1", {}),
        ('strategy = "fsdp"\nfsdp_wrap = "Block"\nfsdp_offload = true', "--strategy ddp", {}),
        (
            'strategy = "fsdp"\nprecision = "bf16"\nfsdp_mixed_precision = true',
            "--strategy fsdp",
            {"precision": "bf16", "fsdp_mixed_precision": True},
        ),
        (
            'strategy = "fsdp"\nprecision = "bf16"\nfsdp_mixed_precision = true',
            "--strategy ddp",
            {"precision": "bf16"},
        ),
        ('strategy = "fsdp"\nfsdp_wrap = "Block"', "--mesh dp=1,fsdp=2", {"fsdp_wrap": "Block"}),
        ('strategy = "ps"\nps_mode = "ssp"\nps_staleness = 1', "--strategy ddp", {}),
        ('strategy = "tp"\nsequence_parallel = true', "--strategy ddp", {}),
        ('strategy = "pp"\npp_schedule = "gpipe"\npp_split = "1,1"', "--strategy zero1", {}),
        ('strategy = "dp"\ndp_devices = 2', "--strategy ddp", {}),
        (
            'sdc_check_every = 2\ncheckpoint_activations = "block"\ncheckpoint_blocks = "Linear"',
            "--strategy pp",
            {},
        ),
        (
            'strategy = "fsdp"\ncheckpoint_activations = "block"',
            "--strategy ddp",
            {"checkpoint_activations": "block"},
        ),
    ],
)
def test_another_strategy_drops_what_belongs_to_the_one_before(
    paceline: Paceline, stopped: Path, created: str, asked: str, kept: dict[str, Any]
) -> None:
    manifest = stopped / "run.toml"
    text = manifest.read_text()
    for line in created.splitlines():
        name = line.partition(" = ")[0]
        text = re.sub(rf"(?m)^{name} = .*\n", "", text)
    manifest.write_text(text.replace("[config]\n", f"[config]\n{created}\n"))
    code, out, err = paceline("resume", "run", "--nproc", "2", "--dry-run", "--json", *asked.split())
    assert code == 0, err
    (job,) = json.loads(out)["files"].values()
    config = tomllib.loads(job)["config"]
    names = {line.partition(" = ")[0] for line in created.splitlines()} - {"strategy"}
    assert {name: value for name, value in config.items() if name in names} == kept


def test_resume_keeps_shares_spares_and_patience(paceline: Paceline, stopped: Path) -> None:
    manifest = stopped / "run.toml"
    created = {"load_balance": "equal", "hot_spares": 1, "init_timeout": "9min"}
    text = re.sub(r"(?m)^(load_balance|hot_spares|init_timeout) = .*\n", "", manifest.read_text())
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in created.items())
    manifest.write_text(text.replace("[config]\n", f"[config]\n{lines}\n"))
    code, out, err = paceline("resume", "run", "--nproc", "2", "--dry-run", "--json", "--hot-spares", "2")
    assert code == 0, err
    (job,) = json.loads(out)["files"].values()
    config = tomllib.loads(job)["config"]
    assert {name: config.get(name) for name in created} == {**created, "hot_spares": 2}
    code, out, err = paceline("resume", "run", "--nproc", "2", "--dry-run", "--json")
    (job,) = json.loads(out)["files"].values()
    assert created.items() <= tomllib.loads(job)["config"].items()
