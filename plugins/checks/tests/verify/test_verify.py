"""``paceline verify`` end to end: what is promised is found kept, and what is wrong is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

TASKS = Path(__file__).with_name("tasks.py")
NARROW = ("--steps", "2", "--json")


@pytest.fixture(scope="module")
def verified(module_processes: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The reports on three tasks, and the exit codes; made side by side."""
    commands = {
        "Right": (
            "--worlds",
            "1,2",
            "--strategies",
            "plain-pytorch,single,ddp,ddp-allreduce,ddp-stock,fsdp,fsdp-allreduce,pp-1f1b",
        ),
        "WrongLayer": ("--worlds", "2", "--strategies", "ddp,ddp-allreduce"),
        "WrongBackward": ("--worlds", "2", "--strategies", "ddp,ddp-stock"),
    }
    started = {
        name: module_processes.start(
            [sys.executable, "-m", "paceline", "verify", f"{TASKS}:{name}", *NARROW, *options],
            env={"OMP_NUM_THREADS": "1"},
            cwd=tmp_path_factory.mktemp(name),
        )
        for name, options in commands.items()
    }
    finished = {name: module_processes.finish(popen, timeout_s=560) for name, popen in started.items()}
    for name, done in finished.items():
        assert done.stdout, f"{name}: {done.stderr}"
    return {name: (done.returncode, json.loads(done.stdout), done.stderr) for name, done in finished.items()}


def rows(report: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row["method"], row["world_size"]): row for row in report["rows"]}


@pytest.mark.timeout(600)
def test_every_strategy_keeps_its_promise(verified: dict[str, Any]) -> None:
    code, report, told = verified["Right"]
    assert code == 0, report
    assert report["ok"]
    assert (report["steps"], report["microbatches"], report["global_batch_size"]) == (2, 4, 64)
    found = rows(report)
    assert found["single", 1]["verdict"] == "equal"
    plain = found["plain-pytorch", 1]
    assert (plain["verdict"], plain["guarantee"]) == ("within", "rounding")
    assert plain["distance"] < 1e-12
    for name in ("ddp", "fsdp", "pp-1f1b"):
        assert found[name, 2]["verdict"] == "equal", found[name, 2]
    for name in ("ddp-allreduce", "ddp-stock", "fsdp-allreduce"):
        row = found[name, 2]
        assert row["verdict"] == "within"
        assert 0 < row["distance"] < row["tolerance"] < 1e-2
    assert report["warnings"] == []
    assert "ddp-2" in told


def test_a_layer_that_differs_is_named(verified: dict[str, Any]) -> None:
    code, report, _ = verified["WrongLayer"]
    assert code == 1
    for name in ("ddp", "ddp-allreduce"):
        row = rows(report)[name, 2]
        assert row["verdict"] == "diverged"
        divergence = row["divergence"]
        # Rank 1 has micro-batches 2 and 3.
        assert (divergence["step"], divergence["module"], divergence["microbatch"]) == (1, "2", 2)
    assert [warning["lint"] for warning in report["warnings"]] == ["reads-the-rank"]


def test_a_gradient_that_differs_is_named(verified: dict[str, Any]) -> None:
    code, report, _ = verified["WrongBackward"]
    assert code == 1
    for name in ("ddp", "ddp-stock"):
        divergence = rows(report)[name, 2]["divergence"]
        assert (divergence["step"], divergence["what"], divergence["tensor"]) == (1, "gradient", "0.weight")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--strategies", "ddq"), "unknown strategy 'ddq'. Did you mean ddp?"),
        (("--worlds", "two"), "--worlds must be numbers of processes such as 1,2,4, but is 'two'"),
        (("--nproc", "2"), "--nproc is set by paceline verify itself. Use --worlds."),
        (("--steps", "0"), "--steps must be at least 1, but is 0"),
        (
            ("--microbatches", "2"),
            "--microbatches 2 is too few for --worlds 4: each process needs one. Use --microbatches 4",
        ),
        (("--recover", "inplace"), "--recover has no effect on verify"),
        (("--num-workers", "2"), "--num-workers has no effect on verify"),
        (("--log-every", "1"), "--log-every has no effect on verify"),
    ],
)
def test_bad_input(run_processes: Any, options: tuple[str, ...], message: str) -> None:
    done = run_processes.paceline("verify", f"{TASKS}:Right", *options)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr


def test_a_task_that_fails_says_how(run_processes: Any, tmp_path: Path) -> None:
    file = tmp_path / "failing.py"
    file.write_text(
        "import paceline\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Failing(paceline.Task):\n"
        "    def build_model(self):\n        return 3\n"
    )
    done = run_processes.paceline("verify", f"{file}:Failing", "--worlds", "1")
    assert done.returncode == 2, done.stderr
    assert "build_dataset" in done.stderr or "must return a torch.nn.Module" in done.stderr


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("fashion-mnist", ()),
        ("transformer", ("--set", "layers=2", "--set", "width=32", "--set", "heads=4", "--set", "context=32")),
    ],
)
def test_recipes(run_processes: Any, task: str, options: tuple[str, ...]) -> None:
    done = run_processes.paceline("verify", task, *options, "--steps", "2", "--worlds", "1,2", "--json", timeout_s=560)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["warnings"] == []
    assert [r for r in report["rows"] if r["verdict"] not in ("equal", "within", "not applicable")] == []
    assert done.returncode == 0
    there = {row["method"] for row in report["rows"] if row["verdict"] != "not applicable"}
    assert {
        "plain-pytorch",
        "dp",
        "ddp",
        "zero1",
        "fsdp",
        "tp",
        "pp-1f1b",
        "pp-interleaved",
        "pp-sequential",
        "local-sgd",
        "pipedream",
        "ps",
        "deepspeed-1",
        "deepspeed-3",
    } <= there
