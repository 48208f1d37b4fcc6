"""Predictions beside what processes really take: peaks of resident memory on the CPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.task_loading import TaskReference
from paceline_planning.measurement import measure
from paceline_planning.model_partition import Recompute
from paceline_planning.predict import RankLayout, predict_memory

pytestmark = pytest.mark.matrix

TASKS = Path(__file__).parent / "tasks.py"
MICROBATCH = 4
MICROBATCHES = 2  # one a rank under ddp and fsdp
WAYS = {
    "single": RankLayout(),
    "ddp": RankLayout(dp=2),
    "fsdp": RankLayout(fsdp=2),
    "tp": RankLayout(tp=2),
    "pp": RankLayout(pp=2),
}
FIRST = [("MeasuredMLP", "single")]
CASES = [
    pytest.param(name, way, marks=[] if (name, way) in FIRST else [pytest.mark.slow])
    for name in ("MeasuredTransformer", "MeasuredConvolutions", "MeasuredMLP")
    for way in WAYS
    if (name, way) != ("MeasuredConvolutions", "tp")  # it has no plan for tensor parallelism
]
# glibc keeps freed blocks for later, more than FSDP's whole state: here it gives all of them back.
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
BENCHMARKS = {"PYTHONPATH": str(Path(__file__).parents[3])}  # whose clock the tasks share


def fields_of(name: str, strategy: str) -> dict[str, str]:
    """Fields of the task: stages cannot share a parameter."""
    transformer = name in ("MeasuredTransformer", "MeasuredNothing")
    return {"tied": "false"} if strategy == "pp" and transformer else {}


def taken(
    run_processes: Any, directory: Path, name: str, strategy: str, file: Path = TASKS, **more: str
) -> list[float]:
    """Bytes at each rank's peak, beyond what it held after its imports.

    Args:
        more: fields, and checkpoint_activations.
    """
    recompute = more.pop("checkpoint_activations", "none")
    ranks = WAYS[strategy].world_size
    report = directory / f"{name}-{strategy}.json"
    options = {
        "--threads": 1,
        "--device": "cpu",
        "--nproc": ranks,
        "--strategy": strategy,
        "--microbatches": MICROBATCHES,
        "--global-batch-size": MICROBATCHES * MICROBATCH,
        "--max-steps": 4,
        "--eval-every": "never",
        "--checkpoint-every": "never",
        "--heartbeat": 60,  # whoever replaced a rank would not have measured all steps
        "--run-dir": directory / f"{name}-{strategy}",
        "--purity": "warn",  # the probe counts the calls of the loss
        "--checkpoint-activations": recompute,
    }
    fields = {
        "report": report,
        "warmup": 1,
        "steps": 2,
        "loss_calls": MICROBATCHES // WAYS[strategy].data_ranks,
    }
    fields |= fields_of(name, strategy) | more
    words = [str(word) for option in options.items() for word in option]
    words += [word for field, value in fields.items() for word in ("--set", f"{field}={value}")]
    done = run_processes.paceline("train", f"{file}:{name}", "--quiet", *words, env=RETURNED | BENCHMARKS)
    assert done.returncode == 0, done.stderr
    return [float(json.loads(Path(f"{report}.{rank}").read_text())["memory_mib"]) * 2**20 for rank in range(ranks)]


@pytest.fixture(scope="module")
def nothing() -> dict[str, list[float]]:
    """What any process takes, by strategy: filled as it is measured."""
    return {}


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_the_peak_is_within_a_tenth(
    run_processes: Any, tmp_path: Path, nothing: dict[str, list[float]], name: str, strategy: str
) -> None:
    if strategy not in nothing:
        nothing[strategy] = taken(run_processes, tmp_path, "MeasuredNothing", strategy)
    task = TaskReference(f"{TASKS}:{name}", {"warmup": 1000, **fields_of(name, strategy)}).load()
    predicted = predict_memory(
        measure(task, MICROBATCH, "cpu"),
        WAYS[strategy],
        "exact",
        "fp32",
        num_microbatches=MICROBATCHES,
        shared_memory=True,
    )
    peaks = taken(run_processes, tmp_path, name, strategy)
    measured = max(peak - base for peak, base in zip(peaks, nothing[strategy], strict=True))
    print(f"{name} {strategy}: measured {measured / 2**20:.1f} MiB, {predicted.total / measured:.3f} predicted")
    assert predicted.total == pytest.approx(measured, rel=0.1), predicted


LANGUAGE = Path(__file__).with_name("language_models.py")
LANGUAGE_CASES = [
    *((kind, strategy, "none") for kind in ("llama", "qwen2", "gpt2", "cohere") for strategy in ("ddp", "fsdp")),
    *(("llama", "fsdp", recompute) for recompute in ("selective", "block")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "strategy", "recompute"), LANGUAGE_CASES)
def test_a_language_model_s_peak_is_within_a_tenth(
    run_processes: Any, tmp_path: Path, nothing: dict[str, list[float]], kind: str, strategy: str, recompute: Recompute
) -> None:
    small = f"language {strategy}"
    if small not in nothing:
        nothing[small] = taken(run_processes, tmp_path, "MeasuredSmallLanguageModel", strategy, LANGUAGE)
    task = TaskReference(f"{LANGUAGE}:MeasuredLanguageModel", {"warmup": 1000, "kind": kind}).load()
    layout = dataclasses.replace(WAYS[strategy], recompute=recompute)
    m = measure(task, MICROBATCH, "cpu")
    predicted = predict_memory(m, layout, "exact", "fp32", num_microbatches=MICROBATCHES, shared_memory=True)
    fields = {"kind": kind, "checkpoint_activations": recompute}
    peaks = taken(run_processes, tmp_path, "MeasuredLanguageModel", strategy, LANGUAGE, **fields)
    measured = max(peak - base for peak, base in zip(peaks, nothing[small], strict=True))
    print(f"{kind} {strategy} {recompute}: {measured / 2**20:.1f} MiB, {predicted.total / measured:.3f} predicted")
    assert predicted.total == pytest.approx(measured, rel=0.1), predicted
