"""Whatever happens to the workers, the model is the undisturbed run's, and each sample was seen once."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.data.audit import audit
from paceline.runs.directory import RunDirectory

pytestmark = pytest.mark.chaos

TASK = str(Path(__file__).with_name("faulty.py")) + ":Faulty"
STEPS = 40  # of the whole run; an evaluation every 7, a checkpoint every 5


def train(
    run: Path,
    nproc: int,
    harms: Sequence[str] = (),
    *,
    recover: str = "inplace",
    fields: Sequence[str] = (),
    options: Sequence[str] = (),
) -> dict[str, Any]:
    """Train to the end, whatever happens; return the result."""
    start(run, nproc, harms, recover=recover, fields=fields, more=options)
    result: dict[str, Any] = json.loads((run / "result.json").read_text())
    report = audit(RunDirectory(run))
    assert report.clean, report.verdict
    assert report.steps == STEPS
    return result


def start(
    run: Path,
    nproc: int,
    harms: Sequence[str],
    *,
    recover: str = "inplace",
    code: int = 0,
    fields: Sequence[str] = (),
    more: Sequence[str] = (),
) -> None:
    """Begin or continue a run, which ends with this exit code."""
    plan = run.with_name(run.name + "-plan")
    plan.mkdir(parents=True, exist_ok=True)
    for harm in harms:
        (plan / harm).touch()
    options = ["--recover", recover] if nproc > 1 else []
    command = [sys.executable, "-m", "paceline", "train", TASK, "--run-dir", str(run), "--nproc", str(nproc)]
    command += ["--threads", "1", "--set", f"plan={plan}", "--eval-every", "7steps", "--best-metric", "accuracy:max"]
    for field in fields:
        command += ["--set", field]
    process = subprocess.Popen(
        [*command, "--checkpoint-every", "5steps", *options, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
    )
    try:
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, output
    assert sorted(path.name for path in plan.iterdir()) == [], "a harm was never done"
    assert [p.pid for p in psutil.process_iter(["cmdline"]) if str(run) in (p.info["cmdline"] or [])] == []


@pytest.fixture(scope="module")
def undisturbed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    train(run, 1)
    return run


@pytest.fixture(scope="module")
def undisturbed(undisturbed_run: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((undisturbed_run / "result.json").read_text())
    return result


def same(result: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    for field in ("model_sha256", "metrics", "steps", "samples", "state_version", "best_step"):
        assert result[field] == undisturbed[field], field


HARMS = {
    "nothing": [],
    "kill rank 0": ["step-9-0-kill"],
    "kill rank 1": ["step-9-1-kill"],
    "kill rank 2": ["step-9-2-kill"],
    "kill two at once": ["step-11-0-kill", "step-11-2-kill"],
    "kill all": ["step-12-0-kill", "step-12-1-kill", "step-12-2-kill"],
    "kill all before the first checkpoint": ["step-2-0-kill", "step-2-1-kill", "step-2-2-kill"],
    "stop rank 0": ["step-8-0-stop"],
    "stop rank 2": ["step-8-2-stop"],
    "kill in an evaluation": ["eval-7-1-kill", "eval-14-0-kill"],
    "kill in the last evaluations": ["eval-40-0-kill"],
    "kill in a save": ["save-0-0-kill"],
    "kill between a checkpoint's rename and the fsync": ["renamed-0-0-kill"],
    "kill in the first group": ["form-0-1-kill"],
    "kill after forming a group": ["step-6-1-kill", "formed-1-0-kill"],
    "kill a taker": ["step-6-1-kill", "reform-1-0-join", "copy-3-2-kill"],
    "kill a giver": ["step-6-1-kill", "reform-1-0-join", "give-1-0-kill"],
}


SECOND = ("kill rank 1", "kill rank 2", "stop rank 2", "kill in an evaluation")


@pytest.mark.parametrize(
    "harms",
    [pytest.param(harms, id=name, marks=[pytest.mark.slow] if name in SECOND else []) for name, harms in HARMS.items()],
)
def test_model_is_that_of_the_undisturbed_run(harms: list[str], tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    same(train(tmp_path / "run", 3, harms), undisturbed)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--lora", "rank=2,target=5"), id="adapters"),
        pytest.param(("--freeze", "0", "--reset-head"), id="frozen", marks=pytest.mark.slow),
    ],
)
def test_a_fine_tuned_model_is_that_of_the_undisturbed_run(
    options: tuple[str, ...], tmp_path: Path, undisturbed_run: Path, undisturbed: dict[str, Any]
) -> None:
    """All are killed before the first checkpoint, one later: the run's copy of its parent begins it again."""
    options = (*options, "--init-from", str(undisturbed_run))
    whole = train(tmp_path / "whole/run", 1, options=options)
    assert whole["model_sha256"] != undisturbed["model_sha256"]
    harms = ["step-2-0-kill", "step-2-1-kill", "step-9-1-kill"]
    killed = train(tmp_path / "killed/run", 2, harms, options=options)
    same(killed, whole)
    assert killed["drift"] == whole["drift"]
    assert killed["recoveries"] >= 1


def test_the_best_model_outlives_rank_0(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """Rank 0 dies two steps after the first best model, and still writes it; the last rank holds a copy."""
    same(train(tmp_path / "run", 3, ["save-1-0-hold", "step-9-0-kill"]), undisturbed)
    events = [event["event"] for event in RunDirectory(tmp_path / "run").read_events()]
    assert events.count("started") == 1  # nobody went back to a checkpoint
    assert "fault" in events
    saved = [e["step"] for e in RunDirectory(tmp_path / "run").read_events() if e["event"] == "checkpoint"]
    assert 7 in saved


def test_many_faults(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    chosen = random.Random(5)
    harms = [f"step-{step}-{chosen.randrange(2)}-kill" for step in range(3, STEPS - 2, 6)]
    same(train(tmp_path / "run", 4, harms), undisturbed)


@pytest.mark.parametrize(
    ("harm", "cause", "step"),
    [
        ("step-9-1-usr1", "SIGUSR1", 10),
        pytest.param("eval-7-1-term", "SIGTERM", 7, marks=pytest.mark.slow),
        ("eval-40-0-term", "SIGTERM", 40),
    ],
)
def test_a_run_that_was_stopped_goes_on(
    harm: str, cause: str, step: int, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    run = tmp_path / "run"
    start(run, 3, [harm], code=75)
    last = RunDirectory(run).read_events()[-1]
    # An evaluation is left between two batches.
    assert (last["event"], last["cause"], last["step"]) == ("stopped", cause, step)
    result = train(run, 2)
    same(result, undisturbed)
    assert (result["restarts"], result["recoveries"]) == (1, 0)


def test_streams_are_read_on_after_a_fault(tmp_path: Path) -> None:
    fields = ("stream=true", "num=420")
    whole = train(tmp_path / "whole/run", 1, fields=fields)
    # Before a save and after one; survivors read a step again, and the lost rank's micro-batches move.
    result = train(tmp_path / "faulty/run", 3, ["step-3-2-kill", "step-9-1-kill"], fields=fields)
    same(result, whole)
    readers = (tmp_path / "faulty/readers").read_text().splitlines()
    from_the_beginning = readers.count("open") - readers.count("load")
    # Six in each epoch, and after the first fault, with nothing saved yet, the two of the lost rank; the purity guard
    # reads the beginning once more in each of the five processes.
    assert (from_the_beginning, readers.count("load") > 6) == (6 + 2 + 6 + 5, True)
