"""Strategies beside the same thing written by hand with torch, each with the bar it has to meet; no torch."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.core.errors import ConfigError
from paceline.insight.bench.bars import TargetResult
from paceline.insight.bench.comparison import MEMORY, STEPS_PER_S, BenchComparison, Quantity, compare
from paceline.insight.bench.machine import describe_machine
from paceline.insight.bench.rounds import BenchCommand, Sample, Variant, interleave, read_report
from paceline.insight.bench.studies import BY_DEFAULT, STUDIES, Progress, StudyName
from paceline.insight.bench.workload import BATCH_SIZE, MICRO_BATCHES, RANKS

ComparedName = Literal["fsdp", "tp", "pp", "memory", "schedules"]
SuiteName = ComparedName | StudyName

_DEEP = "paceline.insight.bench.tasks:TimedDeepMLP"
_PLAIN_DEEP = "paceline.insight.bench.tasks:DeepMLP"
_GIANT = "paceline.insight.bench.tasks:TimedGiantMLP"
_MEMORY_RANKS = 4
# glibc keeps freed blocks for later; here it gives them back, so that what is in use is what is measured.
_RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Contenders, the first of which the others are measured against.

    Attributes:
        name: what ``--suite`` takes.
        title: for people.
        quantity: what is measured; ratios are of it.
        contenders: the baseline first.
        bars: contender's name -> the ratio to reach: at least this, or at most where ``at_most``; a contender
            without one is there to be looked at.
        at_most: lower is better.
    """

    name: ComparedName
    title: str
    quantity: Quantity
    contenders: Sequence[Variant]
    bars: dict[str, float]
    at_most: bool = False


@dataclass(frozen=True)
class StrategiesResult:
    """What ``paceline bench strategies`` found."""

    rounds: int
    comparisons: Sequence[BenchComparison]
    verdicts: Sequence[TargetResult]

    def as_json(self) -> dict[str, Any]:
        """All of it, with the machine."""
        return {
            "benchmark": "strategies",
            "machine": describe_machine(),
            "settings": {"rounds": self.rounds, "threads_per_rank": 1},
            "comparisons": [comparison.as_json() for comparison in self.comparisons],
            "verdicts": [verdict.as_json() for verdict in self.verdicts],
        }

    def notes(self) -> list[str]:
        """The setting and the machine."""
        machine = describe_machine()
        return [
            f"gloo, 1 thread a rank; rounds in turns: {self.rounds}; ratios within each round, medians; "
            "warm-up excluded.",
            f"{machine['cpu']}, {machine['cores']} cores, {machine['memory']}; {machine['system']}; "
            f"Python {machine['python']}, torch {machine['torch']}; {machine['date']}.",
        ]


def bench_strategies(
    *, chosen: Sequence[SuiteName], rounds: int, steps: int, warmup: int, progress: Progress
) -> StrategiesResult:
    """Measure suites one after the other; in each, contenders take turns.

    Args:
        chosen: which suites; none: all that anybody may run.
        rounds: how often each contender is measured.
        steps: steps to measure.
        warmup: steps before.
        progress: told about each round.

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
        comparison = _measure(suite, rounds, progress)
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
    return StrategiesResult(rounds, comparisons, verdicts)


def suites(steps: int, warmup: int) -> Iterator[Suite]:
    """What can be measured."""
    for name, title, microbatches in (
        ("fsdp", "fully_shard", RANKS),
        ("tp", "parallelize_module", 1),
        ("pp", "torch.distributed.pipelining, 1F1B", MICRO_BATCHES),
    ):
        yield Suite(
            name=name,  # type: ignore[arg-type]
            title=f"{name}, deep MLP, {RANKS} ranks",
            quantity=STEPS_PER_S,
            contenders=[
                _by_hand(name, f"by hand: {title}", steps, warmup),
                _paceline(name, f"--strategy {name}", ["--strategy", name], microbatches, steps, warmup),
            ],
            bars={name: 0.95},
        )
    yield Suite(
        name="schedules",
        title=f"pipeline schedules, deep MLP, {RANKS} ranks, {MICRO_BATCHES} micro-batches",
        quantity=STEPS_PER_S,
        contenders=[
            _paceline(
                schedule,
                f"--pp-schedule {schedule}",
                ["--strategy", "pp", "--pp-schedule", schedule],
                MICRO_BATCHES,
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


def _measure(suite: Suite, rounds: int, progress: Progress) -> BenchComparison:
    def on_sample(number: int, contender: Variant, sample: Sample) -> None:
        value = f"{suite.quantity.text(sample[suite.quantity.key])} {suite.quantity.title}"
        progress(f"round {number}/{rounds}  {suite.title}  {contender.title}  {value}")

    samples = interleave(suite.contenders, rounds, on_sample)
    return compare(suite.title, [suite.quantity], suite.contenders, samples)


def _by_hand(peer: str, title: str, steps: int, warmup: int) -> Variant:
    def commands(directory: Path) -> list[BenchCommand]:
        job = {
            "task": _DEEP,
            "fields": {"warmup": warmup, "steps": steps, "report": str(directory / "report.json")},
            "batch_size": BATCH_SIZE,
            "total_steps": warmup + steps + 1,
            "init_method": (directory / "rendezvous").as_uri(),
        }
        argv = [
            sys.executable,
            "-m",
            "paceline.insight.bench.peers",
            f"paceline.insight.bench.peers.{peer}",
            json.dumps(job),
        ]
        return [BenchCommand(argv, _variables(rank)) for rank in range(RANKS)]

    return Variant(name=f"{peer}-by-hand", title=title, commands=commands)


def _paceline(name: str, title: str, options: Sequence[str], microbatches: int, steps: int, warmup: int) -> Variant:
    def commands(directory: Path) -> list[BenchCommand]:
        words = {
            "--nproc": RANKS,
            "--microbatches": microbatches,
            "--global-batch-size": RANKS * BATCH_SIZE,
            "--max-steps": warmup + steps,
            "--log-every": math.gcd(warmup, steps),
        }
        return [BenchCommand(_train(_PLAIN_DEEP, directory, words, options))]

    return Variant(
        name=name,
        title=title,
        commands=commands,
        read=lambda directory: _read_steps(directory, warmup, steps),
    )


def _in_memory(strategy: str) -> Variant:
    def commands(directory: Path) -> list[BenchCommand]:
        words = {
            "--nproc": _MEMORY_RANKS,
            "--microbatches": _MEMORY_RANKS,
            "--global-batch-size": 4 * _MEMORY_RANKS,
            "--max-steps": 4,
            "--strategy": strategy,
        }
        fields = {"warmup": 1, "steps": 2, "report": directory / "report.json"}
        sets = [word for key, value in fields.items() for word in ("--set", f"{key}={value}")]
        return [BenchCommand(_train(_GIANT, directory, words, sets), _RETURNED)]

    return Variant(name=strategy, title=f"--strategy {strategy}", commands=commands, read=read_report)


def _train(task: str, directory: Path, words: dict[str, Any], options: Sequence[str]) -> list[str]:
    alike = {
        "--threads": 1,
        "--device": "cpu",
        "--eval-every": "never",
        "--checkpoint-every": "never",
        "--run-dir": directory / "run",
    }
    command = [sys.executable, "-m", "paceline", "train", task, "--quiet", *options]
    return command + [str(word) for option in (alike | words).items() for word in option]


def _read_steps(directory: Path, warmup: int, steps: int) -> Sample:
    """The time from one record of the run to another: every strategy writes them."""
    lines = (directory / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    at = {record["step"]: record["seconds"] for record in records if record["kind"] == "train"}
    seconds = at[warmup + steps] - at[warmup]
    return {"steps": steps, "seconds": seconds, STEPS_PER_S.key: steps / seconds}


def _variables(rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform.startswith("linux") else "lo0",
    }
