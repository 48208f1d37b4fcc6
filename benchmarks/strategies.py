"""Strategies compared with the same written by hand with torch, each with its target; no torch is imported.

The compared suites take samples of contenders in turns; ``STUDIES`` measure several quantities, each with its bars.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks import slow_link
from benchmarks.results import (
    MEMORY,
    STEPS_PER_S,
    BenchComparison,
    BenchResult,
    Progress,
    Quantity,
    Spread,
    TargetResult,
    measure,
)
from benchmarks.rounds import REPORT, BenchCommand, Variant, read_json
from benchmarks.workloads import (
    PIPELINE_MICROBATCHES,
    RANKS,
    Workload,
    peer_commands,
    read_steps,
    train_command,
)
from paceline.core.errors import ConfigError, LaunchError

ComparedName = Literal["fsdp", "tp", "pp", "memory", "schedules"]
StudyName = Literal["pipeline", "pipedream", "slow-link", "slow-worker"]
SuiteName = ComparedName | StudyName

PIPEDREAM_TASK, PIPEDREAM_SPLIT = "fashion-mnist", (2, 3)
"""The first convolution with what follows it, and the rest: given, so that both schedules have the same stages."""

PS_WORKERS = 2
PS_MODES = {
    "sync": ("--ps-mode", "sync"),
    "ssp, 2 steps": ("--ps-mode", "ssp", "--ps-staleness", "2"),
    "async": ("--ps-mode", "async"),
}
"""Ways in which a parameter server applies gradients, and their options of ``paceline train``."""

_PLAIN_DEEP = "benchmarks.tasks:DeepMLP"
_GIANT = "benchmarks.tasks:TimedGiantMLP"
_MEMORY_RANKS = 4
# glibc keeps freed blocks for later; here it gives them back, so that what is in use is what is measured.
_RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_LIMIT_S = 1800.0
_PIPEDREAM_LIMIT_S = 600.0
_PAIRS_A_ROUND = 7
_POINTS = " points"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Contenders, the first of which the others are measured against.

    Attributes:
        name: what ``--suite`` takes.
        title: for people.
        quantity: what is measured; ratios are of it.
        contenders: the baseline first.
        bars: contender's name -> the ratio to reach: at least this, or at most where ``at_most``; a contender
            without one is only for comparison.
        at_most: lower is better.
    """

    name: ComparedName
    title: str
    quantity: Quantity
    contenders: Sequence[Variant]
    bars: dict[str, float]
    at_most: bool = False


def bench_strategies(
    *, chosen: Sequence[SuiteName], rounds: int, steps: int, warmup: int, progress: Progress
) -> BenchResult:
    """Measure suites one after the other; in each, contenders take turns.

    Args:
        chosen: which suites; none: all that need no root.
        rounds: how often each contender is measured.
        steps: steps to measure.
        warmup: steps before.
        progress: shows each round.

    Raises:
        ConfigError: a number is out of range.
        LaunchError: a process failed.
    """
    for name, value, least in (("rounds", rounds, 1), ("steps", steps, 1), ("warmup", warmup, 1)):
        if value < least:
            raise ConfigError(f"--{name} must be at least {least}, but is {value}.")
    comparisons: list[BenchComparison] = []
    verdicts: list[TargetResult] = []
    for suite in suites(steps, warmup):
        if chosen and suite.name not in chosen:
            continue
        comparison = measure(suite.title, [suite.quantity], suite.contenders, rounds, progress)
        comparisons.append(comparison)
        verdicts += [
            TargetResult(suite.name, row.title, row.ratio, suite.bars[row.name], suite.at_most)
            for row in comparison.rows
            if row.name in suite.bars
        ]
    for name, study in STUDIES.items():
        if name in (chosen or BY_DEFAULT):
            found = study(rounds, progress)
            for verdict in found:
                progress(" ".join(verdict.cells[:4]))
            verdicts += found
    return BenchResult(
        benchmark="strategies",
        document={"settings": {"rounds": rounds, "threads_per_rank": 1}},
        comparisons=comparisons,
        verdicts=verdicts,
        remarks=[
            f"gloo, 1 thread a rank; rounds in turns: {rounds}; ratios within each round, medians; warm-up excluded."
        ],
    )


def suites(steps: int, warmup: int) -> Iterator[Suite]:
    """What can be measured."""
    deep = Workload(name="deep-mlp", title="deep MLP", task="benchmarks.tasks:TimedDeepMLP", warmup=warmup, steps=steps)
    for name, title, microbatches in (
        ("fsdp", "fully_shard", RANKS),
        ("tp", "parallelize_module", 1),
        ("pp", "torch.distributed.pipelining, 1F1B", PIPELINE_MICROBATCHES),
    ):
        yield Suite(
            name=name,  # type: ignore[arg-type]
            title=f"{name}, deep MLP, {RANKS} ranks",
            quantity=STEPS_PER_S,
            contenders=[
                _by_hand(name, f"by hand: {title}", deep),
                _paceline(name, f"--strategy {name}", ["--strategy", name], microbatches, steps, warmup),
            ],
            bars={name: 0.95},
        )
    yield Suite(
        name="schedules",
        title=f"pipeline schedules, deep MLP, {RANKS} ranks, {PIPELINE_MICROBATCHES} micro-batches",
        quantity=STEPS_PER_S,
        contenders=[
            _paceline(
                schedule,
                f"--pp-schedule {schedule}",
                ["--strategy", "pp", "--pp-schedule", schedule],
                PIPELINE_MICROBATCHES,
                steps,
                warmup,
            )
            for schedule in ("gpipe", "1f1b", "interleaved", "zero-bubble")
        ],
        bars={},
    )
    yield Suite(
        name="memory",
        title=f"peak memory, 102M-parameter MLP, {_MEMORY_RANKS} ranks",
        quantity=MEMORY,
        contenders=[_in_memory("ddp"), _in_memory("fsdp")],
        bars={"fsdp": 0.40},
        at_most=True,
    )


def _by_hand(loop: str, title: str, workload: Workload) -> Variant:
    return Variant(
        name=f"{loop}-by-hand",
        title=title,
        commands=lambda directory: peer_commands(loop, workload, directory),
    )


def _paceline(name: str, title: str, options: Sequence[str], microbatches: int, steps: int, warmup: int) -> Variant:
    words = {
        "--nproc": RANKS,
        "--microbatches": microbatches,
        "--max-steps": warmup + steps,
        "--log-every": math.gcd(warmup, steps),
        **dict(zip(options[::2], options[1::2], strict=True)),
    }
    return Variant(
        name=name,
        title=title,
        commands=lambda directory: [BenchCommand(train_command(_PLAIN_DEEP, directory, words))],
        read=lambda directory: read_steps(directory, warmup, steps),
    )


def _in_memory(strategy: str) -> Variant:
    words = {
        "--nproc": _MEMORY_RANKS,
        "--microbatches": _MEMORY_RANKS,
        "--global-batch-size": 4 * _MEMORY_RANKS,
        "--max-steps": 4,
        "--strategy": strategy,
    }

    def commands(directory: Path) -> list[BenchCommand]:
        fields = {"warmup": 1, "steps": 2, "report": directory / REPORT}
        return [BenchCommand(train_command(_GIANT, directory, words, fields), _RETURNED)]

    return Variant(name=strategy, title=f"--strategy {strategy}", commands=commands)


# --- studies: each is given the number of rounds, and shows its progress ---


def _pipeline(rounds: int, progress: Progress) -> list[TargetResult]:
    """Balanced over equal stages, this runtime over torch's, and what 1F1B holds over what GPipe does."""
    pairs = rounds * _PAIRS_A_ROUND
    progress(f"pipeline: two processes, {pairs} times some steps of each in turn")
    with _explain_failures("pipeline"):
        found = json.loads(_output([sys.executable, "-m", "benchmarks.pipeline", str(pairs)]))
    held = found["activations_of_1f1b_mib"] / found["activations_of_gpipe_mib"]
    return [
        TargetResult("pipeline", "balanced over equal stages", _spread(found["balanced_over_equal"]), 1.25),
        TargetResult("pipeline", "over torch's stages by hand", _spread(found["over_torch_by_hand"]), 0.95),
        TargetResult("pipeline", "memory of 1F1B over GPipe's", Spread.of([held]), 1.0, at_most=True),
    ]


def _pipedream(rounds: int, progress: Progress) -> list[TargetResult]:
    """PipeDream's throughput over 1F1B's on the same stages, and by how much it is less accurate."""
    progress("pipedream: trainings under 1f1b and pipedream in turns")
    results: dict[str, list[dict[str, Any]]] = {"1f1b": [], "pipedream": []}
    with _explain_failures("pipedream"), _temporary_directory() as directory:
        for number in range(rounds):
            for schedule, found in results.items():
                found.append(_train_pipedream(directory / f"{schedule}-{number}", schedule))
    pairs = list(zip(results["pipedream"], results["1f1b"], strict=True))
    fast, slow = (100 * result["metrics"]["test"]["accuracy"] for result in pairs[-1])
    return [
        TargetResult(
            "pipedream",
            "samples/s over 1F1B's",
            Spread.of([fast["samples_per_s"] / slow["samples_per_s"] for fast, slow in pairs]),
            1.15,
        ),
        TargetResult("pipedream", "less accurate by", Spread.of([slow - fast]), 0.5, at_most=True, unit=_POINTS),
    ]


def _train_pipedream(directory: Path, schedule: str) -> dict[str, Any]:
    """Train the ConvNet in two stages; return the run's result."""
    options = {
        "--nproc": len(PIPEDREAM_SPLIT),
        "--strategy": "pp",
        "--pp-schedule": schedule,
        "--pp-split": ",".join(map(str, PIPEDREAM_SPLIT)),
        "--microbatches": 4,
        "--max-steps": 150,
    }
    command = train_command(PIPEDREAM_TASK, directory, options)
    subprocess.run(command, check=True, timeout=_PIPEDREAM_LIMIT_S)
    return read_json(directory / "run" / "result.json")


def _slow_link(rounds: int, progress: Progress) -> list[TargetResult]:
    """How many times less crosses the link than with plain ddp, and how much less accurate the model is."""
    less: dict[str, list[float]] = {}
    worse: dict[str, list[float]] = {}
    for number in range(rounds):
        progress(f"slow-link, round {number + 1}/{rounds}: two hosts, {slow_link.RATE_MBIT} Mbit/s")
        with _explain_failures("slow-link"), _temporary_directory() as directory:
            plain, *others = slow_link.measure(directory, seed=number)
        for one in others:
            less.setdefault(one.name, []).append(plain.sent_bytes / one.sent_bytes)
            worse.setdefault(one.name, []).append(100 * (plain.accuracy - one.accuracy))
    bars = {contender.name: contender.bar for contender in slow_link.CONTENDERS}
    most = 100 * slow_link.MOST_WORSE
    verdicts = []
    for name, ratios in less.items():
        bar = bars[name]
        verdicts.append(TargetResult("slow-link", f"{name}: times less sent", Spread.of(ratios), bar))
        points = Spread.of(worse[name])
        limit = None if bar is None else most
        verdicts.append(
            TargetResult("slow-link", f"{name}: less accurate by", points, limit, at_most=True, unit=_POINTS)
        )
    return verdicts


def _slow_worker(rounds: int, progress: Progress) -> list[TargetResult]:
    """Parameter servers with one slow worker: throughput and accuracy against the synchronous mode's."""
    ratios: dict[str, list[float]] = {}
    worse: dict[str, list[float]] = {}
    for number in range(rounds):
        progress(f"slow-worker, round {number + 1}/{rounds}: a server, two workers, one of them slow")
        with _explain_failures("slow-worker"), _temporary_directory() as directory:
            results = {name: train_with_slow_worker(directory / name.partition(",")[0], name) for name in PS_MODES}
        sync = results.pop("sync")
        for name, result in results.items():
            ratios.setdefault(name, []).append(result["samples_per_s"] / sync["samples_per_s"])
            accuracy, of_sync = (found["metrics"]["test"]["accuracy"] for found in (result, sync))
            worse.setdefault(name, []).append(100 * (of_sync - accuracy))
    return [
        verdict
        for name in ratios
        for verdict in (
            TargetResult("slow-worker", f"{name}: samples/s over sync's", Spread.of(ratios[name]), None),
            TargetResult(
                *("slow-worker", f"{name}: less accurate by", Spread.of(worse[name]), None),
                at_most=True,
                unit=_POINTS,
            ),
        )
    ]


def train_with_slow_worker(directory: Path, mode: str, *, steps: int = 400) -> dict[str, Any]:
    """Train with one server and two workers, of which one is slow, in a mode of ``PS_MODES``.

    Args:
        directory: takes the run.
        mode: its name.
        steps: of the training.

    Returns:
        The run's result: ``samples_per_s``, ``metrics``, ``staleness`` where something can be stale.

    Raises:
        subprocess.CalledProcessError: the training failed.
    """
    command = [
        *(sys.executable, "-m", "paceline", "train", "benchmarks.tasks:OneSlowWorker"),
        *("--nproc", str(1 + PS_WORKERS), "--strategy", "ps", *PS_MODES[mode], "--run-dir", str(directory)),
        *("--microbatches", "4", "--global-batch-size", "128", "--max-steps", str(steps)),
        *("--eval-every", "never", "--threads", "1", "--quiet", "--json"),
    ]
    result: dict[str, Any] = json.loads(_output(command).splitlines()[-1])
    return result


STUDIES: Mapping[StudyName, Callable[[int, Progress], list[TargetResult]]] = {
    "pipeline": _pipeline,
    "pipedream": _pipedream,
    "slow-link": _slow_link,
    "slow-worker": _slow_worker,
}

BY_DEFAULT: tuple[StudyName, ...] = ("pipeline", "pipedream", "slow-worker")
"""Those that need no root."""


def _spread(found: Mapping[str, float]) -> Spread:
    return Spread(found["median"], found["low"], found["high"])


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LIMIT_S).stdout


@contextmanager
def _temporary_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as directory:
        yield Path(directory)


@contextmanager
def _explain_failures(suite: str) -> Iterator[None]:
    """One error, whatever failed: a training, or hosts that could not be made."""
    try:
        yield
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or "").strip().splitlines()
        raise LaunchError(
            f"--suite {suite}: a process ended with exit code {error.returncode}" + (f": {said[-1]}" if said else ".")
        ) from error
    except RuntimeError as error:
        raise LaunchError(f"--suite {suite}: {error}. Leave the suite out, or run it as root.") from error
