"""What ``paceline verify`` does with methods that are their own reference, and with runs that fail."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.processes import children

from paceline.core.errors import ConfigError
from paceline_checks.verify.cases import (
    StrategyCase,
    VerificationRequest,
    all_cases,
    parse_worlds,
    select_cases,
)
from paceline_checks.verify.compare import FACTOR, Margins, Step, converges, first_difference, measure
from paceline_checks.verify.verify import verify

HERE = Path(__file__).parent


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_a_method_that_is_its_own_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(HERE), path))))
    methods = [
        StrategyCase(name=name, options={"strategy": "ddp"}, guarantee="reference", simulation=f"simulations:{name}")
        for name in ("right", "wrong", "missing")
    ]
    methods.append(StrategyCase(name="slow", options={"strategy": "ddp"}, guarantee="convergence"))
    request = VerificationRequest(task=f"{HERE / 'tasks.py'}:Plain", options={}, cases=methods, worlds=(2,), steps=2)
    report = verify(request, lambda line: None)
    right, wrong, missing, slow = report.rows
    assert right.verdict == "equal", right
    assert wrong.verdict == "diverged", wrong
    assert wrong.detail.startswith("weights ")
    assert (missing.verdict, "has no attribute 'missing'" in missing.detail) == ("failed", True), missing
    assert slow.verdict == "within", slow
    assert slow.detail.startswith("loss "), slow
    assert not report.ok


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_what_one_process_trains_is_compared_with_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(HERE), path))))
    names = ("plain", "plain_with_a_decayed_bias", "plain_with_a_forgotten_average", "missing")
    methods = [
        StrategyCase(name=name, guarantee="rounding", least=1, simulation=f"simulations:{name}") for name in names
    ]
    request = VerificationRequest(
        task=f"{HERE / 'tasks.py'}:Plain", options={"ema": 0.9}, cases=methods, worlds=(1,), steps=2
    )
    report = verify(request, lambda line: None)
    plain, decayed, forgotten, missing = report.rows
    assert (plain.verdict, plain.tolerance) == ("within", 1e-6), plain
    assert decayed.verdict == forgotten.verdict == "diverged"
    assert decayed.divergence is not None
    assert decayed.divergence.tensor == "1.bias"
    assert "1.00e-05 from plain PyTorch" in str(decayed.divergence)
    assert forgotten.divergence is not None
    assert str(forgotten.divergence.tensor).startswith("the average of 1.")
    assert missing.verdict == "failed", missing
    assert not report.ok


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_dies_does_not_keep_back_the_others(run_processes: Any) -> None:
    done = run_processes.paceline(
        *("verify", f"{HERE / 'tasks.py'}:Dies", "--worlds", "2", "--steps", "1", "--json"),
        *("--strategies", "fsdp,ddp-allreduce,ddp"),
        timeout_s=560,
    )
    assert done.returncode == 1, done.stderr
    verdicts = {row["method"]: row["verdict"] for row in json.loads(done.stdout)["rows"]}
    assert verdicts == {"fsdp": "failed", "ddp-allreduce": "within", "ddp": "equal"}


@pytest.mark.slow
def test_ctrl_c_ends_all_processes(run_processes: Any, tmp_path: Path, wait_until: Callable[..., None]) -> None:
    command = [sys.executable, "-m", "paceline", "verify", "fashion-mnist", "--worlds", "2"]
    popen = run_processes.start([*command, "--steps", "100000", "--strategies", "ddp"], env={"TMPDIR": str(tmp_path)})

    def at_work() -> bool:
        traces = tmp_path.glob("paceline-*-verify-*/*/trace-*.jsonl")
        return any(trace.stat().st_size for trace in traces)

    wait_until(at_work, "a step", timeout_s=120)
    below = children(popen.pid, recursive=True)
    assert below
    os.kill(popen.pid, signal.SIGINT)
    done = run_processes.finish(popen, timeout_s=120)
    assert done.returncode == 130, done.stderr
    assert not [child for child in below if child.is_running()]


def test_methods_on_numbers_of_processes() -> None:
    assert len({method.name for method in all_cases()}) == len(all_cases())
    mesh = StrategyCase(name="grid", options={"mesh": "dp=*,fsdp=2"}, least=4)
    assert mesh.options_on(2) is None
    assert mesh.options_on(5) is None
    assert mesh.options_on(8) == {"mesh": "dp=4,fsdp=2"}
    assert StrategyCase(name="one", most=1, least=1).options_on(2) is None
    assert [method.name for method in select_cases("fsdp, single")] == ["fsdp", "single"]
    assert parse_worlds("4,1,1") == (1, 4)
    with pytest.raises(ConfigError, match="--strategies must name at least one strategy"):
        select_cases(",")


def step(number: int, loss: float, gradient: tuple[str, float], weight: tuple[str, float]) -> Step:
    return Step(number, loss, (0.1,), {"gradient": {"a.w": gradient}, "weight": {"a.w": weight}}, {})


def test_what_differs_first_is_named() -> None:
    alone = [step(1, 1.0, ("g", 0.0), ("w", 0.0)), step(2, 0.5, ("h", 0.0), ("v", 0.0))]
    assert first_difference(alone, alone) is None
    other = [alone[0], step(2, 0.5, ("h", 0.0), ("other", 0.0))]
    found = first_difference(other, alone)
    assert found is not None
    assert (found.step, found.what, found.tensor, found.module) == (2, "weight", "a.w", "a")
    short = first_difference(alone[:1], alone)
    assert short is not None
    assert str(short) == "step 2: step: the step is missing"
    rates = first_difference([Step(1, 1.0, (0.2,), alone[0].tensors, {})], alone)
    assert rates is not None
    assert str(rates) == "step 1: learning rate: 0.2, but 0.1 on one process"
    copies = first_difference([Step(1, 1.0, (0.1,), alone[0].tensors, {"weight": "a.w"})], alone)
    assert copies is not None
    assert str(copies) == "step 1: weight of a.w: two ranks hold different copies"


def test_clipping_sharded_gradients_promises_a_tolerance() -> None:
    def promises(**options: Any) -> dict[str, str]:
        return {method.name: method.with_options(options).guarantee for method in all_cases()}

    changed = {n for n, promised in promises(clip_norm=1.0).items() if promised != promises(seed=1)[n]}
    assert changed == {"fsdp", "dp-fsdp"}
    assert promises(clip_norm=1.0)["fsdp"] == "tolerance"


def test_what_converges() -> None:
    def falling(last: float) -> list[Step]:
        return [step(k, 2.0 + (last - 2.0) * (k - 1) / 9, ("", 0.0), ("", 0.0)) for k in range(1, 11)]

    alone = falling(1.0)
    assert converges(falling(1.4), alone)[0]
    assert not converges(falling(1.7), alone)[0]
    assert converges(falling(2.0), falling(2.5))[1].endswith("so use more --steps")
    assert not converges([], alone)[0]


def test_a_tolerance_follows_from_one_process() -> None:
    alone = [step(1, 1.0 + 1e-6, ("g", 1e-5), ("w", 1e-5)), step(2, 0.5, ("h", 0.0), ("v", 0.0))]
    margins = Margins(alone, [1.0, 0.5])
    assert margins.of_tensors(1, "gradient") == FACTOR * 1e-5
    # What was apart once stays apart.
    assert margins.of_tensors(2, "weight") == FACTOR * 1e-5
    near = measure([step(1, 1.0, ("x", FACTOR * 0.9e-5), ("y", 0.0)), alone[1]], margins)
    assert near.divergence is None
    assert near.distance == pytest.approx(0.9 * near.tolerance)
    apart = [alone[0], Step(2, 0.5, (0.1,), alone[1].tensors, {"gradient": "a.w", "weight": "a.w"})]
    copies = measure(apart, margins).divergence
    assert str(copies) == "step 2: weight of a.w: two ranks hold different copies"
    assert measure([Step(1, 1.0, (0.1,), alone[0].tensors, {"gradient": "a.w"}), alone[1]], margins).divergence is None
    far = measure([step(1, 1.0, ("x", FACTOR * 1.1e-5), ("y", 0.0)), alone[1]], margins)
    assert far.divergence is not None
    assert (far.divergence.step, far.divergence.what, far.divergence.tensor) == (1, "gradient", "a.w")
